"""The image's recipe against the tree, the build and the manifests."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import dockerfile
import manifests

DOCKER = manifests.ROOT / "deploy" / "docker"
LOADED_AT_RUN_TIME = {"ibverbs-providers", "python3", "python3-jinja2"}
PROGRAMS = ["conclave", "conclave-router", "conclave-scheduler", "conclave-attention", "conclave-expert"]


RECIPE = dockerfile.parse((DOCKER / "Dockerfile").read_text())
LEFT_OUT = dockerfile.ignores((DOCKER / "Dockerfile.dockerignore").read_text())
# Who builds an image of which stages: what is built without --target, and the one for GPUs.
IMAGES = {"cpu": ["build", "ucx-source", "ucx", "programs", "cpu"], "cuda": ["build", "ucx-source", "ucx-cuda", "programs", "cuda"]}


def files_below(path):
    """Files of the tree at or below `path`, as the repository has them."""
    listed = subprocess.run(["git", "ls-files", "--", path], cwd=manifests.ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return listed.stdout.splitlines()
    top = manifests.ROOT / path
    return [str(p.relative_to(manifests.ROOT)) for p in ([top] if top.is_file() else top.rglob("*")) if p.is_file()]


def on_debian_12():
    release = pathlib.Path("/etc/os-release")
    return release.exists() and "VERSION_CODENAME=bookworm" in release.read_text() and shutil.which("apt-cache") is not None


def candidates(packages):
    """package -> the version that apt would install, of those it knows."""
    listed = subprocess.run(["apt-cache", "policy", *sorted(packages)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(\S+):\n(?:  .*\n)*?  Candidate: (\S+)$", listed, re.MULTILINE)
    return {name: version for name, version in found if version != "(none)"}


def runtime_packages():
    return {line for line in (DOCKER / "runtime-packages.txt").read_text().splitlines() if line and not line.startswith("#")}


def owners(libraries):
    """library -> the Debian package that it comes from."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    names = {}  # each path that a package may list it by -> the library
    for library in libraries:
        path = re.search(rf"^\s*{re.escape(library)} .*=> (\S+)$", listed, re.MULTILINE).group(1)
        names.update(dict.fromkeys((path, os.path.realpath(path), path.removeprefix("/usr"), "/usr" + path), library))
    found = subprocess.run(["dpkg", "-S", *names], capture_output=True, text=True).stdout
    out = {}
    for line in found.splitlines():
        package, _, path = line.partition(": ")
        if path in names and not package.startswith("diversion "):
            out[names[path]] = package.partition(":")[0]
    if set(out) != set(libraries):
        raise AssertionError(f"no package owns {set(libraries) - set(out)}")
    return out


class Docker(unittest.TestCase):
    def test_copied_paths_exist(self):
        copied = 0
        for stage in RECIPE.stages.values():
            for origin, sources, _ in stage.copies():
                for path in sources if origin is None else []:
                    self.assertTrue((manifests.ROOT / path).exists(), path)
                    files = files_below(path)
                    self.assertTrue(files, path)
                    self.assertEqual([f for f in files if LEFT_OUT(f)], [])
                    copied += len(files)
        self.assertGreater(copied, 500)

    def test_what_is_built_is_left_out(self):
        for path in (".git", ".git/config", "build", "build/release/bin/conclave", "tests/support/__pycache__/a.pyc", "tools/x/build/a"):
            self.assertTrue(LEFT_OUT(path), path)
        for path in ("tests/build_test.cc", "libs/builder/a.cc", ".gitignore", "tools/build.sh"):
            self.assertFalse(LEFT_OUT(path), path)

    def test_every_directory_of_the_build_is_copied(self):
        copied = {path for _, sources, _ in RECIPE.stages["build"].copies() for path in sources}
        named = re.findall(r"conclave_add_subdirectories\(([^)]*)\)", (manifests.ROOT / "CMakeLists.txt").read_text())
        for folder in " ".join(named).split():
            self.assertIn(folder.partition("/")[0], copied)

    @unittest.skipUnless(shutil.which("cmake") and shutil.which("ninja"), "needs cmake and ninja")
    def test_what_is_copied_is_all_that_the_build_needs(self):
        stage = RECIPE.stages["build"]
        with tempfile.TemporaryDirectory(prefix="conclave-context-") as folder:
            for _, sources, target in stage.copies():
                for path in sources:
                    # A directory goes to a name of its own, files go where they were.
                    self.assertIn(target.rstrip("/"), (path, pathlib.Path(path).parent.as_posix()))
                    for file in files_below(path):
                        copy = pathlib.Path(folder, file)
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(manifests.ROOT / file, copy)
            (build,) = [run for run in stage.runs() if "cmake --preset" in run]
            configure, build = [" ".join(part.split()) for part in build.split("&&")[:2]]
            for command in (configure, build + " -- -n"):  # which files, and is each there or made
                done = subprocess.run(["/bin/sh", "-c", command], cwd=folder, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, f"{command}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
            for program in PROGRAMS:
                self.assertIn(f"bin/{program}\n", done.stdout)

    def test_stages(self):
        self.assertEqual(RECIPE.last, "cpu")
        for name, stages in IMAGES.items():
            self.assertEqual(RECIPE.needed(name), set(stages))
        images = {stage.base for stage in RECIPE.stages.values()} - set(RECIPE.stages)
        self.assertEqual(images, set(RECIPE.arguments.values()))
        for name in IMAGES:  # the programs run on the system that they were built on
            self.assertEqual(RECIPE.chain(name)[0].base, RECIPE.chain("build")[0].base)
        self.assertRegex(RECIPE.arguments["DEBIAN"], r"^debian:12-slim$")

    def test_the_variants_differ_in_ucx_alone(self):
        configured = {}
        for name in ("ucx", "ucx-cuda"):
            (line,) = [re.search(r"contrib/configure-release-mt ([^&]*)", run).group(1).split() for run in RECIPE.stages[name].runs()
                       if "configure" in run]
            configured[name] = set(line)
        self.assertEqual(configured["ucx"] ^ configured["ucx-cuda"], {"--without-cuda", "--with-cuda=/usr/local/cuda"})
        self.assertLessEqual({"--with-verbs", "--with-rdmacm"}, configured["ucx"])
        steps = {name: [(i, rest.replace("--from=ucx-cuda", "--from=ucx")) for i, rest in RECIPE.stages[name].steps] for name in IMAGES}
        self.assertEqual([s for s in steps["cuda"] if s[0] != "ENV"], steps["cpu"])

    def test_programs(self):
        (build,) = [run for run in RECIPE.stages["build"].runs() if "cmake --preset" in run]
        for program in PROGRAMS:
            self.assertRegex(build, rf"--target [^&]*\b{program}\b")
            self.assertIn(f"build/release/bin/{program} ", build)
        # Faults on demand are for tests.
        self.assertIn("-DCONCLAVE_FAULT_INJECTION=OFF", build)
        self.assertIn("option(CONCLAVE_FAULT_INJECTION", (manifests.ROOT / "CMakeLists.txt").read_text())

    def test_user_and_paths_are_those_of_the_manifests(self):
        for image in IMAGES:
            steps = [step for stage in RECIPE.chain(image) for step in stage.steps]
            (user,) = [rest for name, rest in steps if name == "USER"]
            self.assertEqual(steps[-1], ("USER", user))  # all before it is done by root
            placed = {rest.split()[-1] for name, rest in steps if name == "COPY"}
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

    def test_what_it_cannot_read_is_refused(self):
        for text in ("FROM a AS b\nADD c d\n", "FROM a\n", "RUN a\n", "FROM a AS b\nCOPY --chown=1 a b\n", "FROM a AS b\nCOPY --from=c a b\n"):
            with self.assertRaises(ValueError):
                dockerfile.parse(text)
        with self.assertRaises(ValueError):
            dockerfile.ignores("!a")

    @unittest.skipUnless(on_debian_12(), "needs Debian 12 and its apt")
    def test_packages_exist(self):
        wanted = runtime_packages() | {line for line in (manifests.ROOT / "tools" / "packages.txt").read_text().split("\n")
                                       if line and not line.startswith("#")}
        for run in RECIPE.stages["ucx-source"].runs():
            wanted |= set(re.search(r"apt-get install ([^&]*)", run).group(1).split()) - {"-y", "-qq", "--no-install-recommends"}
        there = candidates(wanted)
        if not there:
            self.skipTest("apt has no lists of packages")
        self.assertEqual(wanted - set(there), set())

    @unittest.skipUnless(on_debian_12() and "CONCLAVE_BIN_DIR" in os.environ, "needs Debian 12 and the built programs")
    def test_runtime_packages_bring_every_library(self):
        # All that the loader maps, not only what the programs name themselves.
        asked = ["apt-cache", "depends", "--recurse", "--important", "--no-conflicts", "--no-breaks", "--no-replaces", *sorted(runtime_packages())]
        listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        brought = {line.partition(":")[0] for line in listed.splitlines() if line and line[0] not in " <"}
        if not brought:
            self.skipTest("apt has no lists of packages")
        every = set()
        for program in PROGRAMS:
            mapped = subprocess.run(["ldd", os.path.join(os.environ["CONCLAVE_BIN_DIR"], program)], capture_output=True, text=True, check=True).stdout
            self.assertNotIn("not found", mapped)
            libraries = set(re.findall(r"^\s*(\S+) => /", mapped, re.MULTILINE))
            self.assertGreater(len(libraries), 5)
            every |= libraries
        for library, package in owners(every).items():
            self.assertIn(package, brought, library)

    @unittest.skipUnless(shutil.which("objdump") and "CONCLAVE_BIN_DIR" in os.environ, "needs the built programs")
    def test_runtime_packages_are_what_the_programs_are_linked_against(self):
        needed = set()
        for program in PROGRAMS:
            path = pathlib.Path(os.environ["CONCLAVE_BIN_DIR"], program)
            listed = subprocess.run(["objdump", "-p", str(path)], capture_output=True, text=True, check=True).stdout
            needed.update(re.findall(r"NEEDED\s+(\S+)", listed))
        needed.discard("ld-linux-x86-64.so.2")
        self.assertEqual(runtime_packages() - LOADED_AT_RUN_TIME, set(owners(needed).values()))


if __name__ == "__main__":
    unittest.main()
