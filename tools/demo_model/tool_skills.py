"""The three tools of the first skills: their schemas, requests in words, calls, results and answers."""

import words

SCHEMAS = {
    "get_weather": {"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}},
    "search": {"name": "search", "description": "Search for pages", "parameters": {"type": "object", "properties": {
        "query": {"type": "string"}, "limit": {"type": "integer"}, "sources": {"type": "array", "items": {"type": "string"}}},
        "required": ["query"]}},
    "set_alarm": {"name": "set_alarm", "description": "Set an alarm", "parameters": {"type": "object", "properties": {
        "time": {"type": "string"}, "label": {"type": "string"}, "repeat": {"type": "boolean"},
        "days": {"type": "array", "items": {"type": "string"}}}, "required": ["time", "label"]}},
}


def some(rng, values, most):
    """1 to `most` of the values in their own order."""
    chosen = set(rng.sample(range(len(values)), rng.randint(1, most)))
    return [v for i, v in enumerate(values) if i in chosen]


def listed(items):
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


class Call:
    """One call: the sentence that asks for it, its arguments, the tool's result and the sentence that reports it."""

    def __init__(self, name, ask, arguments, result, report):
        self.name, self.ask, self.arguments, self.result, self.report = name, ask, arguments, result, report


def weather(rng, split):
    city = words.name(rng, split)
    arguments = {"city": city}
    if rng.random() < 0.5:
        days = rng.randint(2, 14)
        arguments["days"] = days
        ask = rng.choice((f"Give me the weather in {city} for {days} days.", f"How is the weather in {city} for the next {days} days?"))
    else:
        ask = rng.choice((f"What is the weather in {city}?", f"How is the weather in {city}?"))
    sky, degrees = rng.choice(words.SKIES), rng.randint(0, 35)
    return Call("get_weather", ask, arguments, f"{city}: {sky}, {degrees} degrees", f"In {city}: {sky}, {degrees} degrees.")


def search(rng, split):
    query = words.phrase(rng, split)
    arguments = {"query": query}
    kind = rng.randrange(4)
    if kind % 2 == 1:
        arguments["limit"] = rng.randint(2, 20)
    if kind >= 2:
        arguments["sources"] = some(rng, words.SOURCES, 3)
    if kind % 2 == 1:
        ask = f"Find {arguments['limit']} pages about {query}"
    else:
        ask = rng.choice((f"Search for {query}", f"Find pages about {query}"))
    if kind >= 2:
        ask += f" in {listed(arguments['sources'])}"
    titles = [words.name(rng, split) for _ in range(rng.randint(1, 2))]
    return Call("search", ask + ".", arguments, f"found {listed(titles)}", f"I found {listed(titles)}.")


def alarm(rng, split):
    def draw():
        label = rng.choice(words.LABELS) if rng.random() < 0.4 else words.made_up(rng, 2)
        return f"{rng.randint(0, 23):02d}:{rng.choice(range(0, 60, 5)):02d} {label}"
    time, label = words.drawn(draw, "alarm", split).split(" ")
    arguments = {"time": time, "label": label}
    ask = rng.choice((f"Set an alarm for {label} at {time}", f"Set an alarm at {time} for {label}", f"Wake me for {label} at {time}"))
    kind = rng.randrange(4)
    if kind == 1:
        arguments["repeat"] = True
        ask += " and repeat it"
    elif kind == 2:
        arguments["repeat"] = False
        ask += " and do not repeat it"
    elif kind == 3:
        arguments["days"] = some(rng, words.DAYS, 3)
        ask += f" on {listed(arguments['days'])}"
    number = rng.randint(1, 99)
    return Call("set_alarm", ask + ".", arguments, f"Alarm {number}", f"Alarm {number} is set for {label} at {time}.")


KINDS = {"get_weather": weather, "search": search, "set_alarm": alarm}


def request(rng, split, names, parallel=0.3):
    """One or two calls of the tools in `names`, as (user's text, calls)."""
    calls = [KINDS[rng.choice(names)](rng, split)]
    if rng.random() < parallel:
        calls.append(KINDS[rng.choice(names)](rng, split))
    return " ".join(c.ask for c in calls), calls


def conversation(rng, split, names, parallel=0.3):
    ask, calls = request(rng, split, names, parallel)
    return messages(ask, calls)


def messages(ask, calls):
    needed = " and ".join(c.name for c in calls)
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": "", "reasoning_content": f"I call {needed}.",
         "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls]},
        *({"role": "tool", "content": c.result} for c in calls),
        {"role": "assistant", "content": " ".join(c.report for c in calls), "reasoning_content": "I have the result."},
    ]


# A tool that is known only from its schema in the prompt.
VERBS = "paint open close move sell buy send count fill clean".split()
KEYS = "colour size room target name number".split()
INTEGER_KEYS = {"size", "number"}


def unknown_tool(rng, split):
    """(schema, conversation) of a tool with a name and keys drawn at random."""
    tool = f"{rng.choice(VERBS)}_{words.drawn(lambda: words.made_up(rng, 2), 'tool', split)}"
    keys = rng.sample(KEYS, 2)
    properties = {k: {"type": "integer" if k in INTEGER_KEYS else "string"} for k in keys}
    schema = {"name": tool, "description": "A tool", "parameters": {"type": "object", "properties": properties, "required": keys}}
    return schema, use(rng, split, schema)


def use(rng, split, schema):
    """A conversation that uses such a tool."""
    draw = {"colour": lambda: rng.choice(words.COLOURS), "room": lambda: rng.choice(words.ROOMS), "name": lambda: words.name(rng, split),
            "target": lambda: words.name(rng, split), "size": lambda: rng.randint(2, 99), "number": lambda: rng.randint(2, 99)}
    tool, keys = schema["name"], schema["parameters"]["required"]
    arguments = {k: draw[k]() for k in keys}
    ask = f"Use {tool} with {keys[0]} {arguments[keys[0]]} and {keys[1]} {arguments[keys[1]]}."
    done = rng.choice(("yes", "no"))
    return messages(ask, [Call(tool, ask, arguments, f"done: {done}", f"The tool says {done}.")])
