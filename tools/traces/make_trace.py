#!/usr/bin/python3
"""Makes a seeded trace of requests for the scheduler's replay (bench/scheduler/replay_bench.cc).

  make_trace.py --mix mixed|fairness [--seconds 300] [--load 1.0] [--time-scale 1.0] [--seed 1] > trace.tsv

One line a request, its fields separated by tabs:

  tenant kind priority at after delay_ms deadline_ms output answer prompt

`at` is the arrival in ms where `after` is -1; else the request comes delay_ms after request number `after` (counted from
0) has ended: the next turn of a chat, the next step of an agent. `prompt` is a list of segments seed:length joined by
commas. The tokens of a segment are a function of its seed alone, so equal leading segments are a shared prefix;
`answer` is the seed of the tokens that the request will generate, which a later turn's prompt contains as a segment.

What is in a mix, at --load 1 (rates scale with it, nothing else does). --time-scale 4 is for machines four times slower:
every time, the seconds of the trace too, becomes four times as long.

  mixed     chat    0.12 sessions a second: one of 4 system prompts (300 to 900 tokens), 1 to 12 turns of 20 to 400
                    tokens, answers of 20 to 500, think times of 12 s on average, a deadline of 20 to 60 s
            agent   0.02 sessions a second: one of 3 tool descriptions (3,000 to 6,000 tokens), 6 to 16 steps that each add
                    a tool's output of 100 to 900 tokens after 1.5 s, answers of 20 to 150
            batch   every 100 s 24 documents of 400 to 2,500 tokens under one instruction of 200, summaries of 100 to 250;
                    two bands below the others, no hurry
  fairness  alice, bob, carol: requests of 100 to 400 tokens with answers of 40 to 160, 0.4, 0.8 and 1.6 a second
            flood: the same requests, 12 a second
"""

import argparse
import math
import random
import sys


class Trace:
    def __init__(self, seed, time_scale):
        self.random = random.Random(seed)
        self.time_scale = time_scale
        self.lines = []
        self.next_seed = 1

    def seed(self):
        self.next_seed += 1
        return self.next_seed

    def segment(self, length):
        return (self.seed(), length)

    def add(self, tenant, kind, prompt, output, *, priority=0, at=-1, after=-1, delay=0.0, deadline=600.0):
        """Returns the request's number and its answer as a segment."""
        answer = (self.seed(), output)
        text = ",".join(f"{seed}:{length}" for seed, length in prompt)
        ms = [round(1000 * self.time_scale * seconds) for seconds in (at, delay, deadline)]
        self.lines.append(f"{tenant}\t{kind}\t{priority}\t{ms[0]}\t{after}\t{ms[1]}\t{ms[2]}\t{output}\t{answer[0]}\t"
                          f"{text}")
        return len(self.lines) - 1, answer

    def between(self, low, high):
        """Skewed to the low end, as lengths of texts are: log-uniform."""
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def arrivals(self, rate, seconds):
        at = self.random.expovariate(rate)
        while at < seconds:
            yield at
            at += self.random.expovariate(rate)


def chat(trace, rate, seconds):
    systems = [trace.segment(trace.between(300, 900)) for _ in range(4)]
    for at in trace.arrivals(rate, seconds):
        history = [trace.random.choice(systems)]
        deadline = trace.random.uniform(20, 60)
        last = -1
        for turn in range(min(12, 1 + int(trace.random.expovariate(1 / 3.0)))):
            history.append(trace.segment(trace.between(20, 400)))
            when = {"at": at} if turn == 0 else {"after": last, "delay": 1 + trace.random.expovariate(1 / 11.0)}
            last, answer = trace.add("chat", "chat", history, trace.between(20, 500), deadline=deadline, **when)
            history.append(answer)


def agent(trace, rate, seconds):
    tools = [trace.segment(trace.between(3000, 6000)) for _ in range(3)]
    for at in trace.arrivals(rate, seconds):
        history = [trace.random.choice(tools), trace.segment(trace.between(100, 800))]
        last = -1
        for step in range(trace.random.randint(6, 16)):
            when = {"at": at} if step == 0 else {"after": last, "delay": trace.random.uniform(0.5, 2.5)}
            last, answer = trace.add("agent", "agent", history, trace.between(20, 150), deadline=120, **when)
            history += [answer, trace.segment(trace.between(100, 900))]


def batch(trace, documents, seconds):
    instruction = trace.segment(200)
    at = 20.0
    while at < seconds:
        for _ in range(documents):
            trace.add("batch", "batch", [instruction, trace.segment(trace.between(400, 2500))], trace.between(100, 250),
                      priority=2, at=at)
        at += 100.0


def mixed(trace, load, seconds):
    chat(trace, 0.12 * load, seconds)
    agent(trace, 0.02 * load, seconds)
    batch(trace, max(1, round(24 * load)), seconds)


def fairness(trace, load, seconds):
    for tenant, rate in (("alice", 0.4), ("bob", 0.8), ("carol", 1.6), ("flood", 12.0)):
        for at in trace.arrivals(rate * load, seconds):
            trace.add(tenant, "single", [trace.segment(trace.between(100, 400))], trace.between(40, 160), at=at)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=("mixed", "fairness"), required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not (args.seconds > 0 and args.load > 0 and args.time_scale > 0):
        parser.error("--seconds, --load and --time-scale must be above 0")
    trace = Trace(args.seed, args.time_scale)
    {"mixed": mixed, "fairness": fairness}[args.mix](trace, args.load, args.seconds)
    sys.stdout.write("# tenant kind priority at after delay_ms deadline_ms output answer prompt\n")
    sys.stdout.write("\n".join(trace.lines) + "\n")


if __name__ == "__main__":
    main()
