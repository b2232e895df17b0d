# Renders chat templates for the parent process that started it, as transformers' apply_chat_template does: the same
# sandbox, whitespace settings, extensions, filters and globals. Runs as `python3 -I -c <this text>`; talks in frames
# over the socket on descriptor 0. Every frame is a 4-byte little-endian length and that many bytes.
#
# First frame in: {"templates": {name: text}, "variables": {...}, "special_tokens": [...], "other_tokens": [...],
# "cpu_seconds": n, "max_output_bytes": n}. Answer: "r", or "x" or "c" with a message.
# Then per call, in: one byte of flags (1: mark control tokens) and the JSON document. Out, one frame:
#   "o" + u32 n + n pairs of u32 byte offsets + UTF-8 text   rendered; the pairs are control tokens from the document
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


markers = ()  # the two marking characters of the call at hand


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    out = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        for marker in markers:
            out = out.replace(json.dumps(marker)[1:-1], marker)
    return out


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


def unused_markers(text):
    # Two private-use characters that the document does not hold.
    found = []
    for code in range(0xF0000, 0xFFFFE):
        if chr(code) not in text:
            found.append(chr(code))
            if len(found) == 2:
                return found
    raise BadDocument("the document uses every private character")


def mark(value, pattern, replacement):
    if isinstance(value, str):
        return pattern.sub(replacement, value)
    if isinstance(value, list):
        return [mark(v, pattern, replacement) for v in value]
    if isinstance(value, dict):
        return {k: mark(v, pattern, replacement) for k, v in value.items()}
    return value


def control_pattern(tokens):
    # Also what starts a token at the very end of a string, where the template's own text might complete it.
    starts = {t[:n] for t in tokens for n in range(1, len(t))}
    ordered = lambda texts: "|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)) or "(?!)"
    return re.compile("%s|(?:%s)\\Z" % (ordered(tokens), ordered(starts)))


# Special tokens count as control tokens wherever they stand. The others (such as <think>) are what an assistant turn
# is made of, so there the template must see them as they are.
all_control = control_pattern(config["special_tokens"] + config["other_tokens"])
special_control = control_pattern(config["special_tokens"])


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
    global markers
    markers = ()
    begin = end = None
    if flags & 1:
        begin, end = markers = unused_markers(json.dumps(document, ensure_ascii=False))
        replacement = begin + r"\g<0>" + end
        for key in document:
            if key != "messages":
                document[key] = mark(document[key], all_control, replacement)
        document["messages"] = [
            mark(m, special_control if m.get("role") == "assistant" else all_control, replacement)
            for m in document["messages"]
        ]
    name = "tool_use" if document["tools"] and "tool_use" in templates else "default"
    out = templates[name].render(**{**config["variables"], **document})
    if len(out) > config["max_output_bytes"]:
        raise BadDocument("the rendered prompt is longer than %d bytes" % config["max_output_bytes"])
    if begin is None or (begin not in out and end not in out):
        return [], out.encode("utf-8", "replace")
    # A template may cut a string between the markers; a lone marker goes, and what it marked is left as it is.
    ranges, pieces, size, opened = [], [], 0, None
    for piece in re.split("([%s%s])" % (begin, end), out):
        if piece == begin:
            opened = size
        elif piece == end:
            if opened is not None and opened < size:
                ranges.append((opened, size))
            opened = None
        else:
            raw = piece.encode("utf-8", "replace")
            if opened is not None and raw and not all_control.fullmatch(piece):
                opened = None
            pieces.append(raw)
            size += len(raw)
    return ranges, b"".join(pieces)


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
