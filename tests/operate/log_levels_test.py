"""Levels of the log, changed while a cluster runs; what every line has; and that no text of a client is in any of them.

usage: log_levels_test.py ROOT BINARIES
"""

import http.client
import json
import re
import sys

import operate
from operate import eventually, require

MARKER = "Quokkazebra"  # in every text that a client can send
BASE = {"ts", "level", "module", "role", "name", "incarnation", "msg"}


def post(cluster, path, body, limit=60, read=True, router="router"):
    host, port = cluster.address(router, "http").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=limit)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if not read:  # the client leaves in the middle of the stream
            response.read(10)
            return response.status, ""
        return response.status, response.read().decode()
    finally:
        connection.close()


def lines_of(cluster, name):
    """The log lines of a process; raises where one is no JSON object with all that a line has."""
    out = []
    for text in cluster.log(name).splitlines():
        try:
            line = json.loads(text)
        except ValueError as error:
            raise operate.Failure(f"{name} wrote no JSON: {text}") from error
        require(BASE <= set(line), f"{name}: {BASE - set(line)} are missing in {text}")
        require(re.fullmatch("[0-9a-f]{16}", line["incarnation"]), text)
        require(line["role"] == name.split("-")[0], text)
        out.append(line)
    return out


def levels(command, target, *changes):
    """{process, as the cluster here calls it: {module: its level}}."""
    answer = command.json("log-level", target, *changes, "--json")
    names = {command.cluster.ops(name): name for name in command.cluster.names}
    return {names[p["ops_address"]]: {m["module"]: m for m in p["modules"]} for p in answer["processes"]}


def check_errors(command, cluster):
    for words, code, part in (
            (("router", "nobody=debug"), 2, "no module of the log"),
            (("router", "requests=loud"), 2, "must be debug, info, warn, error or default"),
            (("router", "requests"), 2, "write module=level"),
            (("router", "requests=debug", "--for", "0"), 2, "--for"),
            (("nobody", "requests=debug"), 1, "no process is called nobody"),
            (("127.0.0.1:1", "requests=debug"), 1, "127.0.0.1:1")):
        done = command.run("log-level", *words)
        require(done.returncode == code and part in done.stderr,
                f"{words}: {done.returncode} {done.stdout} {done.stderr}")
    seen = levels(command, "all")
    require(all(not m["changed"] for modules in seen.values() for m in modules.values()), "a refused change was made")
    # The port itself.
    host, port = cluster.ops("router").rsplit(":", 1)
    for query, status, headers in (("module=nobody&level=debug", 400, {}), ("module=all&level=debug&for_s=x", 400, {}),
                                   ("module=all&level=debug", 403, {"Origin": "http://elsewhere"})):
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request("PUT", "/debug/log?" + query, headers=headers)
        response = connection.getresponse()
        body = json.loads(response.read())
        require(response.status == status and "error" in body and "field" in body, f"{query}: {response.status} {body}")
        connection.close()


def check_change_ends(command):
    seen = levels(command, "attention", "transport=debug", "--for", "0.4")
    require(set(seen) == {"attention-0", "attention-1"}, f"{set(seen)}")
    require(seen["attention-0"]["transport"]["changed"] and seen["attention-0"]["transport"]["left_s"] <= 0.4, f"{seen}")
    require(not seen["attention-0"]["model"]["changed"], f"{seen}")
    eventually(lambda: not levels(command, "attention-0")["attention-0"]["transport"]["changed"], 10, "the end of a change")


def send_markers(cluster):
    """A marker in every place where a client can put text, in requests that end in all kinds of ways."""
    text = f"{MARKER} 3 4 5"
    tool = {"type": "function", "function": {"name": f"tool_{MARKER}", "description": MARKER,
                                             "parameters": {"type": "object", "properties": {MARKER: {"type": "string"}}}}}
    chat = {"messages": [{"role": "system", "content": MARKER}, {"role": "user", "content": text}], "max_tokens": 8}
    for path, body in (
            ("/v1/completions", {"prompt": text, "max_tokens": 8, "stop": [MARKER], "user": MARKER}),
            ("/v1/completions", {"prompt": [text, text], "max_tokens": 4, "echo": True, "logprobs": 2}),
            ("/v1/completions", {"prompt": text, "max_tokens": 4, "stream": True}),
            ("/v1/chat/completions", chat), ("/v1/chat/completions", {**chat, "stream": True, "tools": [tool]}),
            ("/v1/chat/completions", {**chat, "metadata": {"note": MARKER}}),
            # Refused ones.
            ("/v1/completions", {"prompt": text * 20000, "max_tokens": 4}),
            ("/v1/completions", {"prompt": text, "max_tokens": MARKER}),
            ("/v1/chat/completions", {"messages": [{"role": MARKER, "content": text}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": MARKER, "text": text}]}]}),
            ("/v1/chat/completions", {"messages": [{"role": "tool", "content": text, "tool_call_id": MARKER}]}),
            ("/tokenize", {"prompt": text})):
        status, body = post(cluster, path, body)
        require(status in (200, 400, 404, 422), f"{path}: {status} {body}")
    post(cluster, "/v1/completions", {"prompt": text, "max_tokens": 1000, "stream": True, "ignore_eos": True}, read=False)
    post(cluster, "/v1/chat/completions", MARKER)


def follow_one(cluster):
    """The same request in the logs of all that had to do with it."""
    status, body = post(cluster, "/v1/completions", {"prompt": "3 4 5", "max_tokens": 4, "temperature": 0})
    require(status == 200, body)

    def found():
        for line in lines_of(cluster, "router"):
            if line["msg"] != "submitting a request" or line["prompt_tokens"] == 0:
                continue
            stream = line["stream"]
            ended = [s for s in lines_of(cluster, "scheduler") if s.get("stream") == stream and s["msg"] == "ended"]
            started = [s for n in ("attention-0", "attention-1") for s in lines_of(cluster, n) if s.get("stream") == stream]
            access = [s for s in lines_of(cluster, "router") if s["msg"] == "request" and s["request_id"] == line["request_id"]]
            if ended and started and access:
                return True
        return False
    eventually(found, 30, "one request in the logs of router, scheduler and worker")


def test(command, cluster, _):
    seen = levels(command, "all")
    require(set(seen) == {*cluster.names}, f"{set(seen)}")
    require({m["level"] for modules in seen.values() for m in modules.values()} == {"info", "warn"}, f"{seen}")
    require(seen["router"]["keys"]["level"] == "warn" and not seen["router"]["keys"]["changed"], "logging.modules")
    check_errors(command, cluster)
    check_change_ends(command)

    seen = levels(command, "all", "all=debug", "--permanent")
    require(all(m["level"] == "debug" and m["left_s"] is None for modules in seen.values() for m in modules.values()),
            f"{seen}")
    follow_one(cluster)
    send_markers(cluster)
    # A worker that dies in the middle of its work, so that replays and their notes are among the lines.
    with operate.Load(cluster, threads=2) as load:
        eventually(lambda: load.answers > 0 or load.errors, 60, "an answer")
        cluster.kill("attention-1")
        answers = load.answers
        eventually(lambda: load.answers > answers + 2 or load.errors, 60, "answers after a worker was lost")
    require(not load.errors, f"{load.errors}")
    for name in cluster.names:
        lines = lines_of(cluster, name)
        # A shard has nothing to say of requests, and no placement changes here.
        require(name.startswith("expert") or any(line["level"] == "debug" for line in lines), f"{name} wrote no debug line")
        for line in lines:
            require(MARKER.lower() not in json.dumps(line).lower(), f"{name} logged what a client wrote: {line}")
    # Back to what is configured.
    seen = levels(command, "router", "all=default")
    require(all(not m["changed"] for m in seen["router"].values()), f"{seen}")
    require(seen["router"]["requests"]["level"] == "info", f"{seen}")

    # With the switch on, the text of prompts is there.
    cluster.names.append("router-1")
    cluster.start_one("router-1", "--set", "logging.texts=true", "--set", "logging.level=debug")
    eventually(lambda: operate.get(cluster.ops("router-1"), "/readyz")[0] == 200, 60, "a second router")
    status, body = post(cluster, "/v1/completions", {"prompt": MARKER, "max_tokens": 2}, router="router-1")
    require(status == 200, body)
    require(any(MARKER in line.get("prompt", "") for line in lines_of(cluster, "router-1")), "logging.texts shows no text")


if __name__ == "__main__":
    sys.exit(operate.main(test, {"workers": 2, "settings": ["logging.modules=keys=warn"]}))
