#!/usr/bin/env python3
"""Writes a trained state as a checkpoint in the layout of the released MiniMax-M2.

  export.py --state DIR/state.pt --tokenizer DIR --out DIR [--dtype fp8|bf16]

fp8: projections and experts in E4M3 with one F32 multiplier per 128 x 128 block, quantized from the BF16 weights; embeddings,
norms and lm_head in BF16; the gate and its selection bias in F32. bf16: the weights before quantization.
"""

import argparse
import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file

import rendering
from model import Geometry

BLOCK, E4M3_MAX = 128, 448.0
FILES = 2


def quantized(w):
    """(E4M3 matrix, multipliers) of a matrix [outputs, inputs]."""
    w = w.float()
    rows, cols = -(-w.shape[0] // BLOCK), -(-w.shape[1] // BLOCK)
    padded = torch.zeros(rows * BLOCK, cols * BLOCK)
    padded[:w.shape[0], :w.shape[1]] = w
    blocks = padded.view(rows, BLOCK, cols, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-10) / E4M3_MAX
    q = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return q.view_as(padded)[:w.shape[0], :w.shape[1]].contiguous().to(torch.float8_e4m3fn), scale


def tensors(state, geometry, dtype):
    """[(name, tensor)] in the order of the released files."""
    out = []

    def matrix(name, w):
        w = w.to(torch.bfloat16).contiguous()
        if dtype == "bf16":
            out.append((name, w))
        else:
            q, scale = quantized(w)
            out.extend([(name, q), (name + "_scale_inv", scale)])

    def plain(name, w, to=torch.bfloat16):
        out.append((name, w.to(to).contiguous()))

    plain("model.embed_tokens.weight", state["embed.weight"])
    for n in range(geometry.num_hidden_layers):
        p, q = f"layers.{n}.", f"model.layers.{n}."
        plain(q + "input_layernorm.weight", state[p + "input_layernorm.weight"])
        for part in "qkvo":
            matrix(f"{q}self_attn.{part}_proj.weight", state[f"{p}attention.{part}_proj.weight"])
        for part in "qk":
            plain(f"{q}self_attn.{part}_norm.weight", state[f"{p}attention.{part}_norm.weight"])
        plain(q + "post_attention_layernorm.weight", state[p + "post_attention_layernorm.weight"])
        plain(q + "block_sparse_moe.gate.weight", state[p + "experts.gate"], torch.float32)
        plain(q + "block_sparse_moe.e_score_correction_bias", state[p + "experts.bias"], torch.float32)
        for e in range(geometry.num_local_experts):
            for part in ("w1", "w2", "w3"):
                matrix(f"{q}block_sparse_moe.experts.{e}.{part}.weight", state[f"{p}experts.{part}"][e].T)
    plain("model.norm.weight", state["norm.weight"])
    plain("lm_head.weight", state["lm_head.weight"])
    return out


def config(g, dtype):
    out = {
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * g.num_hidden_layers, "head_dim": g.head_dim,
        "hidden_act": "silu", "hidden_size": g.hidden_size, "intermediate_size": g.intermediate_size,
        "max_position_embeddings": g.max_position_embeddings, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
        "num_attention_heads": g.num_attention_heads, "num_experts_per_tok": g.num_experts_per_tok,
        "num_hidden_layers": g.num_hidden_layers, "num_key_value_heads": g.num_key_value_heads,
        "num_local_experts": g.num_local_experts, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "rms_norm_eps": g.rms_norm_eps, "rope_theta": int(g.rope_theta), "rotary_dim": g.rotary_dim, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True, "vocab_size": g.vocab_size}
    if dtype == "bf16":
        out["dtype"] = "bfloat16"
    else:
        out["quantization_config"] = {
            "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    return out


def export(state_file, tokenizer, out, dtype):
    state = torch.load(state_file)
    g = Geometry(**state["geometry"])
    out.mkdir(parents=True, exist_ok=True)
    named = tensors(state["model"], g, dtype)
    # Cut between layers: half of the layers in each file.
    half = next(i for i, (name, _) in enumerate(named) if name.startswith(f"model.layers.{g.num_hidden_layers // 2}."))
    parts = [named[:half], named[half:]]
    weight_map, size = {}, 0
    for i, part in enumerate(parts):
        file = f"model-{i:05d}-of-{FILES:05d}.safetensors"
        save_file(dict(part), str(out / file), metadata={"format": "pt"})
        for name, t in part:
            weight_map[name] = file
            size += t.numel() * t.element_size()
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(config(g, dtype), indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(tokenizer / name, out / name)
    shutil.copyfile(rendering.TEMPLATE, out / "chat_template.jinja")
    print(f"{out}: {len(named)} tensors, {size} bytes, step {state['step']}, {state['tokens']} tokens seen")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True, help="directory of train_tokenizer.py's files")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8")
    args = parser.parse_args()
    export(args.state, args.tokenizer, args.out, args.dtype)


if __name__ == "__main__":
    main()
