"""A followed request through a cluster of processes: every hop, a lost worker, and the Chrome trace of `conclave timeline`.

usage: timeline_test.py ROOT BINARIES [--print]     --print: one timeline, as docs/timelines.md shows it
"""

import http.client
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

from cluster import Cluster, eventually, get

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TOKENS = 800  # of an answer that is still running when its worker is stopped
LIMIT = 240  # seconds; bounds a failing test, and a busy machine must not reach it


class Failure(Exception):
    pass


def require(condition, message):
    if not condition:
        raise Failure(message)


class TwoWorkers(Cluster):
    def __init__(self, binaries, model, directory):
        super().__init__(binaries, model, directory)
        self.names.insert(-1, "attention-1")


def ask(cluster, name, max_tokens, trace=TRACE, flags="01"):
    """(status, headers, the answer's id)"""
    host, port = cluster.address("router", "http").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT)
    try:
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": "Count from 3 to 40 and then back again.", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}),
            {"traceparent": f"00-{trace}-00f067aa0ba902b7-{flags}", "x-request-id": name})
        response = connection.getresponse()
        body = json.loads(response.read())
        return response.status, {k.lower(): v for k, v in response.getheaders()}, body.get("id")
    finally:
        connection.close()


def timeline(cluster, name):
    status, body = get(cluster.address("router", "admin"), f"/debug/requests/{name}")
    require(status == 200, f"/debug/requests/{name}: {status} {body}")
    return json.loads(body)


def check_steps(seen, workers, shards):
    """Every figure within those that hold it; times are rounded to microseconds."""
    slack = 0.01
    before = 0
    for step in seen["scheduler"]["steps"]:
        where = json.dumps(step)
        require(step["worker"] in workers, where)
        require(before <= step["reported_ms"], where)
        before = step["reported_ms"]
        require(step["planned_ms"] + step["queued_ms"] + step["wall_ms"] <= step["reported_ms"] + slack, where)
        require(step["compute_ms"] + step["expert_wait_ms"] <= step["wall_ms"] + slack, where)
        parts = sum(step[f"{part}_ms"] for part in ("attention", "dispatch", "combine", "sampling", "other"))
        require(abs(parts - step["compute_ms"]) <= slack, where)
        require(step["shards"] and {shard["shard"] for shard in step["shards"]} <= set(shards), where)
        for shard in step["shards"]:
            require(shard["slowest_ms"] <= shard["outstanding_ms"] + slack <= step["wall_ms"] + 2 * slack, where)


def check_trace(trace, workers):
    names, processes, used = set(), {}, set()
    for event in trace["traceEvents"]:
        require(event["ph"] in ("X", "M", "i"), str(event))
        if event["ph"] == "M":
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            continue
        require(isinstance(event["ts"], (int, float)) and event.get("dur", 0) >= 0, str(event))
        names.add(event["name"])
        used.add(event["pid"])
    require({"attention", "dispatch", "waiting for experts", "combine", "sampling", "queued", "token 0"} <= names,
            f"the trace has {sorted(names)}")
    require(used <= set(processes), f"{used} of {processes}")
    require({"router", "scheduler", "expert-0", "expert-1"} | set(workers) <= set(processes.values()), str(processes))


def check_whole(cluster, binaries, directory):
    status, headers, answer = ask(cluster, "first", 12)
    require(status == 200, f"{status}")
    require(headers["traceparent"].startswith(f"00-{TRACE}-") and headers["traceparent"].endswith("-01"), str(headers))
    seen = timeline(cluster, "first")
    require(timeline(cluster, answer) | {"age_ms": 0} == seen | {"age_ms": 0}, "by the answer's id it is another one")
    require(seen["outcome"] == "length" and seen["completion_tokens"] == 12, str(seen))
    require([m["what"] for m in seen["router"]["marks"]] == ["received", "text", "tokenized", "submitted", "accepted", "ended"], str(seen["router"]["marks"]))
    require([m["what"] for m in seen["scheduler"]["marks"]] == ["accepted", "started", "ended"], str(seen["scheduler"]["marks"]))
    require(len(seen["router"]["tokens"]) == 12, str(seen["router"]["tokens"]))
    positions = sum(step["count"] for step in seen["scheduler"]["steps"])
    require(positions == seen["prompt_tokens"] + 11, f"{positions} positions")
    check_steps(seen, ["attention-0", "attention-1"], ["expert-0", "expert-1"])
    path = directory / "trace.json"
    done = subprocess.run([str(binaries / "conclave"), "timeline", "first", "--admin", cluster.address("router", "admin"),
                           "--out", str(path)], capture_output=True, text=True, timeout=LIMIT)
    require(done.returncode == 0, done.stderr)
    check_trace(json.loads(path.read_text()), [seen["scheduler"]["steps"][0]["worker"]])
    done = subprocess.run([str(binaries / "conclave"), "timeline", "nobody", "--admin", cluster.address("router", "admin")],
                          capture_output=True, text=True, timeout=LIMIT)
    require(done.returncode != 0 and "no timeline" in done.stderr, f"{done.returncode} {done.stderr}")
    return seen


def check_lost_worker(cluster):
    """The request moves to the other worker; its timeline says so, and has steps of both."""
    def steps_of(name):
        status, body = get(cluster.address("router", "admin"), f"/debug/requests/{name}")
        return json.loads(body).get("scheduler", {}).get("steps", []) if status == 200 else []

    for attempt in range(20):
        name, result = f"moved-{attempt}", []
        thread = threading.Thread(target=lambda: result.append(ask(cluster, name, TOKENS, trace="a" * 32)))
        thread.start()
        victim = eventually(lambda: len(steps_of(name)) > 3, LIMIT, "some steps of a long answer") and steps_of(name)[0]["worker"]
        cluster.running[victim].send_signal(signal.SIGSTOP)
        if timeline(cluster, name)["state"] == "open":  # nobody else computes for it now
            break
        cluster.running[victim].send_signal(signal.SIGCONT)
        thread.join()
    else:
        raise Failure("no answer was long enough to stop its worker")
    cluster.kill(victim)
    thread.join()
    status, _, _ = result[0]
    require(status == 200, f"{status}")
    seen = timeline(cluster, name)
    marks = [m["what"] for m in seen["scheduler"]["marks"]]
    require(marks == ["accepted", "started", "replayed", "started", "ended"], str(marks))
    require(victim in seen["scheduler"]["marks"][2]["detail"], str(seen["scheduler"]["marks"]))
    require({step["worker"] for step in seen["scheduler"]["steps"]} == {"attention-0", "attention-1"}, "steps of both")
    require(seen["scheduler"]["left_out"] > 0, "more steps than are kept")
    check_steps(seen, ["attention-0", "attention-1"], ["expert-0", "expert-1"])


def main():
    root, binaries = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        try:
            with TwoWorkers(binaries, root / "models/demo-m2", directory) as cluster:
                cluster.start(LIMIT)
                seen = check_whole(cluster, binaries, directory)
                if "--print" in sys.argv:
                    for part in (seen["router"]["tokens"], seen["scheduler"]["steps"]):
                        del part[2:]
                    print(json.dumps(seen, indent=1))
                    return 0
                check_lost_worker(cluster)
        except (Failure, TimeoutError) as error:
            print(error)
            return 1
    print(f"{len(seen['scheduler']['steps'])} steps of the first request")
    return 0


if __name__ == "__main__":
    sys.exit(main())
