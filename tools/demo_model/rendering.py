"""The chat template applied as transformers applies it, and its output cut into a shared prefix and the turns after it."""

import json
import pathlib

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = pathlib.Path(__file__).with_name("chat_template.jinja")


def _raise(message):
    raise jinja2.exceptions.TemplateError(message)


class Renderer:
    def __init__(self, template=TEMPLATE):
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = lambda x, ensure_ascii=False: json.dumps(x, ensure_ascii=ensure_ascii)
        env.globals["raise_exception"] = _raise
        self.template = env.from_string(pathlib.Path(template).read_text(encoding="utf-8"))

    def text(self, messages, tools=None, prompt=False):
        return self.template.render(messages=messages, tools=tools, add_generation_prompt=prompt)

    def prefix(self, system, tools):
        """The system turn alone; system may be None (the template's default)."""
        return self.text(_lead(system), tools)

    def turns(self, system, tools, messages, prompt=False):
        """What follows the prefix."""
        whole = self.text(_lead(system) + messages, tools, prompt)
        prefix = self.prefix(system, tools)
        assert whole.startswith(prefix)
        return whole[len(prefix):]


def _lead(system):
    return [] if system is None else [{"role": "system", "content": system}]
