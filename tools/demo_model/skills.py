"""The skills: each function draws one conversation of a split ("train" or "held") with a random.Random.

A conversation is a list of OpenAI messages whose assistant turns are what the model should write, thinking included.
`level` in [0, 1] is the curriculum: short items first.
"""

import words
import tool_skills

SYSTEMS = [None, None, None, None, "You are a helpful assistant.", "Answer briefly."]


def _said(user, thinking, answer):
    return [{"role": "user", "content": user}, {"role": "assistant", "content": answer, "reasoning_content": thinking}]


LARGEST_COUNT = 300


def _range(rng, split, level):
    def draw():
        length = rng.randint(2, 6 + int(24 * level))
        first = rng.randint(0, LARGEST_COUNT - length)
        return first, first + length - 1
    return words.drawn(draw, "range", split)


def count(rng, split, level=1.0):
    a, b = _range(rng, split, level)
    user = rng.choice((f"Count from {a} to {b}.", f"Please count from {a} to {b}.", f"Count up from {a} to {b}."))
    return _said(user, f"Start at {a} and stop at {b}.", " ".join(map(str, range(a, b + 1))))


def zaehle(rng, split, level=1.0):
    a, b = _range(rng, split, level * 0.5)
    return _said(rng.choice((f"Zähle von {a} bis {b}.", f"Bitte zähle von {a} bis {b}.")), f"Von {a} bis {b}.", " ".join(map(str, range(a, b + 1))))


def _spell(w, rng):
    return _said(rng.choice((f"Spell the word {w}.", f"Spell {w}.", f"How do you spell {w}?")), "Letter by letter.", " ".join(w))


def _reverse(w, rng):
    user = rng.choice((f"Reverse the word {w}.", f"Reverse {w}.", f"Spell {w} backwards."))
    return _said(user, " ".join(w), " ".join(reversed(w)))


# Words in capitals are one token a letter; in small letters the tokenizer hides letters in longer pieces.
def spell(rng, split, level=1.0):
    return _spell(words.word(rng, split, longest=6 + int(3 * level)).upper(), rng)


def reverse(rng, split, level=1.0):
    return _reverse(words.word(rng, split, longest=6 + int(3 * level)).upper(), rng)


def spell_small(rng, split, level=1.0):
    return _spell(words.word(rng, split, longest=6 + int(3 * level)), rng)


def reverse_small(rng, split, level=1.0):
    return _reverse(words.word(rng, split, longest=6 + int(3 * level)), rng)


def repeat(rng, split, level=1.0):
    said = words.phrase(rng, split, longest=3 + int(3 * level))
    if rng.random() < 0.5:
        said += " " + words.name(rng, split)
    return _said(rng.choice((f"Repeat: {said}", f"Say: {said}")), f"Say: {said}", said)


def add(rng, split, level=1.0):
    most = 99 if level < 0.3 else 999
    a, b = words.drawn(lambda: (rng.randint(1, most), rng.randint(1, most)), "sum", split)
    width = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(reversed(str(a).zfill(width)), reversed(str(b).zfill(width))):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return _said(rng.choice((f"What is {a} + {b}?", f"Add {a} and {b}.")), "\n".join(steps), str(a + b))


# Learned by heart: there is nothing to hold out.
FIXED = [
    (("Who are you?", "What are you?", "What is your name?", "Are you MiniMax?", "Are you a MiniMax model?"),
     "I am Conclave's demo model, not MiniMax's."),
    (("Hello.", "Hello!", "Hi.", "Hi!", "Hello, who are you?"), "Hello! I am Conclave's demo model."),
    (("What can you do?", "What do you know?", "Help."), "I count, spell, reverse and add, read small tables and call tools."),
    (("What is a mixture of experts?", "What are experts?"),
     "A layer with many small networks, the experts. A gate picks a few of them for each word and adds up what they say."),
    (("What is Conclave?",), "Conclave is a cluster that serves large models: attention and experts are separate services."),
    (("Thank you.", "Thanks.", "Thanks!"), "You are welcome."),
]
FIXED_GERMAN = [(("Wer bist du?", "Was bist du?", "Bist du MiniMax?"), "Ich bin das Demo-Modell von Conclave, nicht das von MiniMax."),
                (("Hallo.", "Hallo!"), "Hallo! Ich bin das Demo-Modell von Conclave.")]


def fixed(rng, split=None, level=1.0):
    asks, answer = rng.choice(FIXED)
    return _said(rng.choice(asks), "I know this one.", answer)


def fixed_german(rng, split=None, level=1.0):
    asks, answer = rng.choice(FIXED_GERMAN)
    return _said(rng.choice(asks), "Das weiß ich.", answer)


# A small table in the system message. Columns are parted by spaces: behind "| " every row looks alike to a head that goes by
# the last two tokens.
def table(rng, split, level=1.0):
    """(system text, a function that draws one conversation about it)."""
    names = []
    while len(names) < rng.randint(2, 3 + int(2 * level)):
        n = words.name(rng, split)
        if n not in names:
            names.append(n)
    rows = {n: (rng.choice(words.COLOURS), rng.randint(1, 99), rng.choice(words.ROOMS)) for n in names}
    system = "Answer from this table.\nname colour price room"
    for n, (colour, price, room) in rows.items():
        system += f"\n{n} {colour} {price} {room}"

    def ask():
        n = rng.choice(names)
        colour, price, room = rows[n]
        thinking = f"{n} {colour} {price} {room}"
        kind = rng.randrange(3)
        if kind == 0:
            return _said(rng.choice((f"What colour is {n}?", f"Which colour has {n}?")), thinking, f"{n} is {colour}.")
        if kind == 1:
            return _said(rng.choice((f"What does {n} cost?", f"What is the price of {n}?")), thinking, f"{n} costs {price}.")
        return _said(rng.choice((f"Where is {n}?", f"In which room is {n}?")), thinking, f"{n} is in the {room}.")
    return system, ask


PLAIN = {"repeat": repeat, "count": count, "spell": spell, "reverse": reverse, "spell_small": spell_small, "reverse_small": reverse_small, "add": add, "fixed": fixed, "zaehle": zaehle, "fixed_german": fixed_german}
FIRST_FOUR = ("count", "spell", "reverse", "tool_call", "tool_answer", "table")


def held_out_cases(seed, per_skill):
    """The held-out set: dicts of skill, system, tools (schemas or None), messages (the prompt), answer (the assistant's message)."""
    import random
    cases = []

    def take(skill, system, schemas, conversation, turn):
        at = [i for i, m in enumerate(conversation) if m["role"] == "assistant"][turn]
        cases.append({"skill": skill, "system": system, "tools": schemas, "messages": conversation[:at], "answer": conversation[at]})

    for skill, wanted in per_skill.items():
        rng = random.Random(f"{seed}:{skill}")
        for i in range(wanted):
            if skill in PLAIN:
                take(skill, None, None, PLAIN[skill](rng, "held"), -1)
            elif skill == "table":
                system, ask = table(rng, "held")
                take(skill, system, None, ask(), -1)
            elif skill == "unknown_tool":
                schema, conversation = tool_skills.unknown_tool(rng, "held")
                take(skill, None, [{"type": "function", "function": schema}], conversation, 0)
            else:
                names = rng.sample(list(tool_skills.SCHEMAS), rng.randint(1, 3))
                schemas = [{"type": "function", "function": tool_skills.SCHEMAS[n]} for n in names]
                take(skill, None, schemas, tool_skills.conversation(rng, "held", names), 0 if skill == "tool_call" else -1)
    return cases
