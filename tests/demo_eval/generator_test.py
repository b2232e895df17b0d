"""The demo model's generator and the scoring of its answers, without a cluster."""

import copy
import random
import unittest

import demo_eval
import rendering
import skills
import tool_skills
import words

EVERY = {skill: 20 for skill in demo_eval.SHARES}
RENDER = rendering.Renderer()


def text_of(case, answer):
    """What a model that gives this answer would write."""
    lead = [] if case["system"] is None else [{"role": "system", "content": case["system"]}]
    whole = RENDER.text(lead + case["messages"] + [answer], case["tools"])
    prompt = demo_eval.prompt_of(RENDER, case)
    assert whole.startswith(prompt) and whole.endswith("[e~[\n")
    return whole[len(prompt):-len("[e~[\n")]


class Generator(unittest.TestCase):
    def test_splits_share_no_prompt(self):
        held = {c["messages"][0]["content"] for c in skills.held_out_cases(3, EVERY) if "fixed" not in c["skill"]}
        self.assertGreater(len(held), 150)
        rng = random.Random(4)
        trained = set()
        for _ in range(1000):
            for name, skill in skills.PLAIN.items():
                if "fixed" not in name:
                    trained.add(skill(rng, "train")[0]["content"])
            trained.add(skills.table(rng, "train")[1]()[0]["content"])
            trained.add(tool_skills.conversation(rng, "train", list(tool_skills.SCHEMAS))[0]["content"])
            trained.add(tool_skills.unknown_tool(rng, "train")[1][0]["content"])
        self.assertEqual(held & trained, set())

    def test_items_belong_to_one_split(self):
        rng = random.Random(5)
        for split in ("train", "held"):
            for _ in range(200):
                for kind, draw in (("word", words.word), ("name", words.name), ("phrase", words.phrase)):
                    self.assertEqual(words.held_out(kind, draw(rng, split)), split == "held")

    def test_cases_are_the_same_every_time(self):
        self.assertEqual(skills.held_out_cases(7, EVERY), skills.held_out_cases(7, EVERY))
        self.assertNotEqual(skills.held_out_cases(7, EVERY), skills.held_out_cases(8, EVERY))


class Scoring(unittest.TestCase):
    def setUp(self):
        self.cases = skills.held_out_cases(6, EVERY)

    def test_the_expected_answer_is_right(self):
        for case in self.cases:
            self.assertTrue(demo_eval.right(case, text_of(case, case["answer"])), case)

    def test_another_answer_is_wrong(self):
        for case in self.cases:
            changed = copy.deepcopy(case["answer"])
            if changed.get("tool_calls"):
                arguments = changed["tool_calls"][0]["function"]["arguments"]
                key = next(iter(arguments))
                arguments[key] = arguments[key] + 1 if isinstance(arguments[key], int) else arguments[key] + "x"
                self.assertFalse(demo_eval.right(case, text_of(case, changed)), changed)
                del changed["tool_calls"][0]
            else:
                changed["content"] += "!"
            self.assertFalse(demo_eval.right(case, text_of(case, changed)), changed)
            self.assertFalse(demo_eval.right(case, case["answer"]["content"]), "thinking without an end")

    def test_arguments_need_the_types_of_the_schema(self):
        schemas = [{"function": tool_skills.SCHEMAS["search"]}]
        self.assertEqual(demo_eval.typed([("search", {"query": "7", "limit": "7", "sources": '["news"]'})], schemas),
                         [("search", {"query": "7", "limit": 7, "sources": ["news"]})])
        for arguments in ({"limit": "true"}, {"limit": "seven"}, {"sources": "news"}, {"colour": "red"}):
            with self.assertRaises((ValueError, KeyError)):
                demo_eval.typed([("search", arguments)], schemas)


if __name__ == "__main__":
    unittest.main()
