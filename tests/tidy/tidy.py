"""Structure of the tree: include rules, dead files, links of the docs.

usage: tidy.py ROOT      prints every fault, exits 1 when there is one
"""

import pathlib
import re
import subprocess
import sys

# What each part may include of the project (design: base <- model <- ports <- */core <- adapters <- main.cc).
# The longest matching prefix decides. A part may always include itself.
BASE = ["libs/base"]
MODEL = BASE + ["libs/model"]
PORTS = MODEL + ["libs/ports"]
COMPUTE = PORTS + ["libs/kernels"]
ALL_LIBS = ["libs"]
ALLOWED = {
    "libs/base": BASE,
    "libs/model": MODEL,
    "libs/ports": PORTS,
    "libs/kernels": MODEL,
    "libs/checkpoint": MODEL,
    "libs/text": MODEL,
    "libs/runtime": PORTS,
    "libs/transport": PORTS + ["libs/runtime"],
    "libs/http": BASE,
    "libs/telemetry": BASE + ["libs/http"],
    "libs/config": PORTS + ["libs/rpc/client_options.h", "libs/transport", "libs/runtime", "scheduler/core", "attention_service/core", "expert_service/core", "router_service"],
    "libs/rpc": PORTS + ["libs/config/address.h", "libs/telemetry", "libs/runtime", "conclave/v1"],
    "libs/service": ALL_LIBS,
    "libs/local_cluster": ["libs", "scheduler", "attention_service/core", "expert_service/core"],
    "scheduler/core": MODEL,
    "scheduler": ALL_LIBS + ["conclave/v1"],
    "attention_service/core": COMPUTE,
    "attention_service": ALL_LIBS,
    "expert_service/core": COMPUTE,
    "expert_service": ALL_LIBS,
    "router_service/gateway": PORTS + ["libs/text"],
    "router_service": ALL_LIBS + ["conclave/v1"],
    "cli": ALL_LIBS + ["router_service", "scheduler", "attention_service", "expert_service", "conclave/v1"],
    "tests": [""],
    "bench": [""],
    "tools": [""],
}

# Libraries that stay out of the inner rings' headers and sources.
HEAVY = re.compile(r"^(grpc|grpcpp|google/protobuf|cuda|nccl|uc[pst]/|yaml-cpp|prometheus|boost|spdlog|CLI|conclave/v1)")
HEAVY_FREE = ["libs/base", "libs/model", "libs/ports", "libs/kernels", "libs/runtime", "libs/local_cluster",
              "scheduler/core", "attention_service/core", "expert_service/core", "router_service/gateway"]
# Elsewhere they belong in .cc files (services' own adapters excepted): slow to compile, and nobody's contract.
HEAVY_IN_HEADERS_OK = ["libs/http/connection.h", "libs/rpc", "router_service", "scheduler", "attention_service", "expert_service", "cli", "tests", "bench"]

SOURCE_SUFFIXES = {".h", ".cc", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)
PROJECT_TOPS = ("libs/", "scheduler/", "attention_service/", "expert_service/", "router_service/", "cli/", "tests/",
                "bench/", "tools/", "conclave/v1/")
# Words that must not enter the project: paths of one machine and the like.
FORBIDDEN = re.compile(r"/work/(main|wt|tmp|shared|\.)|/root/")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def within(path, prefixes):
    return any(prefix == "" or path == prefix or path.startswith(prefix + "/") for prefix in prefixes)


def part_of(path):
    matches = [part for part in ALLOWED if within(path, [part])]
    return max(matches, key=len) if matches else None


def check_includes(path, text):
    faults = []
    part = part_of(path)
    if part is None:
        return [f"{path}: in no known part of the tree (tests/tidy/tidy.py)"]
    for quote, target in INCLUDE.findall(text):
        if HEAVY.match(target):
            if within(path, HEAVY_FREE):
                faults.append(f"{path}: includes {target}; {part} stays free of it")
            elif path.endswith(".h") and not within(path, HEAVY_IN_HEADERS_OK) and not target.startswith("conclave/v1"):
                faults.append(f"{path}: includes {target} in a header; keep it in the .cc file")
        if quote == '"' and target.startswith(PROJECT_TOPS) and not within(target, [part] + ALLOWED[part]):
            faults.append(f"{path}: {part} may not include {target}")
        if quote == '"' and not target.startswith(PROJECT_TOPS + ("gtest/", "gmock/", "absl/")):
            faults.append(f"{path}: include \"{target}\" from the repository root")
    return faults


def check_dead(files, texts):
    """Every .cc is named by a CMakeLists.txt; every header is included by something."""
    faults = []
    cmake = {path: text for path, text in texts.items() if path.endswith("CMakeLists.txt") or path.endswith(".cmake")}
    included = set()
    for text in texts.values():
        included.update(target for _, target in INCLUDE.findall(text))
    for path in files:
        name = pathlib.PurePosixPath(path)
        if name.suffix == ".cc":
            ancestors = [str(parent / "CMakeLists.txt") for parent in name.parents]
            if not any(re.search(rf"\b{re.escape(name.name)}\b", cmake[a]) for a in ancestors if a in cmake):
                faults.append(f"{path}: built by no CMakeLists.txt")
        if name.suffix in {".h", ".inc"} and path not in included:
            faults.append(f"{path}: included by nothing")
    return faults


def check_links(root, path, text):
    faults = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        if not (root / path).parent.joinpath(target).resolve().exists():
            faults.append(f"{path}: dead link {target}")
    return faults


def tracked(root):
    out = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"],
                         capture_output=True, text=True, check=True)
    return [line for line in out.stdout.splitlines() if (root / line).is_file()]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    files = tracked(root)
    texts = {}
    for path in files:
        try:
            texts[path] = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    faults = []
    for path, text in texts.items():
        if pathlib.PurePosixPath(path).suffix in SOURCE_SUFFIXES:
            faults += check_includes(path, text)
        if path.endswith(".md"):
            faults += check_links(root, path, text)
        if not path.startswith("tests/tidy/"):
            faults += [f"{path}: names a path of one machine: {m.group(0)}" for m in FORBIDDEN.finditer(text)]
    faults += check_dead(files, texts)
    for fault in faults:
        print(fault)
    print(f"tidy: {len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
