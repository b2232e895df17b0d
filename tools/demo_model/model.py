"""MiniMax-M2's architecture at a small size, for training on a few CPU cores.

Rows are batches of packed documents; all rows' tokens go through the projections and experts as one flat list, only
attention sees rows. The experts of a layer are one batched product over rows sorted by expert and padded to the longest
group; the gathers in both directions are written by hand, because a gather's own gradient would be a slow scatter.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


QK_GAIN = 2.0


@dataclasses.dataclass
class Geometry:
    vocab_size: int
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rotary_dim: int = 16
    num_local_experts: int = 32
    num_experts_per_tok: int = 4
    intermediate_size: int = 64
    rope_theta: float = 500.0  # 8 frequencies: most of them should tell neighbours apart
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rounded: bool = False  # compute with the matrices as the FP8 checkpoint will hold them


def rounded(w):
    """What the export makes of a matrix (FP8 in blocks of 128 x 128), with the gradient of the matrix itself."""
    r, c = w.shape[-2:]
    b = w.detach().to(torch.bfloat16).float().view(*w.shape[:-2], -(-r // 128), min(r, 128), -(-c // 128), min(c, 128))
    scale = b.abs().amax((-3, -1), keepdim=True).clamp_min(1e-10) / 448
    q = (b / scale).to(torch.float8_e4m3fn).float() * scale
    return w + (q.view_as(w) - w).detach()


class RmsNorm(nn.Module):
    def __init__(self, size, eps, gain=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def half_rotation(positions, g):
    """cos and sin, (tokens, 1, rotary_dim): pairs are (i, i + rotary_dim / 2)."""
    inverse = g.rope_theta ** (-torch.arange(0, g.rotary_dim, 2, dtype=torch.float32) / g.rotary_dim)
    angle = positions.float()[:, None] * inverse
    angle = torch.cat([angle, angle], -1)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin, rotary):
    head, rest = x[..., :rotary], x[..., rotary:]
    a, b = head.chunk(2, -1)
    return torch.cat([head * cos + torch.cat([-b, a], -1) * sin, rest], -1)


class Attention(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.g = g
        q, kv = g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
        self.q_proj = nn.Linear(g.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(g.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(g.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, g.hidden_size, bias=False)
        # Normed to 1, a perfect match of a small head is hardly above the noise of a few hundred keys.
        self.q_norm = RmsNorm(q, g.rms_norm_eps, QK_GAIN)
        self.k_norm = RmsNorm(kv, g.rms_norm_eps, QK_GAIN)

    def forward(self, x, rotation, groups):
        """groups: (rows, length, mask (rows, 1, length, length)) of consecutive tokens of x."""
        g = self.g
        use = rounded if g.rounded else (lambda w: w)
        w = torch.cat([use(self.q_proj.weight), use(self.k_proj.weight), use(self.v_proj.weight)])
        kv = g.num_key_value_heads * g.head_dim
        q, k, v = F.linear(x, w).split([g.num_attention_heads * g.head_dim, kv, kv], -1)
        n = x.shape[0]
        q = rotate(self.q_norm(q).view(n, -1, g.head_dim), *rotation, g.rotary_dim)
        k = rotate(self.k_norm(k).view(n, -1, g.head_dim), *rotation, g.rotary_dim)
        v = v.view(n, -1, g.head_dim)
        out, at = [], 0
        for rows, length, mask in groups:
            part = slice(at, at + rows * length)
            at += rows * length
            shaped = [t[part].view(rows, length, -1, g.head_dim).transpose(1, 2) for t in (q, k, v)]
            o = F.scaled_dot_product_attention(*shaped, attn_mask=mask, enable_gqa=True)
            out.append(o.transpose(1, 2).reshape(rows * length, -1))
        return F.linear(torch.cat(out) if len(out) > 1 else out[0], use(self.o_proj.weight))


class Dispatch(torch.autograd.Function):
    """x (n, d) -> rows by expert (slots, d); `source` names a token for every slot (n: none), `place` a slot for every
    (token, choice)."""

    @staticmethod
    def forward(ctx, x, source, place):
        ctx.save_for_backward(place)
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        return padded.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        place, = ctx.saved_tensors
        n, k = place.shape
        return grad.index_select(0, place.reshape(-1)).view(n, k, -1).sum(1), None, None


class Collect(torch.autograd.Function):
    """rows by expert (slots, d) -> (tokens, choices, d); `choice` names a (token, choice) for every slot (n k: none)."""

    @staticmethod
    def forward(ctx, y, place, choice):
        ctx.save_for_backward(choice)
        n, k = place.shape
        return y.index_select(0, place.reshape(-1)).view(n, k, -1)

    @staticmethod
    def backward(ctx, grad):
        choice, = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return torch.cat([flat, flat.new_zeros(1, flat.shape[1])]).index_select(0, choice), None, None


class Experts(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.g = g
        e, h, i = g.num_local_experts, g.hidden_size, g.intermediate_size
        self.gate = nn.Parameter(torch.randn(e, h) * h ** -0.5)
        self.register_buffer("bias", torch.zeros(e))
        # Stored as a product from the left needs them: x @ w13, x @ w2.
        self.w1 = nn.Parameter(torch.randn(e, h, i) * h ** -0.5)
        self.w3 = nn.Parameter(torch.randn(e, h, i) * h ** -0.5)
        self.w2 = nn.Parameter(torch.randn(e, i, h) * i ** -0.5)
        self.load = None  # rows per expert of the last call

    def forward(self, x):
        g = self.g
        n, k, e = x.shape[0], g.num_experts_per_tok, g.num_local_experts
        score = torch.sigmoid(F.linear(x.float(), self.gate.float()))
        with torch.no_grad():
            chosen = (score + self.bias).topk(k, dim=-1, sorted=False).indices
            flat = chosen.reshape(-1)
            load = torch.bincount(flat, minlength=e)
            self.load = load
            order = flat.argsort(stable=True)
            expert = flat[order]
            within = torch.arange(n * k) - (load.cumsum(0) - load)[expert]
            width = (int(load.max()) + 15) // 16 * 16
            slot = expert * width + within
            place = torch.empty(n * k, dtype=torch.long)
            place[order] = slot
            choice = torch.full((e * width,), n * k)
            choice[slot] = order
            source = torch.where(choice < n * k, choice // k, n)
            place = place.view(n, k)
        weight = score.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        rows = Dispatch.apply(x, source, place).view(e, width, -1)
        w1, w3, w2 = (rounded(w) if g.rounded else w for w in (self.w1, self.w3, self.w2))
        inner = F.silu(torch.bmm(rows, w1)) * torch.bmm(rows, w3)
        y = torch.bmm(inner, w2).view(e * width, -1)
        picked = Collect.apply(y, place, choice)
        return torch.bmm(weight.to(picked.dtype)[:, None, :], picked)[:, 0]


class Layer(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.input_layernorm = RmsNorm(g.hidden_size, g.rms_norm_eps)
        self.attention = Attention(g)
        self.post_attention_layernorm = RmsNorm(g.hidden_size, g.rms_norm_eps)
        self.experts = Experts(g)

    def forward(self, x, rotation, groups):
        x = x + self.attention(self.input_layernorm(x), rotation, groups)
        return x + self.experts(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.g = g
        self.embed = nn.Embedding(g.vocab_size, g.hidden_size)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(g) for _ in range(g.num_hidden_layers))
        self.norm = RmsNorm(g.hidden_size, g.rms_norm_eps)
        self.lm_head = nn.Linear(g.hidden_size, g.vocab_size, bias=False)
        nn.init.zeros_(self.lm_head.weight)
        for layer in self.layers:  # each layer starts as the identity
            nn.init.zeros_(layer.attention.o_proj.weight)
            nn.init.zeros_(layer.experts.w2)

    def forward(self, ids, positions, groups, wanted=None):
        """Logits (tokens, or those at the indices `wanted`, vocabulary) of flat ids."""
        x = self.embed(ids)
        rotation = half_rotation(positions, self.g)
        for layer in self.layers:
            x = layer(x, rotation, groups)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def balance(self, rate):
        """The load-balancing rule: the bias of an expert with less than the mean load rises, of one with more falls."""
        for layer in self.layers:
            load = layer.experts.load.float()
            layer.experts.bias += rate * torch.sign(load.mean() - load)


def packed_mask(branches):
    """branches (rows, length): 0 for the shared prefix, then 1, 2, ... for what follows it; -1 padding. A token sees the
    prefix and its own branch, up to itself."""
    length = branches.shape[1]
    same = (branches[:, :, None] == branches[:, None, :]) | (branches[:, None, :] == 0)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = same & causal
    return torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))[:, None]
