"""`conclave diag` on this host with limits made low, and against a live cluster.

usage: diag_test.py ROOT BINARIES
"""

import json
import os
import resource
import sys

import operate
from operate import Load, eventually, require

CODES = {"ok": 0, "warning": 3, "problem": 4}


def diag(command, *words, **more):
    done = command.run("diag", "--json", *words, **more)
    answer = json.loads(done.stdout)
    require(done.returncode == CODES[answer["worst"]], f"{answer['worst']} and exit code {done.returncode}")
    require(answer["worst"] == max((f["severity"] for f in answer["findings"]), key=list(CODES).index), "worst")
    for finding in answer["findings"]:
        require((finding["severity"] == "ok") == (finding["advice"] == ""), f"{finding}")
    return answer


def finding(answer, check, subject=None):
    found = [f for f in answer["findings"] if f["check"] == check and subject in (None, f["subject"])]
    require(len(found) == 1, f"{check} of {subject}: {answer['findings']}")
    return found[0]


def limit(what, soft):
    def before():
        resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))
    return before


def check_this_host(binaries):
    command = operate.Command(binaries)
    answer = diag(command, "--local")
    plane = finding(answer, "data plane")
    require("tcp/lo" in plane["what"], f"{plane}")
    require(answer["processes"] == [] and answer["host"]["online_cpus"] >= 1, "the host's facts")
    # Limits of the process that looks.
    for soft, severity in ((200, "problem"), (700, "warning"), (1024, "ok")):
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < soft:
            continue
        seen = finding(diag(command, "--local", before=limit(resource.RLIMIT_NOFILE, soft)), "open files")
        require(seen["severity"] == severity and str(soft) in seen["what"], f"{soft}: {seen}")
    low = diag(command, "--local", before=limit(resource.RLIMIT_MEMLOCK, 65536))
    require("64 KiB" in finding(low, "memlock")["what"], f"{finding(low, 'memlock')}")
    one = diag(command, "--local", before=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
    require(finding(one, "processors")["what"].startswith("processors: 1 of"), f"{finding(one, 'processors')}")
    # Kernels held back, and a device that is not there.
    slow = diag(command, "--local", CONCLAVE_ISA="scalar")
    require(finding(slow, "isa")["severity"] == "warning", f"{finding(slow, 'isa')}")
    lost = diag(command, "--local", CONCLAVE_TRANSPORT_INTERFACE="eth99")
    require(finding(lost, "data plane")["severity"] == "problem" and "eth99" in finding(lost, "data plane")["what"], f"{lost}")
    # A scheduler that was named and is not there; text for people.
    done = command.run("diag", "--scheduler", "127.0.0.1:1")
    require(done.returncode == 4 and "PROBLEM reached" in done.stdout and "127.0.0.1:1" in done.stdout, done.stdout)
    done = command.run("diag", "--config", "/nonexistent.yaml")
    require(done.returncode in (1, 2) and "nonexistent" in done.stderr, done.stderr)


def check_cluster(command, cluster):
    names = {cluster.ops(name): name for name in cluster.names}
    with Load(cluster, threads=1) as load:
        eventually(lambda: load.answers > 0 or load.errors, 60, "an answer")
        answer = diag(command)
        require(not load.errors, f"{load.errors}")
    reports = {names[p["ops_address"]]: p for p in answer["processes"]}
    require(set(reports) == {*cluster.names}, f"{set(reports)}")
    for name, process in reports.items():
        report = process["report"]
        require(report["role"] == name.split("-")[0] and report["pid"] == cluster.running[name].pid, f"{report}")
        # All of them have this machine's clock: the error is within the bound that was measured.
        require(abs(process["clock_offset_s"]) <= process["clock_bound_s"] + 0.002, f"{name}: {process}")
        require(process["clock_bound_s"] < 5, f"{name}: {process}")
        require(process["version"] == report["version"] != "", f"{name}: {process}")
        if name.split("-")[0] in ("attention", "expert"):
            require(report["compute"]["numerics_id"] == process["numerics_id"] != "", f"{name}: {process}")
            plane = finding(answer, "data plane", process["name"])
            require("its connections use tcp/lo" in plane["what"], f"{plane}")
    require(finding(answer, "ready")["severity"] == "ok", "ready")
    require(finding(answer, "version", "cluster")["severity"] == "ok", "version")
    require(finding(answer, "numerics", "cluster")["severity"] == "ok", "numerics")
    require(finding(answer, "clocks", "cluster")["severity"] == "ok", "clocks")
    done = command.run("diag")
    require(done.returncode in CODES.values() and "checks in order" in done.stdout, done.stdout)


def check_low_limits_of_a_process(command, cluster):
    """A shard with few descriptors and more threads than processors; a process that is stopped does not answer."""
    cluster.names.append("expert-2")
    cluster.start_one("expert-2", threads=64, before=limit(resource.RLIMIT_NOFILE, 700))
    eventually(lambda: operate.get(cluster.ops("expert-2"), "/readyz")[0] == 200, 60, "a third shard")
    answer = diag(command)
    require(finding(answer, "open files", "expert-2")["severity"] == "warning", "open files")
    require(finding(answer, "processors", "expert-2")["severity"] == "warning", "processors")
    require(finding(answer, "open files", "expert-1")["severity"] == "ok", "open files of another")
    cluster.kill("expert-1")
    eventually(lambda: finding(diag(command), "faults", "cluster")["severity"] == "warning", 30, "the fault")


def test(command, cluster, _):
    check_this_host(sys.argv[2])
    check_cluster(command, cluster)
    check_low_limits_of_a_process(command, cluster)


if __name__ == "__main__":
    sys.exit(operate.main(test))
