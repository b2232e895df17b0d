"""`conclave status --watch` at a terminal, beside a real cluster: what the page shows while processes die and come back,
how it follows the terminal's size, and that the terminal is as before at the end.

usage: watch_test.py ROOT BINARIES
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import operate
from operate import Load, eventually, require


class Terminal:
    """A pseudo terminal and the screen that a program draws on it, as far as this program's sequences go."""

    def __init__(self, columns, rows):
        self.master, self.slave = pty.openpty()
        self.columns, self.rows = columns, rows
        self.resize(columns, rows)
        self.settled()
        self.raw = b""
        self.pending = b""
        self.clear()
        self.alternate = False
        self.cursor_shown = True

    def clear(self):
        self.lines, self.row, self.column = {}, 0, 0

    def resize(self, columns, rows):
        """What is on its way may still be of the size before, until settled()."""
        self.bounds = max(columns, self.columns), max(rows, self.rows)
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def settled(self):
        self.bounds = self.columns, self.rows

    def modes(self):
        return termios.tcgetattr(self.slave)

    def pump(self, wait=0.05):
        ready, _, _ = select.select([self.master], [], [], wait)
        if not ready:
            return False
        with contextlib.suppress(OSError):
            data = os.read(self.master, 65536)
            self.raw += data
            self.feed(data)
            return True
        return False

    def feed(self, data):
        data = self.pending + data
        at = 0
        while at < len(data):
            if data[at] == 0x1b:
                match = re.match(rb"\x1b\[(\??[0-9;]*)([A-Za-z])", data[at:])
                if not match:
                    require(len(data) - at < 12, f"a sequence that is none: {data[at:at + 12]}")
                    break
                self.sequence(match[1].decode(), match[2].decode())
                at += match.end()
                continue
            self.put(data[at])
            at += 1
        self.pending = data[at:]

    def sequence(self, arguments, kind):
        if kind == "H":
            require(arguments == "", arguments)
            self.row = self.column = 0
        elif kind == "K":
            self.lines[self.row] = self.lines.get(self.row, "")[:self.column]
        elif kind == "J":
            if arguments == "2":
                self.clear()
            else:
                self.lines = {n: t for n, t in self.lines.items() if n <= self.row}
        elif arguments == "?1049":
            self.alternate = kind == "h"
        elif arguments == "?25":
            self.cursor_shown = kind == "h"
        else:
            require(kind == "m" or arguments == "?7", f"an unknown sequence {arguments}{kind}")

    def put(self, byte):
        if byte == 0x0d:
            self.column = 0
        elif byte == 0x0a:
            self.row += 1
            require(not self.alternate or self.row < self.bounds[1], f"line {self.row + 1} of {self.bounds[1]}: it scrolls")
        else:
            require(0x20 <= byte < 0x7f, f"the byte {byte}")
            line = self.lines.get(self.row, "").ljust(self.column)
            self.lines[self.row] = line[:self.column] + chr(byte) + line[self.column + 1:]
            self.column += 1
            require(not self.alternate or self.column <= self.bounds[0], f"wider than {self.bounds[0]}: {line}")

    def text(self):
        return "\n".join(self.lines.get(n, "") for n in range(max(self.lines, default=-1) + 1))

    def close(self):
        os.close(self.master)
        os.close(self.slave)


class Watch:
    """The command at a terminal of its own."""

    def __init__(self, command, *words, columns=80, rows=30, **env):
        self.terminal = Terminal(columns, rows)
        self.before = self.terminal.modes()

        def at_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        self.process = subprocess.Popen(
            command.arguments("status", "--watch", "--interval", "0.2", *words), stdin=self.terminal.slave,
            stdout=self.terminal.slave, stderr=self.terminal.slave, preexec_fn=at_terminal,
            env=operate.environment(**{"TERM": "xterm", **env}))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.terminal.close()

    def sees(self, part, limit=60):
        """Waits until the screen has this (a text, or what finds it)."""
        found = part if callable(part) else lambda screen: part in screen

        def look():
            require(self.process.poll() is None, lambda: f"it ended with {self.process.returncode}: {self.terminal.text()}")
            self.terminal.pump()
            return found(self.terminal.text())
        return eventually(look, limit, lambda: f"{part} on the screen:\n{self.terminal.text()}")

    def ends(self, code=0, limit=30):
        def over():
            self.terminal.pump()
            return self.process.poll() is not None
        eventually(over, limit, "the end of the command")
        while self.terminal.pump():
            pass
        require(self.process.returncode == code, f"exit code {self.process.returncode}: {self.terminal.text()}")
        require(not self.terminal.alternate and self.terminal.cursor_shown, "the terminal is left as it was drawn on")
        require(self.terminal.modes() == self.before, "the terminal's modes are not as before")


def rate(screen, what):
    found = re.search(r"tokens/s.*?([0-9.]+k?) " + what, screen)
    return found is not None and found[1] not in ("0", "0.0")


def check_page(command, cluster):
    address = cluster.address("scheduler", "grpc")
    with Watch(command) as watch, Load(cluster, threads=2) as load:
        watch.sees(address)
        watch.sees("ready  up")
        watch.sees(lambda screen: rate(screen, "generated"))
        for what in ("queue", "first token", "per token", "token gaps", "whole"):
            watch.sees(lambda screen: re.search(rf"^{what} +p50 [0-9.]+ ", screen, re.M))
        for part in ("p50", "p99", "epoch", "attention-0", "expert-0", "expert-1", "rows/s", "x mean", "running"):
            watch.sees(part)
        require("\x1b[32m" in watch.terminal.raw.decode(), "no colours at a terminal")
        # The page follows the terminal; the whole incarnation needs room.
        require(not re.search(r"\b[0-9a-f]{16}\b", watch.terminal.text()), watch.terminal.text())
        watch.terminal.resize(130, 40)
        os.kill(watch.process.pid, signal.SIGWINCH)
        watch.sees(lambda screen: re.search(r"\b[0-9a-f]{16}\b", screen))
        watch.terminal.settled()
        watch.terminal.resize(60, 12)
        os.kill(watch.process.pid, signal.SIGWINCH)
        watch.sees(lambda screen: screen.count("\n") < 12 and not re.search(r"\b[0-9a-f]{16}\b", screen))
        watch.terminal.settled()
        watch.terminal.resize(80, 30)
        os.kill(watch.process.pid, signal.SIGWINCH)
        watch.sees("EVENTS")

        cluster.kill("expert-1")
        watch.sees(lambda screen: re.search(r"ago lost +expert-1", screen))
        watch.sees("ready  up")  # the other shard has all experts
        watch.sees(lambda screen: "expert-1" not in screen.split("EVENTS")[0])

        # The scheduler goes, and comes back at the same address.
        cluster.kill("scheduler")
        watch.sees("scheduler unreachable since")
        watch.sees("what follows is")
        require("attention-0" in watch.terminal.text(), "what was seen last is gone")
        cluster.start_one("scheduler", listen=address)
        watch.sees("ready  up")
        watch.sees(lambda screen: "unreachable" not in screen and rate(screen, "generated"))
        os.write(watch.terminal.master, b"\x03")  # Ctrl-C, by way of the terminal
        watch.ends()
    # The router's own limits allow an answer to fail while there is no scheduler, after submit_wait; not otherwise.
    require(all(error.startswith("503") for error in load.errors), f"{load.errors}")


def check_other_ends(command):
    with Watch(command) as watch:
        watch.sees("KV cache")
        os.write(watch.terminal.master, b"q")
        watch.ends()
    with Watch(command) as watch:
        watch.sees("KV cache")
        watch.process.send_signal(signal.SIGTERM)
        watch.ends()
    # Without colours; the last page stays on the terminal.
    with Watch(command, "--count", "2", NO_COLOR="1") as watch:
        watch.ends()
        raw = watch.terminal.raw.decode()
        require(not re.search(r"\x1b\[[0-9;]*m", raw), f"colours in {raw!r}")
        require("attention-0" in watch.terminal.text(), watch.terminal.text())
    # A terminal that can do nothing gets pages.
    with Watch(command, "--count", "2", TERM="dumb") as watch:
        watch.ends()
        require("\x1b" not in watch.terminal.raw.decode(), "sequences for a dumb terminal")


def check_elsewhere(command):
    """Files and pipes."""
    done = command.run("status", "--watch", "--interval", "0.1", "--count", "3")
    require(done.returncode == 0 and "\x1b" not in done.stdout, done.stdout + done.stderr)
    require(done.stdout.count("KV cache") == 3, done.stdout)
    require(max(map(len, done.stdout.splitlines())) <= 80, "wider than 80")
    wide = command.run("status", "--watch", "--count", "1", COLUMNS="140").stdout
    require(80 < max(map(len, wide.splitlines())) <= 140, wide)
    done = command.run("status", "--watch", "--interval", "0.2", "--count", "3", "--json")
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    require(len(objects) == 3 and all(o["reachable"] for o in objects), done.stdout)
    require(objects[0]["rates"]["steps"] is None and objects[2]["rates"]["steps"] is not None, done.stdout)
    require(objects[2]["age_s"] > objects[1]["age_s"] > objects[0]["age_s"], done.stdout)
    one = command.json("status", "--json")
    require({m["role"] for m in one["members"]} == {"router", "attention", "expert"}, f"{one}")
    require(any(e["kind"] == "joined" for e in one["events"]), f"{one}")
    require(one["totals"].keys() == objects[0]["totals"].keys(), f"{one}")
    # Who stops reading ends it.
    reader = subprocess.Popen(command.arguments("status", "--watch", "--interval", "0.1"), stdout=subprocess.PIPE,
                              stdin=subprocess.DEVNULL, env=operate.environment())
    reader.stdout.readline()
    reader.stdout.close()
    require(reader.wait(timeout=30) == 0, f"exit code {reader.returncode}")
    # Nobody is there.
    nobody = operate.Command(sys.argv[2])
    done = nobody.run("status", "--watch", "--count", "1", "--scheduler", "127.0.0.1:1")
    require(done.returncode == 0 and "no scheduler answers" in done.stdout, done.stdout + done.stderr)
    done = nobody.run("status", "--watch", "--count", "1", "--json", "--scheduler", "127.0.0.1:1")
    require(json.loads(done.stdout)["reachable"] is False, done.stdout)
    done = nobody.run("status", "--interval", "2")
    require(done.returncode != 0 and "--watch" in done.stderr, done.stderr)


def test(command, cluster, _):
    begin = time.monotonic()
    check_elsewhere(command)
    check_other_ends(command)
    check_page(command, cluster)
    print(f"{time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    sys.exit(operate.main(test))
