#!/usr/bin/env python3
"""Makes the golden files of tests/golden with transformers' own MiniMaxM2, in float32.

  make_goldens.py --maker build/release/tests/make_checkpoint [--out tests/golden/data] [--case NAME ...]

Checkpoints are not committed: the maker writes them from a geometry and a seed, equal on every machine. This script
reads their tensors itself (FP8: e4m3 times block scale, in float32), fills transformers' model with them, and stores for a few
prompts of 1 to 300 tokens the logits at some positions and a greedy continuation of 64 tokens. It reports the margins that decide whether another right implementation may
differ: the distance between the last expert chosen and the next one, and between the two largest logits.

Needs: torch, transformers (with minimax_m2), safetensors, numpy.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

import numpy as np
import torch
from safetensors import safe_open
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM
from transformers import __version__ as transformers_version

PROMPT_LENGTHS = [1, 2, 7, 16, 17, 64, 300]
CONTINUATION = 64
POSITIONS = 10  # stored per longer prompt

# Below these, two right implementations may choose differently: float32 noise, with room.
GATE_TIE = 1e-5   # of scores in (0, 1); a position that attends to a tie inherits it
# For checkpoints that the engine runs with BF16 activations: their rounding moves scores by up to 1e-3. Another expert
# is then another answer at that position; those that attend to it hardly move.
GATE_TIE_BF16 = 2e-3
TOP2_TIE = 2e-5   # of the largest |logit|
DRAWS = 8         # prompts tried for one whose continuation has no tie; the ones passed over are counted

# The seeds of the BF16 and FP8 cases were picked from a few so that hardly a stored position is tied; the counts are printed.
CASES = [
    # name, dtype, seed, fused, fields of config.json
    ("groups_of_four", "f32", 11, False, dict(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=16, rotary_dim=8,
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=80, vocab_size=320)),
    ("full_rotation", "f32", 12, False, dict(
        hidden_size=120, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=24, rotary_dim=24,
        num_local_experts=5, num_experts_per_tok=3, intermediate_size=56, vocab_size=331)),
    ("one_kv_head", "f32", 13, False, dict(
        hidden_size=160, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=1, head_dim=32, rotary_dim=8,
        num_local_experts=32, num_experts_per_tok=8, intermediate_size=48, vocab_size=384)),
    ("one_expert_a_token", "f32", 14, False, dict(
        hidden_size=72, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=20, rotary_dim=10,
        num_local_experts=16, num_experts_per_tok=1, intermediate_size=40, vocab_size=320)),
    ("fused_names", "f32", 15, True, dict(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32, rotary_dim=16,
        num_local_experts=16, num_experts_per_tok=4, intermediate_size=64, vocab_size=320)),
    ("bf16_small", "bf16", 51, False, dict(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32, rotary_dim=16,
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, vocab_size=320)),
    ("bf16_wide", "bf16", 42, False, dict(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=48, rotary_dim=24,
        num_local_experts=6, num_experts_per_tok=3, intermediate_size=96, vocab_size=320)),
    ("fp8_blocks", "fp8", 41, False, dict(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=64, rotary_dim=32,
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=128, vocab_size=320)),
    ("fp8_ragged_blocks", "fp8", 62, False, dict(
        hidden_size=160, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=32, rotary_dim=16,
        num_local_experts=6, num_experts_per_tok=2, intermediate_size=144, vocab_size=320)),
]


def read_tensors(directory):
    """All tensors of the checkpoint in float32, FP8 ones dequantized."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    raw = {}
    for file in sorted(set(index.values())):
        with safe_open(directory / file, "pt") as f:
            for name in f.keys():
                raw[name] = f.get_tensor(name)
    out = {}
    for name, tensor in raw.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.to(torch.float32)
        if tensor.dtype == torch.float8_e4m3fn:
            scale = raw[name + "_scale_inv"]
            rows = scale.repeat_interleave(128, -2)[..., : value.shape[-2], :]
            value = value * rows.repeat_interleave(128, -1)[..., : value.shape[-1]]
        out[name] = value
    return out


def state_dict(tensors, experts):
    """transformers' names: experts stacked, gate rows before up rows."""
    out = {}
    for name, value in tensors.items():
        if ".experts." in name and not name.endswith("_proj"):
            continue
        out[name.replace(".block_sparse_moe.", ".mlp.")] = value
    prefixes = {n.split("experts.")[0] for n in tensors if ".experts." in n and not n.endswith("_proj")}
    for p in prefixes:
        w = {m: [tensors[f"{p}experts.{e}.{m}.weight"] for e in range(experts)] for m in ("w1", "w2", "w3")}
        q = p.replace(".block_sparse_moe.", ".mlp.")
        out[q + "experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w["w1"], w["w3"])])
        out[q + "experts.down_proj"] = torch.stack(w["w2"])
    return out


def reference_model(directory):
    config = json.loads((directory / "config.json").read_text())
    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype", "attn_type_list",
                                                            "architectures", "model_type")}
    # Both spellings of the rotated part: some versions of transformers read only the second.
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": float(config["rope_theta"]),
                                 "partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}
    fields["bos_token_id"] = fields["eos_token_id"] = None
    model = MiniMaxM2ForCausalLM(MiniMaxM2Config(**fields))
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    state = state_dict(read_tensors(directory), config["num_local_experts"])
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [m for m in missing if "inv_freq" not in m]
    assert not missing and not unexpected, (missing, unexpected)
    model = model.to(torch.float32).eval()
    inv_freq = model.model.rotary_emb.inv_freq
    assert len(inv_freq) * 2 == config["rotary_dim"], "transformers rotates another part of the head than the config says"
    return model, config


class GateMargins:
    """Per token and layer: the choice's margin, and whether the selection bias changed it."""

    def __init__(self, model, top_k):
        self.margins = []
        self.changed = 0
        self.choices = 0
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self.hook(layer.mlp, top_k))

    def hook(self, mlp, top_k):
        def record(module, args, result):
            score = torch.sigmoid(torch.nn.functional.linear(args[0].double(), module.weight.double()))
            choice = score + mlp.e_score_correction_bias.double()
            order = choice.sort(dim=-1, descending=True)
            self.margins.append(order.values[:, top_k - 1] - order.values[:, top_k])
            plain = score.topk(top_k, dim=-1).indices.sort(dim=-1).values
            self.changed += int((plain != order.indices[:, :top_k].sort(dim=-1).values).any(dim=-1).sum())
            self.choices += len(choice)
        return record

    def take(self):
        """Smallest margin per position over the layers of the last forward pass."""
        out = torch.stack(self.margins).min(dim=0).values.numpy() if self.margins else None  # nothing was run
        self.margins = []
        return out


def stored_positions(length):
    if length <= POSITIONS:
        return list(range(length))
    return sorted({round(i * (length - 1) / (POSITIONS - 1)) for i in range(POSITIONS)})


def continue_greedily(model, gates, tokens):
    """Without a cache: the plainest computation. Ends early where a tie makes the next token a matter of taste."""
    sequence, continuation, top2 = list(tokens), [], []
    while len(continuation) < CONTINUATION:
        last = model(torch.tensor([sequence])).logits[0, -1]
        gate = gates.take()
        two = last.topk(2)
        relative = ((two.values[0] - two.values[1]) / last.abs().max()).item()
        if relative < TOP2_TIE or gate.min() < GATE_TIE:
            break
        continuation.append(int(two.indices[0]))
        top2.append(relative)
        sequence.append(continuation[-1])
    return continuation, top2


@torch.no_grad()
def run_case(name, dtype, seed, fused, fields, maker, out):
    with tempfile.TemporaryDirectory() as tmp:
        directory = pathlib.Path(tmp) / name
        command = [maker, str(directory), dtype, str(seed)] + (["--fused"] if fused else [])
        inspected = subprocess.run(command + [f"{k}={v}" for k, v in fields.items()], check=True, capture_output=True, text=True).stdout
        fingerprint = next(line.split()[1] for line in inspected.splitlines() if line.startswith("fingerprint"))
        model, config = reference_model(directory)
    gates = GateMargins(model, config["num_experts_per_tok"])
    rng = np.random.default_rng(seed)
    rows, prompts, ties, redrawn, logit_std = [], [], 0, 0, []
    for length in PROMPT_LENGTHS:
        for draw in range(DRAWS):
            tokens = rng.integers(0, config["vocab_size"], length).tolist()
            gates.take()
            logits = model(torch.tensor([tokens])).logits[0]
            own = gates.take()
            margin = np.minimum.accumulate(own)
            continuation, top2 = continue_greedily(model, gates, tokens)
            if len(continuation) == CONTINUATION:
                break
            redrawn += 1
        logit_std.append(logits.std(dim=-1).mean().item())
        positions = stored_positions(length)
        tied = [p for p in positions if margin[p] < GATE_TIE or (dtype != "f32" and own[p] < GATE_TIE_BF16)]
        ties += len(tied)
        begin = len(rows)
        rows.extend(logits[p].numpy() for p in positions)
        prompts.append(dict(tokens=tokens, positions=positions, tied=tied, row=begin, continuation=continuation,
                            min_gate_margin=float(margin[-1]), min_top2_margin=min(top2, default=0.0)))
    np.save(out / f"{name}.npy", np.stack(rows).astype(np.float32))
    short = [len(p["continuation"]) for p in prompts if len(p["continuation"]) < CONTINUATION]
    print(f"{name:20s} {dtype:5s} rows {len(rows):3d} tied {ties}, prompts redrawn {redrawn}  logit std {np.mean(logit_std):.2f}  "
          f"bias changed {gates.changed / gates.choices:5.1%} of choices  "
          f"least gate margin {min(p['min_gate_margin'] for p in prompts):.1e}  "
          f"least top-2 margin {min(p['min_top2_margin'] for p in prompts):.1e}  short continuations {short}", flush=True)
    assert ties <= 0.02 * len(rows), "too many ties: take another seed"
    return dict(name=name, dtype=dtype, seed=seed, fused=fused, set={k: str(v) for k, v in fields.items()},
                fingerprint=fingerprint, vocab_size=config["vocab_size"], rows=len(rows), ties=ties, redrawn=redrawn,
                bias_changed=gates.changed, choices=gates.choices, prompts=prompts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maker", required=True, help="the make_checkpoint program")
    parser.add_argument("--out", default="tests/golden/data", type=pathlib.Path)
    parser.add_argument("--case", action="append", help="only these, printed and not written to goldens.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [c for c in CASES if not args.case or c[0] in args.case]
    cases = [run_case(*c, maker=args.maker, out=args.out) for c in chosen]
    if args.case:
        return
    document = dict(made_by="tools/golden/make_goldens.py", transformers=transformers_version, torch=torch.__version__,
                    gate_tie=GATE_TIE, gate_tie_bf16=GATE_TIE_BF16, top2_tie=TOP2_TIE, cases=cases)
    text = json.dumps(document, separators=(",", ":"))
    (args.out / "goldens.json").write_text(text.replace('{"name"', '\n{"name"').replace('{"tokens"', '\n {"tokens"') + "\n")


if __name__ == "__main__":
    main()
