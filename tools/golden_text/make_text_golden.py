#!/usr/bin/env python3
"""Makes the golden files of tests/text: a small byte-level BPE with the split expression of MiniMax-M2, trained on
generated text, and what the Python package `tokenizers` computes with it.

    python3 make_text_golden.py OUT_DIR
    python3 make_text_golden.py --compare TOKENIZER_JSON --count N --out FILE   (vectors for any other tokenizer)
"""

import argparse
import json
import pathlib
import random

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from text_samples import Samples

M2_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["]~!b[", "]~b]", "[e~[", "]!d~[", "<fim_prefix>", "]<]start of speech[>["]
PLAIN = ["<think>", "</think>", "<tool:call>"]


def train(vocab_size):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(M2_SPLIT), behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
    ])
    t.decoder = decoders.ByteLevel()
    samples = Samples(7)
    text = [samples.prose() if i % 3 else samples.code() for i in range(6000)]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(text, trainer)
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIAL])
    t.add_tokens([AddedToken(s, normalized=False, special=False) for s in PLAIN])
    return t


def added(i, content, **flags):
    base = {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": False}
    base.update(flags)
    return base


def variants(base):
    """Other settings over the same vocabulary: members that replace those of the base file."""
    first = len(base["model"]["vocab"])
    split = lambda pattern, behavior, invert: {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
    level = lambda prefix, regex: {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}
    model = dict(base["model"])
    model["ignore_merges"] = True
    model["merges"] = [list(m) if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    fancy = [
        added(first, "<lstrip>", lstrip=True), added(first + 1, "<rstrip>", rstrip=True),
        added(first + 2, "<word>", single_word=True), added(first + 3, "café", normalized=True),
        added(first + 4, "ab", single_word=True, normalized=True), added(first + 5, "<both>", lstrip=True, rstrip=True),
        added(first + 6, "<l", special=True), added(first + 7, "Ω", special=True),
    ]
    return {
        "m2": {},
        "gpt2_prefix": {"normalizer": None, "pre_tokenizer": level(True, True)},
        "cl100k_isolated": {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            split({"Regex": CL100K_SPLIT}, "Isolated", False), level(False, False)]}, "model": model},
        "removed_prefix": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            split({"String": "e"}, "Removed", False), split({"Regex": r"\d|^\S+$|x*"}, "Isolated", True), level(True, False)]}},
        "added_flags": {"added_tokens": fancy},
    }


def encode_cases(t, samples, count, raw):
    cases = []
    seen = set()
    while len(cases) < count:
        text = samples.sample()[:400]
        if text in seen:
            continue
        seen.add(text)
        cases.append({"text": text, "ids": t.encode(text, add_special_tokens=False).ids})
    for _ in range(raw):
        b = samples.raw()
        cases.append({"hex": b.hex(), "ids": t.encode(b.decode("utf-8", "replace"), add_special_tokens=False).ids})
    return cases


def decode_cases(t, r, count):
    size = t.get_vocab_size()
    cases = []
    for _ in range(count):
        ids = [r.randrange(256) if r.random() < 0.4 else r.randrange(size + 3) for _ in range(r.randint(0, 20))]
        cases.append({"ids": ids, "text": t.decode(ids, skip_special_tokens=False),
                      "skipped": t.decode(ids, skip_special_tokens=True)})
    return cases


def dump(path, head, cases):
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(head, ensure_ascii=True, separators=(",", ":")) + "\n")
        for case in cases:
            f.write(json.dumps(case, ensure_ascii=True, separators=(",", ":")) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", nargs="?")
    parser.add_argument("--compare")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.compare:
        t = Tokenizer.from_file(args.compare)
        names = [a.content for a in t.get_added_tokens_decoder().values()]
        cases = encode_cases(t, Samples(args.seed, names), args.count, args.count // 20)
        decodes = decode_cases(t, random.Random(args.seed), args.count // 5)
        dump(args.out, {"name": "compare", "encode": len(cases), "decode": len(decodes)}, cases + decodes)
        return
    out = pathlib.Path(args.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    base = json.loads(train(1500).to_str())
    (out / "small_tokenizer.json").write_text(json.dumps(base, ensure_ascii=False, separators=(",", ":")) + "\n",
                                              encoding="utf-8")
    for name, patch in variants(base).items():
        t = Tokenizer.from_str(json.dumps({**base, **patch}))
        names = [a["content"] for a in {**base, **patch}["added_tokens"]]
        cases = encode_cases(t, Samples("encode " + name, names), 2400 if name == "m2" else 300, 40)
        decodes = decode_cases(t, random.Random("decode " + name), 200 if name == "m2" else 50)
        if "model" in patch:
            patch = {**{k: v for k, v in patch.items() if k != "model"}, "model_as_pairs": True}
        head = {"name": name, "patch": patch, "encode": len(cases), "decode": len(decodes),
                "tokenizers": tokenizers.__version__}
        dump(out / f"golden_{name}.jsonl", head, cases + decodes)


if __name__ == "__main__":
    main()
