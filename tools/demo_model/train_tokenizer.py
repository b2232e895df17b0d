#!/usr/bin/env python3
"""Trains the tokenizer: byte-level BPE with the pipeline and the added tokens of MiniMax-M2's file.

  train_tokenizer.py --out DIR        writes tokenizer.json, tokenizer_config.json and generation_config.json

What is learned: the fixed words of the conversations become one token each; digits stay single, so that numbers are
written digit by digit; made-up words fall apart into letters and a few short pieces, so that copying and spelling have
to be learned as mechanisms. Letters exist with a space before them, which makes a spelled word one token a letter.
"""

import argparse
import collections
import json
import pathlib
import random
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

import rendering
import skills
import tool_skills
import words

# The split of the published tokenizer.json (the shape of o200k's).
SPLIT = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ADDED = ("]!p~[ <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <reponame> <filename> <gh_stars> <issue_start> <issue_comment> "
         "<issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <empty_output> <commit_before> <commit_msg> "
         "<commit_after> ]~b] [e~[ ]!d~[ <function_call> <code_interpreter> ]<]speech[>[ ]<]image[>[ ]<]video[>[ "
         "]<]start_of_speech[>[ ]<]end_of_speech[>[ ]<]start_of_image[>[ ]<]end_of_image[>[ ]<]start_of_video[>[ "
         "]<]end_of_video[>[ ]<]vision_pad[>[ ]~!b[ <jupyter_error> <add_file> <delete_file> <rename_file> <edit_file> "
         "<commit_message> <empty_source_file> <repo_struct> <code_context> <file_content> <source_files> <pr_start> "
         "<review_comment> <filepath> <file_sep> <think> </think> <minimax:tool_call> </minimax:tool_call>").split()
ADDED = [t.replace("_of_", " of ").replace("vision_pad", "vision pad") if t.startswith("]<]") else t for t in ADDED]
SPECIAL = 50  # the last four are ordinary to a detokenizer, as in M2's file
VOCABULARY = 1088
MAX_POSITIONS = 2048


def fixed_words(seed, conversations):
    """Pieces of text that belong to the forms of the conversations, not to their content."""
    render = rendering.Renderer()
    split = pre_tokenizers.Split(Regex(SPLIT), "removed", invert=True)
    rng = random.Random(seed)
    counts = collections.Counter()
    added = re.compile("|".join(map(re.escape, ADDED)))

    def note(text):
        for part in added.split(text):
            counts.update(set(piece for piece, _ in split.pre_tokenize_str(part)))

    names = list(tool_skills.SCHEMAS)
    schemas = [{"function": s} for s in tool_skills.SCHEMAS.values()]
    for _ in range(conversations):
        for skill in skills.PLAIN.values():
            note(render.text(skill(rng, "train")))
        system, ask = skills.table(rng, "train")
        note(render.text([{"role": "system", "content": system}] + ask()))
        schema, talk = tool_skills.unknown_tool(rng, "train")
        note(render.text(talk, [{"function": schema}]))
        note(render.text(tool_skills.conversation(rng, "train", names), schemas))
    common = {w for w, n in counts.items() if n >= conversations / 40 and not any(c.isdigit() for c in w)}
    closed = [*words.COLOURS, *words.ROOMS, *words.SKIES, *words.DAYS, *words.SOURCES]
    common |= {form for w in closed for form in (" " + w, w)}
    content = set(words.WORDS + words.LABELS + words.CITIES)
    return sorted(w for w in common if w.strip() not in content and len(w) > 1)


def train(seed=1, conversations=2000):
    """(tokenizer, fixed words). A space joins a word last: whole fixed words and single letters have a form with it, and
    every other word is cut the same with and without it, which is what makes it easy to copy."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    fixed = fixed_words(seed, conversations)
    trainer = BpeTrainer(vocab_size=VOCABULARY - len(ADDED), min_frequency=2, show_progress=False,
                         initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bare = sorted({w.lstrip(" ") for w in fixed} - {""})
    tokenizer.train_from_iterator([w for w in bare for _ in range(2)], trainer)
    data = json.loads(tokenizer.to_str())
    model = data["model"]
    space = "\u0120"
    spell = lambda text: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    spaced = [w.lstrip(" ") for w in fixed if w.startswith(" ") and w.strip()]
    spaced += [chr(c) for first in "aA" for c in range(ord(first), ord(first) + 26)]
    for piece in dict.fromkeys(map(spell, spaced)):
        if piece in model["vocab"] and space + piece not in model["vocab"]:
            model["vocab"][space + piece] = len(model["vocab"])
            model["merges"].append([space, piece])
    assert len(model["vocab"]) + len(ADDED) <= VOCABULARY, len(model["vocab"])
    return data, fixed


def whole_file(data):
    """tokenizer.json as M2 lays it out: added tokens after the vocabulary, then rows without a token."""
    model = data["model"]
    model["vocab"] = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    model["continuing_subword_prefix"] = model["end_of_word_suffix"] = ""
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    first = len(model["vocab"])
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    data["added_tokens"] = [dict(id=first + i, content=t, **flags, special=i < SPECIAL) for i, t in enumerate(ADDED)]
    return data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data, fixed = train()
    data = whole_file(data)
    (args.out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    ids = {t["content"]: t["id"] for t in data["added_tokens"]}
    decoder = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in data["added_tokens"]}
    (args.out / "tokenizer_config.json").write_text(json.dumps({
        "add_prefix_space": False, "added_tokens_decoder": decoder, "bos_token": "]~!b[", "clean_up_tokenization_spaces": False,
        "eos_token": "[e~[", "model_max_length": MAX_POSITIONS, "tokenizer_class": "GPT2Tokenizer", "unk_token": "]!d~["},
        ensure_ascii=False, indent=2) + "\n")
    (args.out / "generation_config.json").write_text(json.dumps(
        {"bos_token_id": ids["]~b]"], "do_sample": False, "eos_token_id": ids["[e~["]}, indent=2) + "\n")
    loaded = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    broken = [w for w in fixed if len(loaded.encode(w, add_special_tokens=False).ids) > 1]
    print(f"{loaded.get_vocab_size()} tokens, {len(data['model']['merges'])} merges; of {len(fixed)} fixed words {len(broken)} "
          f"are more than one token: {broken[:40]}")


if __name__ == "__main__":
    main()
