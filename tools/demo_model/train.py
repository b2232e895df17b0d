#!/usr/bin/env python3
"""Trains the demo model on conversations drawn as it goes. Resumable: the state is written every few minutes.

  train.py --tokenizer DIR/tokenizer.json --state DIR [--steps N] [--minutes M]

The learning rate rises, stays, and falls linearly to zero over the last part of --steps; a run that was stopped, or has
ended, goes on with the same command and the same or a larger --steps. Matrices are trained by Muon (momentum made orthogonal by Newton-Schulz
iterations), the rest by AdamW.
"""

import argparse
import os
import pathlib
import random
import time

import torch
import torch.nn.functional as F

import skills
import start
from data import Mixture, Packer
from model import Geometry, Model, packed_mask

PLAN = [("tools", 3, 512), ("table", 2, 256), ("plain", 3, 256)]
WARM_UP, DECAY = 60, 0.7
ROUNDED = 0.15  # the last part of the steps computes with matrices as the FP8 file holds them, so that rounding changes little
CURRICULUM = 450  # steps until the longest items are drawn
EVALUATED = ("count", "spell", "reverse", "table", "tool_call", "tool_answer", "add", "unknown_tool", "zaehle", "spell_small", "reverse_small", "repeat")


def orthogonal(g, rounds=5):
    """The nearest matrix with equal singular values, roughly; batched over the leading dimension."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g if g.shape[-2] <= g.shape[-1] else g.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x if g.shape[-2] <= g.shape[-1] else x.mT


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.95, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(m, group["momentum"]))
                # Experts are stored (inputs, outputs), the others (outputs, inputs).
                ratio = p.shape[-1] / p.shape[-2] if p.ndim == 3 else p.shape[-2] / p.shape[-1]
                scale = max(1.0, ratio) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def optimizers(model, muon_lr, adam_lr):
    matrices, tables, small = [], [], []
    for name, p in model.named_parameters():
        if p.ndim == 1:
            small.append(p)
        elif name.startswith(("embed", "lm_head")) or name.endswith("gate"):
            tables.append(p)
        else:
            matrices.append(p)
    adam = torch.optim.AdamW([{"params": tables, "lr": adam_lr}, {"params": small, "lr": adam_lr, "weight_decay": 0.0}],
                             betas=(0.9, 0.97), eps=1e-9, weight_decay=0.01, foreach=True)
    return [Muon(matrices, muon_lr), adam]


def factor(step, steps):
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    begin = steps * (1 - DECAY)
    return 1.0 if step < begin else max(0.0, (steps - step) / (steps - begin))


@torch.no_grad()
def evaluate(model, packer, cases):
    """{skill: share of held-out conversations of which every token of the last turn is the most likely one}."""
    rows = []
    for case in cases:
        prefix = packer.prefix(case["system"], case["tools"])[1]
        ids, taught = packer.branch(case["system"], case["tools"], case["messages"] + [case["answer"]])
        last = len(taught) - 1
        while not taught[last]:
            last -= 1
        first = last
        while taught[first - 1]:
            first -= 1
        rows.append((case["skill"], prefix + ids[:last + 1], len(prefix) + first))
    rows.sort(key=lambda r: len(r[1]))
    right, total, load = {}, {}, 0
    for at in range(0, len(rows), 16):
        part = rows[at:at + 16]
        length = len(part[-1][1])
        ids = torch.tensor([r[1] + [0] * (length - len(r[1])) for r in part])
        branches = torch.tensor([[0] * len(r[1]) + [-1] * (length - len(r[1])) for r in part])
        positions = torch.arange(length).repeat(len(part))
        out = model(ids.view(-1), positions, [(len(part), length, packed_mask(branches))]).argmax(-1).view(len(part), length)
        for i, (skill, tokens, first) in enumerate(part):
            ok = out[i, first - 1:len(tokens) - 1].tolist() == tokens[first:]
            right[skill] = right.get(skill, 0) + ok
            total[skill] = total.get(skill, 0) + 1
    return {s: right[s] / total[s] for s in sorted(total)}


def save(path, **state):
    torch.save(state, str(path) + ".new")
    os.replace(str(path) + ".new", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--state", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long, with the state written")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--evaluate-every", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.state.mkdir(parents=True, exist_ok=True)
    packer = Packer(args.tokenizer)
    geometry = Geometry(vocab_size=(packer.tokenizer.get_vocab_size() + 63) // 64 * 64)
    model = Model(geometry)
    start.copying(model, packer.tokenizer.get_vocab())
    opts = optimizers(model, args.muon_lr, args.adam_lr)
    rates = [[g["lr"] for g in o.param_groups] for o in opts]
    file = args.state / "state.pt"
    step = tokens = 0
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        for o, s in zip(opts, state["opts"]):
            o.load_state_dict(s)
        step, tokens = state["step"], state["tokens"]
    log = open(args.state / "log.txt", "a", buffering=1)

    def say(line):
        print(line, flush=True)
        log.write(line + "\n")

    cases = skills.held_out_cases(args.seed + 100, {s: 16 for s in EVALUATED})
    say(f"{sum(p.numel() for p in model.parameters())} parameters; from step {step} of {args.steps}")
    begin = mark = time.monotonic()
    losses, since = [], 0
    while step < args.steps and time.monotonic() - begin < args.minutes * 60:
        level = min(1.0, step / CURRICULUM)
        geometry.rounded = step >= args.steps * (1 - ROUNDED)
        ids, positions, masks, before, target = Mixture(packer, f"{args.seed}:{step}").batch(PLAN, level)
        loss = F.cross_entropy(model(ids, positions, masks, before), target)
        for o, r in zip(opts, rates):
            o.zero_grad(set_to_none=True)
            for g, lr in zip(o.param_groups, r):
                g["lr"] = lr * factor(step, args.steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts:
            o.step()
        model.balance(args.balance * factor(step, args.steps))
        step += 1
        tokens += ids.numel()
        since += ids.numel()
        losses.append(float(loss.detach()))
        if step % 20 == 0:
            now = time.monotonic()
            worst = max(float(l.experts.load.max() / l.experts.load.float().mean()) for l in model.layers)
            say(f"step {step} level {level:.2f} loss {sum(losses) / len(losses):.4f} tokens {tokens} tok/s {since / (now - mark):.0f} "
                f"busiest {worst:.2f} taught {len(target)} minutes {(now - begin) / 60:.1f}")
            losses, since, mark = [], 0, now
        if step % args.save_every == 0 or step == args.steps:
            save(file, model=model.state_dict(), opts=[o.state_dict() for o in opts], step=step, tokens=tokens, geometry=vars(geometry))
        if step % args.evaluate_every == 0 or step == args.steps:
            scores = evaluate(model, packer, cases)
            say(f"step {step} held-out " + " ".join(f"{k} {v:.2f}" for k, v in scores.items()))
            mark, since = time.monotonic(), 0
    save(file, model=model.state_dict(), opts=[o.state_dict() for o in opts], step=step, tokens=tokens, geometry=vars(geometry))


if __name__ == "__main__":
    main()
