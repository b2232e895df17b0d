# Renders chat templates for the parent process that started it, as transformers' apply_chat_template does: the same
# sandbox, whitespace settings, extensions, filters and globals. Runs as `python3 -I -c <this text>`; talks in frames
# over the socket on descriptor 0. Every frame is a 4-byte little-endian length and that many bytes.
#
# First frame in: {"templates": {name: text}, "variables": {...}, "special_tokens": [...], "other_tokens": [...],
# "cpu_seconds": n, "max_output_bytes": n}. Answer: "r", or "x" or "c" with a message.
# Then per call, in: one byte of flags (1: the document's text is text) and the JSON document. Out, one frame:
#   "o" + u32 n + n pairs of u32 byte offsets + UTF-8 text   rendered; in the pairs' ranges no control token is to be seen
#   "e" + message   the template raised      "i" + message   the document is wrong
#   "m" + message   out of memory; the process then ends
# At the start "x" means that something is missing on this machine, "c" that a template does not compile.
import datetime
import json
import os
import re
import resource
import socket
import struct
import sys

link = socket.socket(fileno=os.dup(0))
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)


def receive(n):
    parts = []
    while n:
        part = link.recv(min(n, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def receive_frame():
    return receive(struct.unpack("<I", receive(4))[0])


def send_frame(kind, body):
    link.sendall(struct.pack("<I", len(body) + 1) + kind + body)


def fail(kind, error):
    send_frame(kind, str(error).encode("utf-8", "replace")[:4096])


config = json.loads(receive_frame())
try:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError:
    send_frame(b"x", b"the Python package jinja2 is missing: install it with 'apt-get install python3-jinja2'")
    sys.exit(0)


class GenerationTag(jinja2.ext.Extension):
    # {% generation %} marks what a model wrote, for training; here its body is only rendered.
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):
    return datetime.datetime.now().strftime(format)


class TemplateDict:
    # `dict(...)` in templates, without the class itself and what hangs off it.
    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        for name in dict(*args, **kwargs):
            TemplateNamespace.check(name)
        jinja2.utils.Namespace.__init__(self, *args, **kwargs)

    def __setitem__(self, name, value):
        TemplateNamespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError("a namespace takes no attribute that starts with an underscore: " + name)


env = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
)
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = strftime_now
env.globals["dict"] = TemplateDict()
env.globals["namespace"] = TemplateNamespace

REASONING = ("reasoning_content", "thinking", "reasoning")


class BadDocument(Exception):
    pass


def normalize(messages):
    if not isinstance(messages, list):
        raise BadDocument("messages is not an array")
    out = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadDocument("messages[%d] is not an object" % i)
        message = {k: v for k, v in message.items() if v is not None}
        reasoning = next((message[k] for k in REASONING if k in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        out.append(message)
    return out


# What a request says must not become a control token. So before rendering, every character of its strings with which
# a control token could begin or end is replaced by a private-use character that stands for it, and after rendering
# it is put back and its place noted; the tokenizer sees no added token there. One character stands for one, so a
# template may strip, cut, join, reverse or escape the strings as it likes: no order of that makes a token of them.
# (Tokens that begin and end with letters or digits are replaced where they are spelt in full, since templates compare
# such words. And a template that itself writes both ends of a token around a string of the request is beyond help.)
ALL_CONTROL = [t for t in config["special_tokens"] + config["other_tokens"] if t.strip()]
ENDS = sorted({c for t in ALL_CONTROL for c in (t[0], t[-1]) if not c.isalnum() and not c.isspace()})
WORDS = [t for t in ALL_CONTROL if t[0] not in ENDS and t[-1] not in ENDS]
STARTS = sorted({t[0] for t in ALL_CONTROL} | set(ENDS))


def longest_first(texts):
    return "|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)) or "(?!)"


# An assistant's turn is made of the other tokens: there, spelt in full, they are left as they are. So are these tags
# where they are no tokens at all, since templates look for them.
TAGS = ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"]
ASSISTANT_KEEPS = re.compile("(%s)" % longest_first({t for t in config["other_tokens"] + TAGS if t.strip()}))
WORD = re.compile(longest_first(WORDS))


def stand_ins(text):
    # A private-use character for each one to be replaced; none of them, nor an escape of it, is in the document.
    found = {}
    wanted = sorted(set(ENDS) | {t[0] for t in WORDS})
    code = 0xF0000
    while len(found) < len(wanted):
        if code >= 0xFFFFE:
            raise BadDocument("the document uses every private character")
        forms = escapes(chr(code))
        forms += tuple(form.replace("\\", "\\\\") for form in forms)  # as a dump writes an escape that is text
        if chr(code) not in text and not any(form in text for form in forms):
            found[wanted[len(found)]] = chr(code)
        code += 1
    return found


def escapes(character):
    # As JSON and as Python's repr write it, without the first backslash.
    return json.dumps(character)[2:-1], repr(character)[2:-1]


def hide(value, change):
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [hide(v, change) for v in value]
    if isinstance(value, dict):
        return {hide(k, change): hide(v, change) for k, v in value.items()}
    return value


def hide_document(document, table):
    ends = str.maketrans({c: table[c] for c in ENDS})

    def change(text):
        return WORD.sub(lambda m: table[m.group()[0]] + m.group()[1:], text).translate(ends)

    def change_assistant(text):
        # Every other piece is one of the kept tokens.
        pieces = ASSISTANT_KEEPS.split(text)
        pieces[::2] = [change(piece) for piece in pieces[::2]]
        return "".join(pieces)

    # The names of variables and of the messages' own fields are left: templates ask for them.
    for key in document:
        if key != "messages":
            document[key] = hide(document[key], change)
    spoken = ("content", "reasoning_content", "reasoning", "thinking")
    document["messages"] = [
        {k: hide(v, change_assistant if m.get("role") == "assistant" and k in spoken else change) for k, v in m.items()}
        for m in document["messages"]
    ]


def reveal(out, table):
    # The text as it is, and the byte ranges in which nothing is a control token. One range holds as much as it can:
    # up to the next character with which the template's own text could begin one.
    back = {stand_in: c for c, stand_in in table.items()}
    for stand_in in back:
        for form in escapes(stand_in):
            out = out.replace("\\" + form, stand_in)
    inside = "[%s]" % "".join(back)
    span = re.compile("%s(?:[^%s]*%s)?" % (inside, "".join(re.escape(c) for c in STARTS), inside))
    plain = str.maketrans(back)
    ranges, pieces, size, done = [], [], 0, 0
    for match in span.finditer(out):
        before = out[done : match.start()].encode("utf-8", "replace")
        hidden = match.group().translate(plain).encode("utf-8", "replace")
        pieces += [before, hidden]
        size += len(before) + len(hidden)
        ranges.append((size - len(hidden), size))
        done = match.end()
    pieces.append(out[done:].encode("utf-8", "replace"))
    return ranges, b"".join(pieces)


def render(flags, text):
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadDocument("not JSON: %s" % error)
    if not isinstance(document, dict):
        raise BadDocument("the document is not an object")
    document["messages"] = normalize(document.get("messages"))
    document.setdefault("tools", None)
    document.setdefault("documents", None)
    document.setdefault("add_generation_prompt", False)
    table = None
    if flags & 1 and ALL_CONTROL:
        table = stand_ins(json.dumps(document, ensure_ascii=False))
        hide_document(document, table)
    name = "tool_use" if document["tools"] and "tool_use" in templates else "default"
    out = templates[name].render(**{**config["variables"], **document})
    if len(out) > config["max_output_bytes"]:
        raise BadDocument("the rendered prompt is longer than %d bytes" % config["max_output_bytes"])
    if table is None:
        return [], out.encode("utf-8", "replace")
    return reveal(out, table)


try:
    templates = {name: env.from_string(text) for name, text in config["templates"].items()}
except Exception as error:
    fail(b"c", "the chat template does not compile: %s" % error)
    sys.exit(0)

# What Python and Jinja load only when first needed: the time zone, and the handling of errors in templates.
strftime_now("%c")
for broken in ("{{ none.a.b }}", "{{ raise_exception('') }}", "{{ [] | tojson }}{{ 1 | pprint }}"):
    try:
        env.from_string(broken).render()
    except Exception as error:
        str(error)
# From here on nothing is opened, written or started.
for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
    resource.setrlimit(limit, (0, 0))
send_frame(b"r", b"")

while True:
    frame = receive_frame()
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + config["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    try:
        ranges, text = render(frame[0], frame[1:])
        head = struct.pack("<I", len(ranges)) + b"".join(struct.pack("<II", *r) for r in ranges)
        answer = (b"o", head + text)
    except MemoryError:
        frame = None
        send_frame(b"m", b"rendering needed more memory than template_memory_bytes allows")
        os._exit(0)
    except BadDocument as error:
        answer = (b"i", str(error).encode("utf-8", "replace")[:4096])
    except RecursionError:
        answer = (b"e", b"the template recurses too deeply")
    except Exception as error:
        answer = (b"e", (str(error) or type(error).__name__).encode("utf-8", "replace")[:4096])
    frame = None
    send_frame(*answer)
