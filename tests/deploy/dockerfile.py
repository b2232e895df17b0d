"""Reads a Dockerfile and its .dockerignore: as much of the language as deploy/docker uses; anything else is refused."""

import dataclasses
import re
import shlex

KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}


@dataclasses.dataclass
class Stage:
    name: str
    base: str       # an earlier stage or an image
    steps: list     # (instruction, rest of its line)

    def copies(self):
        """(stage or None for the context, sources, target) of every COPY."""
        for name, rest in self.steps:
            if name == "COPY":
                words = rest.split()
                origin = None
                if words[0].startswith("--"):
                    option, _, origin = words.pop(0).partition("=")
                    if option != "--from":
                        raise ValueError(f"COPY {option}")
                yield origin, words[:-1], words[-1]

    def runs(self):
        return [rest for name, rest in self.steps if name == "RUN"]


@dataclasses.dataclass
class Recipe:
    arguments: dict     # of the whole file: name -> default
    stages: dict        # name -> Stage, in the order of the file

    @property
    def last(self):
        return list(self.stages)[-1]

    def chain(self, name):
        """The stages that `name` is made of, the first one first."""
        stage = self.stages[name]
        return (self.chain(stage.base) if stage.base in self.stages else []) + [stage]

    def needed(self, name):
        """Names of all stages that `name` needs, itself included."""
        out = set()
        for stage in self.chain(name):
            out.add(stage.name)
            for origin, _, _ in stage.copies():
                out |= self.needed(origin) if origin else set()
        return out


def parse(text):
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    recipe = Recipe({}, {})
    for line in lines.splitlines():
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        if name not in KNOWN:
            raise ValueError(f"instruction {name}")
        rest = " ".join(rest.split()) if name != "RUN" else rest.strip()
        if name == "FROM":
            base, word, stage = rest.split()
            if word != "AS" or stage in recipe.stages:
                raise ValueError(f"FROM {rest}")
            base = re.sub(r"\$\{(\w+)\}", lambda found: recipe.arguments[found.group(1)], base)
            recipe.stages[stage] = Stage(stage, base, [])
        elif not recipe.stages:
            if name != "ARG":
                raise ValueError(f"{name} before FROM")
            key, _, value = rest.partition("=")
            recipe.arguments[key] = value
        elif name == "ARG":
            raise ValueError("ARG inside a stage")
        else:
            recipe.stages[list(recipe.stages)[-1]].steps.append((name, rest))
    for stage in recipe.stages.values():
        for origin, _, _ in stage.copies():
            if origin is not None and origin not in recipe.stages:
                raise ValueError(f"COPY --from={origin}")
    return recipe


def assignments(rest):
    """The variables of an ENV instruction."""
    return dict(word.split("=", 1) for word in shlex.split(rest))


def ignores(text):
    """A function that says whether a path of the context is left out."""
    patterns = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("!"):
            raise ValueError(f"dockerignore {line}")
        parts = re.split(r"(\*\*/|\*|\?)", line.strip("/"))
        to_regex = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
        patterns.append(re.compile("".join(to_regex.get(p, re.escape(p)) for p in parts)))

    def left_out(path):
        parts = str(path).split("/")
        above = ["/".join(parts[:i + 1]) for i in range(len(parts))]
        return any(p.fullmatch(name) for p in patterns for name in above)
    return left_out
