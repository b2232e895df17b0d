"""Starting weights that can already copy.

A small model first has to find out, over millions of tokens, how to continue a text as it went on before: one head that looks
at the token before, and a head of the next layer that looks for a token whose predecessor is the one at hand. Both are put
in place here, as ordinary weights that training goes on with. Dimensions of the hidden state are set aside for them: 0 is
constant, 1..32 and 33..64 hold the tokens one and two places back, 65..128 what was found; the token itself has the rest.
A word with a space before it starts near the same word without, so that what is found in one form is known in the other.
"""

import torch

PREVIOUS, SECOND, FOUND, OWN = 1, 33, 65, 129
MATCHED = 16  # dimensions of a head that are not rotated


@torch.no_grad()
def copying(model, vocabulary):
    """`vocabulary`: ids by token."""
    g = model.g
    assert (g.hidden_size, g.head_dim, g.rotary_dim, g.num_attention_heads, g.num_key_value_heads) == (256, 32, 16, 8, 4)
    hidden, head, pairs = g.hidden_size, g.head_dim, g.rotary_dim // 2
    own = slice(OWN, hidden)

    def orthonormal(rows):
        out = torch.zeros(rows, hidden)
        out[:, own] = torch.linalg.qr(torch.randn(hidden - OWN, rows))[0].T
        return out

    embed = model.embed.weight
    embed[:, :OWN] = 0
    embed[:, own] *= 1.4
    for token, with_space in [(t, "\u0120" + t) for t in vocabulary if "\u0120" + t in vocabulary]:
        pair = embed[vocabulary[token], own] + embed[vocabulary[with_space], own]
        embed[vocabulary[with_space], own] = 0.72 * pair
    embed[:, 0] = 2.0
    seen, copied = orthonormal(head), orthonormal(2 * head)

    first = model.layers[0].attention
    frequency = g.rope_theta ** (-torch.arange(pairs, dtype=torch.float32) / pairs)
    first.k_proj.weight[:head] = 0
    first.k_proj.weight[:5, 0] = 0.42
    for h, back in ((0, 1.0), (1, 2.0)):
        rows = first.q_proj.weight[h * head:(h + 1) * head]
        rows.zero_()
        rows[:5, 0] = 0.42 * torch.cos(frequency[:5] * back)
        rows[pairs:pairs + 5, 0] = -0.42 * torch.sin(frequency[:5] * back)
    first.v_proj.weight[:head] = seen
    for h, at in ((0, PREVIOUS), (1, SECOND)):
        first.o_proj.weight[at:at + head, h * head:(h + 1) * head] = 0.6 * torch.eye(head)

    second = model.layers[1].attention
    half = MATCHED // 2
    previous = torch.eye(hidden)[PREVIOUS:PREVIOUS + head]
    two_back = torch.eye(hidden)[SECOND:SECOND + head]
    # Key/value head 0 looks for the token alone, head 1 for it and the one before it.
    keys = (previous[:MATCHED], torch.cat([previous[MATCHED:MATCHED + half], two_back[:half]]))
    queries = (seen[:MATCHED], torch.cat([seen[MATCHED:MATCHED + half], previous[:half]]))
    for kv in (0, 1):
        rows = second.k_proj.weight[kv * head:(kv + 1) * head]
        rows.zero_()
        rows[head - MATCHED:] = keys[kv]
        for h in (2 * kv, 2 * kv + 1):
            rows = second.q_proj.weight[h * head:(h + 1) * head]
            rows.zero_()
            rows[head - MATCHED:] = queries[kv]
        second.v_proj.weight[kv * head:(kv + 1) * head] = copied[kv * head:(kv + 1) * head]
        at = FOUND + kv * head
        second.o_proj.weight[at:at + head, 2 * kv * head:(2 * kv + 1) * head] = torch.eye(head)
    model.lm_head.weight[:, FOUND:FOUND + 2 * head] = 0.12 * embed @ copied.T
