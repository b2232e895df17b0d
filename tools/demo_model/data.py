"""Conversations packed into rows: one shared prefix (the system turn), then as many separate continuations as fit."""

import random

import torch
from tokenizers import Tokenizer

import rendering
import skills
import tool_skills
from model import packed_mask

EARLIER_TURN = 0.15  # share of plain and table conversations with a question and its answer before them


class Packer:
    def __init__(self, tokenizer_file):
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.render = rendering.Renderer()
        id_of = self.tokenizer.token_to_id
        self.turn, self.end, self.ai, self.think = id_of("]~b]"), id_of("[e~["), id_of("ai"), id_of("<think>")
        self.prefixes = {}

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prefix(self, system, schemas):
        key = (system, tuple((s["function"]["name"], *s["function"]["parameters"]["properties"]) for s in schemas or ()))
        if key not in self.prefixes:
            if len(self.prefixes) > 2000:
                self.prefixes.clear()
            text = self.render.prefix(system, schemas)
            self.prefixes[key] = (text, self.ids(text))
        return self.prefixes[key]

    def branch(self, system, schemas, messages):
        """(ids, taught): taught[i] says that token i is the model's to write."""
        whole = self.render.text(([] if system is None else [{"role": "system", "content": system}]) + messages, schemas)
        text, _ = self.prefix(system, schemas)
        assert whole.startswith(text)
        ids = self.ids(whole[len(text):])
        taught, i = [False] * len(ids), 0
        while i < len(ids):
            if ids[i] == self.turn and ids[i + 1] == self.ai:
                thinks = ids[i + 3] == self.think  # not in turns before the last question: the template drops it there
                i += 5 if thinks else 3  # ]~b] ai \n <think> \n are given
                while ids[i] != self.end:
                    taught[i] = thinks
                    i += 1
                taught[i] = thinks
            i += 1
        return ids, taught


def _schemas(names):
    return [{"function": tool_skills.SCHEMAS[n]} for n in names]


class Mixture:
    """Draws rows. `weights` are shares of branches among the plain skills."""
    plain = {"repeat": 0.06, "count": 0.20, "spell": 0.09, "reverse": 0.21, "spell_small": 0.08, "reverse_small": 0.08, "add": 0.14,
             "fixed": 0.06, "zaehle": 0.05, "fixed_german": 0.03}

    def __init__(self, packer, seed):
        self.packer, self.rng = packer, random.Random(seed)

    def _plain(self, level, split="train"):
        names = list(self.plain)
        skill = self.rng.choices(names, [self.plain[n] for n in names])[0]
        return skills.PLAIN[skill](self.rng, split, level)

    def source(self, kind, level):
        """(system, schemas, function that draws a conversation)."""
        rng = self.rng
        if kind == "plain":
            return rng.choice(skills.SYSTEMS), None, lambda: self._plain(level)
        if kind == "table":
            system, ask = skills.table(rng, "train", level)
            return system, None, ask
        if rng.random() < 0.14:
            schema, _ = tool_skills.unknown_tool(rng, "train")
            return None, [{"function": schema}], lambda: tool_skills.use(rng, "train", schema)
        names = rng.sample(list(tool_skills.SCHEMAS), rng.choices((1, 2, 3), (4, 3, 2))[0])
        parallel = 0.35 * min(1.0, 2 * level)
        return None, _schemas(names), lambda: (
            self._plain(level * 0.3) if rng.random() < 0.08 else tool_skills.conversation(rng, "train", names, parallel))

    def row(self, kind, length, level):
        system, schemas, draw = self.source(kind, level)
        ids = list(self.packer.prefix(system, schemas)[1])
        prefix = len(ids)
        taught, branches, positions = [False] * prefix, [0] * prefix, list(range(prefix))
        number, misses, seen, rng = 0, 0, set(), self.rng
        while misses < 3 and number < 40:
            messages = draw()
            if kind != "tools" and rng.random() < EARLIER_TURN:
                messages = (draw() if kind == "table" else self._plain(0.1)) + messages
            key = messages[-2]["content"]
            new, learn = self.packer.branch(system, schemas, messages)
            if key in seen and kind == "table" or len(ids) + len(new) > length:
                misses += 1
                continue
            seen.add(key)
            number += 1
            ids += new
            taught += learn
            branches += [number] * len(new)
            positions += range(prefix, prefix + len(new))
        fill = length - len(ids)
        return ids + [0] * fill, taught + [False] * fill, branches + [-1] * fill, positions + [0] * fill

    def batch(self, plan, level):
        """plan: [(kind, rows, length)]. Returns what Model.forward and the loss need; consecutive kinds of one length share a
        group."""
        groups, flat = [], ([], [], [])
        for kind, rows, length in plan:
            drawn = [self.row(kind, length, level) for _ in range(rows)]
            for ids, taught, branches, positions in drawn:
                flat[0].append(ids), flat[1].append(taught), flat[2].append(positions)
            if groups and groups[-1][0] == length:
                groups[-1][1].extend(r[2] for r in drawn)
            else:
                groups.append((length, [r[2] for r in drawn]))
        ids = torch.tensor([t for row in flat[0] for t in row])
        taught = torch.tensor([t for row in flat[1] for t in row])
        positions = torch.tensor([t for row in flat[2] for t in row])
        wanted = taught.nonzero()[:, 0]
        masks = [(len(b), length, packed_mask(torch.tensor(b))) for length, b in groups]
        # The first token of a branch is never taught, so the token before a taught one is of its branch.
        return ids, positions, masks, wanted - 1, ids[wanted]

