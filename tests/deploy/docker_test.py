"""The image's recipe against the tree, the build and the manifests."""

import os
import pathlib
import re
import shutil
import subprocess
import unittest

import manifests

DOCKER = manifests.ROOT / "deploy" / "docker"
LOADED_AT_RUN_TIME = {"ibverbs-providers", "python3", "python3-jinja2"}
PROGRAMS = ["conclave", "conclave-router", "conclave-scheduler", "conclave-attention", "conclave-expert"]


def instructions():
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line and not line.startswith("#")]


def runtime_packages():
    return {line for line in (DOCKER / "runtime-packages.txt").read_text().splitlines() if line and not line.startswith("#")}


def owner(library):
    """The Debian package that a library comes from."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    path = re.search(rf"^\s*{re.escape(library)} .*=> (\S+)$", listed, re.MULTILINE).group(1)
    for name in (path, os.path.realpath(path), path.removeprefix("/usr"), "/usr" + path):
        done = subprocess.run(["dpkg", "-S", name], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.partition(":")[0]
    raise AssertionError(f"no package owns {library}")


class Docker(unittest.TestCase):
    def test_copied_paths_exist(self):
        for name, rest in instructions():
            if name == "COPY" and not rest.startswith("--from=build"):
                for path in rest.split()[:-1]:
                    self.assertTrue((manifests.ROOT / path).exists(), path)

    def test_every_directory_of_the_build_is_copied(self):
        copied = {path for name, rest in instructions() if name == "COPY" for path in rest.split()[:-1]}
        named = re.findall(r"conclave_add_subdirectories\(([^)]*)\)", (manifests.ROOT / "CMakeLists.txt").read_text())
        for folder in " ".join(named).split():
            self.assertIn(folder.partition("/")[0], copied)

    def test_only_known_instructions(self):
        self.assertLessEqual({name for name, _ in instructions()}, {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"})
        stages = [rest for name, rest in instructions() if name == "FROM"]
        self.assertEqual(stages, ["${DEBIAN} AS build", "${DEBIAN}"])

    def test_programs(self):
        build = next(rest for name, rest in instructions() if name == "RUN" and "cmake --preset" in rest)
        for program in PROGRAMS:
            self.assertRegex(build, rf"--target [^&]*\b{program}\b")
            self.assertIn(f"build/release/bin/{program} ", build)

    def test_user_and_paths_are_those_of_the_manifests(self):
        (user,) = [rest for name, rest in instructions() if name == "USER"]
        placed = {rest.split()[-1] for name, rest in instructions() if name == "COPY"}
        for name in manifests.KUSTOMIZATIONS:
            for workload in manifests.workloads(manifests.rendered(name)):
                security = workload.pod["securityContext"]
                self.assertEqual(user, f"{security['runAsUser']}:{security['runAsGroup']}")
                folder, _, program = workload.container["command"][0].rpartition("/")
                self.assertIn(folder, placed)
                self.assertIn(program, PROGRAMS)
        demo = manifests.workloads(manifests.rendered("cpu-demo"))[0]
        path = manifests.config(manifests.rendered("cpu-demo"), demo)["model"]["path"]
        self.assertIn(path.replace("/models/", "/opt/conclave/models/"), placed)

    @unittest.skipUnless(shutil.which("objdump") and "CONCLAVE_BIN_DIR" in os.environ, "needs the built programs")
    def test_runtime_packages_are_what_the_programs_are_linked_against(self):
        needed = set()
        for program in PROGRAMS:
            path = pathlib.Path(os.environ["CONCLAVE_BIN_DIR"], program)
            listed = subprocess.run(["objdump", "-p", str(path)], capture_output=True, text=True, check=True).stdout
            needed.update(re.findall(r"NEEDED\s+(\S+)", listed))
        needed.discard("ld-linux-x86-64.so.2")
        self.assertEqual(runtime_packages() - LOADED_AT_RUN_TIME, {owner(library) for library in needed})


if __name__ == "__main__":
    unittest.main()
