"""Held-out prompts of the demo checkpoint through a real cluster, greedy.

  demo_eval.py --bin DIR [--model DIR] [--per-skill N] [--shards 2 ...] [--sequential N] [--floors FILE]
               [--usage PROGRAM] [--answers FILE] [--agree FILE PERCENT]

Starts `conclave up` once for each number of shards, asks every prompt at concurrency 16, scores the answers of the first
run, and demands that every other run and the first `--sequential` prompts asked one by one give the same text. Prints a
line per skill; exits 1 when a skill is below its floor, a text differs, or two answer files agree too little.

Needs only Debian's Python and jinja2: the prompts are rendered here and sent to /v1/completions.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "demo_model"))
import rendering  # noqa: E402
import skills  # noqa: E402

SEED = 2026
# Cases for each unit of --per-skill; the first six rows are the four first skills.
SHARES = {"count": 3, "spell": 2, "reverse": 2, "tool_call": 4, "tool_answer": 2, "table": 3,
          "add": 1, "unknown_tool": 1, "spell_small": 1, "reverse_small": 1, "repeat": 1, "zaehle": 1, "fixed": 1, "fixed_german": 1}
# What the bar is stated for: four skills, made of these kinds of prompts.
FIRST_FOUR = {"counting": ("count",), "spelling": ("spell", "reverse"), "tools": ("tool_call", "tool_answer"), "table": ("table",)}
CONCURRENCY = 16
MAX_TOKENS = 600
BUSIEST_EXPERT = 6  # times the mean of its layer, at most
START_SECONDS = 120


class Cluster:
    """`conclave up` on loopback ports that the kernel chooses."""

    def __init__(self, bin_dir, model, shards):
        self.folder = tempfile.TemporaryDirectory(prefix="demo-eval-")
        fifo = pathlib.Path(self.folder.name) / "ready"
        os.mkfifo(fifo)
        # Opened for reading and writing, so that neither side waits for the other to open it.
        self.ready = os.fdopen(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
        self.process = subprocess.Popen(
            [str(bin_dir / "conclave"), "up", "--model", str(model), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
             "--attention", "1", "--experts", str(shards), "--ready-file", str(fifo)], stdout=subprocess.DEVNULL,
            env=dict(os.environ, CONCLAVE_ROUTER_TRUST_WITHOUT_KEYS="true"))  # whole rendered conversations are sent
        deadline = time.monotonic() + START_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the cluster with {shards} shards did not start")
            if select.select([self.ready], [], [], 0.5)[0]:
                line += self.ready.read(4096) or b""
        url = urllib.parse.urlparse(line.decode().strip())
        self.address = (url.hostname, url.port)

    def complete(self, prompt):
        link = http.client.HTTPConnection(*self.address, timeout=300)
        try:
            link.request("POST", "/v1/completions", json.dumps(
                {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "allow_special_tokens": True}), {"Content-Type": "application/json"})
            response = link.getresponse()
            body = response.read()
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {body[:300]!r}")
            choice = json.loads(body)["choices"][0]
            return choice["text"] + ("" if choice["finish_reason"] == "stop" else "\n(cut off)")
        finally:
            link.close()

    def ask(self, prompts, concurrency):
        with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(self.complete, prompts))

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.ready.close()
        self.folder.cleanup()


def parsed(text):
    """(content, calls as [(name, {key: text})]) of what follows the thinking; None without its end."""
    _, end, answer = text.partition("</think>")
    if not end:
        return None
    calls = []
    for block in re.findall(r"<minimax:tool_call>(.*?)</minimax:tool_call>", answer, re.DOTALL):
        for invoke in re.findall(r"<invoke name=(.*?)</invoke>", block, re.DOTALL):
            name, _, rest = invoke.partition(">")
            calls.append((name.strip('"'), dict(re.findall(r'<parameter name="(.*?)">(.*?)</parameter>', rest, re.DOTALL))))
    return answer.partition("<minimax:tool_call>")[0].strip("\n"), calls


def typed(calls, schemas):
    """The calls' arguments as JSON values of the types that the schemas name; ValueError or KeyError where they are not."""
    properties = {s["function"]["name"]: s["function"]["parameters"]["properties"] for s in schemas}
    out = []
    for name, arguments in calls:
        values = {}
        for key, text in arguments.items():
            kind = properties[name][key]["type"]
            values[key] = text if kind == "string" else json.loads(text)
            wanted = {"string": str, "integer": int, "boolean": bool, "array": list}[kind]
            if not isinstance(values[key], wanted) or (wanted is int and isinstance(values[key], bool)):
                raise ValueError(f"{key} is no {kind}")
        out.append((name, values))
    return out


def right(case, text):
    answer = parsed(text)
    if answer is None:
        return False
    content, calls = answer
    gold = case["answer"]
    wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in gold.get("tool_calls", [])]
    try:
        return content == gold["content"] and typed(calls, case["tools"] or []) == wanted
    except (ValueError, KeyError):
        return False


def prompt_of(render, case):
    lead = [] if case["system"] is None else [{"role": "system", "content": case["system"]}]
    return render.text(lead + case["messages"], case["tools"], prompt=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "demo-m2")
    parser.add_argument("--per-skill", type=int, default=12)
    parser.add_argument("--shards", type=int, nargs="+", default=[2])
    parser.add_argument("--sequential", type=int, default=0, help="so many prompts are asked one by one as well")
    parser.add_argument("--floors", type=pathlib.Path, help="JSON: least share of right answers by skill, 'first four' among them")
    parser.add_argument("--answers", type=pathlib.Path, help="write all answers here")
    parser.add_argument("--agree", nargs=2, metavar=("FILE", "PERCENT"), help="compare with such a file of another checkpoint")
    parser.add_argument("--usage", type=pathlib.Path, help="the program that counts how evenly the experts are used")
    parser.add_argument("--show-wrong", type=int, default=0)
    args = parser.parse_args()

    cases = skills.held_out_cases(SEED, {s: n * args.per_skill for s, n in SHARES.items()})
    render = rendering.Renderer(args.model / "chat_template.jinja")
    prompts = [prompt_of(render, c) for c in cases]
    faults, first = [], None
    for shards in args.shards:
        cluster = Cluster(args.bin, args.model, shards)
        try:
            begin = time.monotonic()
            texts = cluster.ask(prompts, CONCURRENCY)
            print(f"{len(prompts)} prompts, {shards} shards, concurrency {CONCURRENCY}: {time.monotonic() - begin:.1f} s", flush=True)
            if first is None:
                first = texts
            faults += [f"{shards} shards: another text for {p!r}: {a!r} instead of {b!r}" for p, a, b in zip(prompts, texts, first) if a != b]
            if args.sequential and shards == args.shards[0]:
                step = max(1, len(prompts) // args.sequential)
                begin = time.monotonic()
                alone = cluster.ask(prompts[::step], 1)
                print(f"{len(alone)} prompts one by one: {time.monotonic() - begin:.1f} s", flush=True)
                faults += [f"alone: another text for {p!r}: {a!r} instead of {b!r}"
                           for p, a, b in zip(prompts[::step], alone, first[::step]) if a != b]
        finally:
            cluster.stop()

    score, wrong = {}, []
    for case, text in zip(cases, first):
        ok = right(case, text)
        score.setdefault(case["skill"], []).append(ok)
        if not ok:
            wrong.append((case, text))
    for skill, kinds in FIRST_FOUR.items():
        score[skill] = [ok for kind in kinds for ok in score[kind]]
    score["first four"] = [ok for skill in FIRST_FOUR for ok in score[skill]]
    floors = json.loads(args.floors.read_text()) if args.floors else {}
    for skill, oks in score.items():
        share = sum(oks) / len(oks)
        print(f"{skill:14} {sum(oks):4} of {len(oks):4}  {share:6.1%}" + (f"  floor {floors[skill]:.0%}" if skill in floors else ""))
        if share < floors.get(skill, 0):
            faults.append(f"{skill}: {share:.1%} is below its floor of {floors[skill]:.0%}")
    if args.usage:
        told = subprocess.run([args.usage, args.model, str(BUSIEST_EXPERT)], input="".join(p + t + "\0" for p, t in zip(prompts, first)).encode(),
                              capture_output=True, timeout=600)
        print(told.stdout.decode() + told.stderr.decode(), end="")
        if told.returncode:
            faults.append("an expert is unused, or used too much")
    for case, text in wrong[:args.show_wrong]:
        print(f"wrong ({case['skill']}): {case['messages'][-1]['content']!r}\n  wanted {case['answer']}\n  got    {text!r}")
    if args.answers:
        args.answers.write_text(json.dumps([{"prompt": p, "text": t} for p, t in zip(prompts, first)], ensure_ascii=False, indent=1))
    if args.agree:
        other = {a["prompt"]: a["text"] for a in json.loads(pathlib.Path(args.agree[0]).read_text())}
        same = [other.get(p) == t for p, t in zip(prompts, first)]
        first_four = [ok for ok, c in zip(same, cases) if any(c["skill"] in kinds for kinds in FIRST_FOUR.values())]
        print(f"agrees with {args.agree[0]} on {sum(same)} of {len(same)} texts ({sum(same) / len(same):.1%}), "
              f"of the first four skills on {sum(first_four)} of {len(first_four)} ({sum(first_four) / len(first_four):.1%})")
        if sum(first_four) / len(first_four) < float(args.agree[1]) / 100:
            faults.append(f"agrees on less than {args.agree[1]}% of the texts of the first four skills")
    for fault in faults[:20]:
        print("FAULT:", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
