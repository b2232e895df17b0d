"""Writes a made MiniMax-M2 checkpoint as a GGUF file of the same weights, for bench/peers/run.

usage: write_gguf.py CHECKPOINT_DIR OUT.gguf

BF16 matrices go over as they are. FP8 ones (128x128 scales) become Q8_0, lm_head with them, as the peer's own
quantizer would have it; embeddings, of which a token reads one row, stay BF16. Norms, gates and biases are F32.
"""

import concurrent.futures
import json
import pathlib
import sys

import gguf
import numpy as np

BLOCK = 128  # rows and columns of an FP8 scale
GROUP = 32   # values of a Q8_0 scale
Kind = gguf.GGMLQuantizationType


def e4m3_values():
    """The 256 values of E4M3 (no infinities; 0x7f and 0xff are NaN)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    value[exponent * 8 + mantissa == 127] = np.nan
    return np.where(codes >= 128, -value, value).astype(np.float32)


E4M3 = e4m3_values()


class Checkpoint:
    """Tensors of safetensors files, mapped."""

    def __init__(self, directory):
        self.tensors = {}
        for path in sorted(directory.glob("*.safetensors")):
            raw = np.memmap(path, dtype=np.uint8, mode="r")
            start = 8 + int(raw[:8].view("<u8")[0])
            for name, entry in json.loads(bytes(raw[8:start])).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    self.tensors[name] = (entry["dtype"], entry["shape"], raw[start + begin:start + end])

    def dtype(self, name):
        return self.tensors[name][0]

    def shape(self, name):
        return self.tensors[name][1]

    def raw(self, name):
        """BF16 bits, [rows, cols]."""
        dtype, shape, data = self.tensors[name]
        assert dtype == "BF16", f"{name}: {dtype}"
        return data.view(np.uint16).reshape(shape)

    def floats(self, name):
        dtype, shape, data = self.tensors[name]
        if dtype == "F32":
            return data.view(np.float32).reshape(shape)
        if dtype == "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        assert dtype == "F8_E4M3", f"{name}: {dtype}"
        rows, cols = shape
        values = E4M3[data].reshape(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
        scales = self.floats(name + "_scale_inv")
        return (values * scales[:, None, :, None]).reshape(rows, cols)


def q8_0(values):
    """Rows of Q8_0 blocks as bytes: an F16 scale and 32 signed bytes."""
    groups = values.reshape(-1, GROUP)
    scale = np.abs(groups).max(axis=1) / np.float32(127)
    inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0).astype(np.float32)
    out = np.empty((groups.shape[0], 2 + GROUP), dtype=np.uint8)
    out[:, :2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:] = np.rint(groups * inverse[:, None]).astype(np.int8).view(np.uint8)
    return out.reshape(*values.shape[:-1], -1)


class Writer:
    """Tensors are announced first and computed when their turn to be written comes."""

    def __init__(self, checkpoint, config, out):
        self.checkpoint = checkpoint
        self.config = config
        self.quantized = "quantization_config" in config
        self.gguf = gguf.GGUFWriter(out, "minimax-m2")
        self.pending = []

    def announce(self, name, shape, kind, make):
        shape = list(shape)
        if kind == Kind.F32:
            size = int(np.prod(shape)) * 4
            self.gguf.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
        else:
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            shape[-1] = shape[-1] // block * block_bytes
            self.gguf.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)
        self.pending.append(make)

    def plain(self, name, source):
        self.announce(name, self.checkpoint.shape(source), Kind.F32, lambda: [self.checkpoint.floats(source)])

    def embedding(self, name, source):
        self.announce(name, self.checkpoint.shape(source), Kind.BF16, lambda: [self.checkpoint.raw(source)])

    def matrix(self, name, source):
        self.stack(name, [source], self.checkpoint.shape(source))

    def stack(self, name, sources, shape):
        one = (lambda s: q8_0(self.checkpoint.floats(s))) if self.quantized else self.checkpoint.raw
        kind = Kind.Q8_0 if self.quantized else Kind.BF16

        def make():
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                for at in range(0, len(sources), 16):  # bounds what waits to be written
                    yield from pool.map(one, sources[at:at + 16])

        self.announce(name, shape, kind, make)

    def metadata(self):
        c, w = self.config, self.gguf
        w.add_block_count(c["num_hidden_layers"])
        w.add_context_length(c["max_position_embeddings"])
        w.add_embedding_length(c["hidden_size"])
        w.add_feed_forward_length(c["intermediate_size"])
        w.add_head_count(c["num_attention_heads"])
        w.add_head_count_kv(c["num_key_value_heads"])
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
        w.add_rope_freq_base(float(c["rope_theta"]))
        w.add_rope_dimension_count(c["rotary_dim"])
        w.add_expert_count(c["num_local_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
        w.add_expert_feed_forward_length(c["intermediate_size"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_vocab_size(c["vocab_size"])
        w.add_tokenizer_model("none")

    def tensors(self):
        c = self.config
        self.embedding("token_embd.weight", "model.embed_tokens.weight")
        self.plain("output_norm.weight", "model.norm.weight")
        self.matrix("output.weight", "lm_head.weight")
        for layer in range(c["num_hidden_layers"]):
            theirs, ours = f"blk.{layer}.", f"model.layers.{layer}."
            for to, source in (("attn_norm", "input_layernorm"), ("attn_q_norm", "self_attn.q_norm"),
                               ("attn_k_norm", "self_attn.k_norm"), ("ffn_norm", "post_attention_layernorm")):
                self.plain(f"{theirs}{to}.weight", f"{ours}{source}.weight")
            for to, source in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")):
                self.matrix(f"{theirs}{to}.weight", f"{ours}self_attn.{source}.weight")
            moe = ours + "block_sparse_moe."
            self.plain(f"{theirs}ffn_gate_inp.weight", moe + "gate.weight")
            self.plain(f"{theirs}exp_probs_b.bias", moe + "e_score_correction_bias")
            experts = c["num_local_experts"]
            for to, source in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                names = [f"{moe}experts.{e}.{source}.weight" for e in range(experts)]
                self.stack(f"{theirs}ffn_{to}_exps.weight", names, [experts] + self.checkpoint.shape(names[0]))

    def write(self):
        self.metadata()
        self.tensors()
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_ti_data_to_file()
        out = self.gguf.fout[0]
        for make in self.pending:
            self.gguf.write_padding(out, out.tell())
            for piece in make():
                np.ascontiguousarray(piece).tofile(out)
            self.gguf.write_padding(out, out.tell())
        self.gguf.close()


def main():
    directory, out = pathlib.Path(sys.argv[1]), sys.argv[2]
    config = json.loads((directory / "config.json").read_text())
    Writer(Checkpoint(directory), config, out).write()


if __name__ == "__main__":
    main()
