"""docs/kubernetes.md: what it names and what it has people type."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

import dockerfile
import kustomize
import manifests
from manifests import named, workloads

PAGE = (manifests.ROOT / "docs" / "kubernetes.md").read_text()
BLOCKS = {kind: re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for kind in ("sh", "yaml")}
COMMANDS = "\n".join(BLOCKS["sh"])
EVERY = [o for name in manifests.KUSTOMIZATIONS for o in manifests.rendered(name)]
PROGRAM = pathlib.Path(os.environ.get("CONCLAVE_BIN_DIR", ""), "conclave").resolve()
needs_program = unittest.skipUnless("CONCLAVE_BIN_DIR" in os.environ, "needs the built programs")


class Page(unittest.TestCase):
    def test_paths_exist(self):
        below = re.findall(r"`((?:base|shard-class|overlays|components|prometheus-adapter)(?:/[\w./-]+)?)`", PAGE)
        self.assertGreater(len(set(below)), 12)
        for path in below:
            self.assertTrue((manifests.KUBERNETES / path).exists(), path)
        for path in re.findall(r"-[fk] (deploy/[\w./-]+)", PAGE) + re.findall(r"`((?:deploy|tests)/[\w./-]+)`", PAGE):
            self.assertTrue((manifests.ROOT / path).exists(), path)
        for path in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
            self.assertTrue((manifests.ROOT / "docs" / path).exists(), path)
        for overlay in (manifests.KUBERNETES / "overlays").iterdir():
            self.assertIn(f"kubectl apply -k deploy/kubernetes/overlays/{overlay.name}\n", COMMANDS)
        for component in (manifests.KUBERNETES / "components").iterdir():
            self.assertIn(f"`components/{component.name}`", PAGE)

    def test_objects_exist(self):
        kinds = {"deployment": "Deployment", "service": "Service", "statefulset": "StatefulSet", "leaderworkerset": "LeaderWorkerSet"}
        found = re.findall(r"\b(deployment|service|statefulset|leaderworkerset)[/ ](conclave-[a-z-]+)", PAGE)
        self.assertGreater(len(found), 4)
        for kind, name in found:
            self.assertIsNotNone(named(EVERY, kinds[kind], name), (kind, name))
        self.assertIsNotNone(named(EVERY, "StatefulSet", "conclave-expert"))  # conclave-expert-0
        ports = {p["containerPort"] for w in workloads(EVERY) for p in w.container["ports"]}
        for port in re.findall(r"port-forward \S+ (\d+)", PAGE):
            self.assertIn(int(port), ports)

    def test_images_are_those_of_the_overlays(self):
        built = {}
        for line in re.findall(r"^docker build .*$", COMMANDS, re.MULTILINE):
            target = re.search(r"--target (\w+)", line)
            built[re.search(r"-t (\S+)", line).group(1)] = target and target.group(1)
            self.assertTrue(line.endswith(" ."))
        recipe = dockerfile.parse((manifests.ROOT / "deploy" / "docker" / "Dockerfile").read_text())
        for target in built.values():
            self.assertIn(target or recipe.last, recipe.stages)
        used = {c["image"] for name in ("cpu-demo", "gpu-rdma", "leader-worker-set") for w in workloads(manifests.rendered(name))
                for c in w.pod["containers"] + w.pod.get("initContainers", [])}
        self.assertEqual(used, set(built))

    def test_configuration_keys_exist(self):
        keys = manifests.config_keys()
        for section, key in re.findall(r"CONCLAVE_([A-Z]+)_([A-Z0-9_]+)", PAGE):
            self.assertIn(key.lower(), keys[section.lower()])
        for section, key in re.findall(r"`([a-z]+)\.([a-z0-9_]+)`", PAGE):
            self.assertIn(key, keys.get(section, {}), section)

    def test_the_overlay_of_ones_own(self):
        (text,) = BLOCKS["yaml"]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "kustomization.yaml").write_text(text.replace("../conclave/", f"{manifests.ROOT}/"))
            objects = kustomize.render(pathlib.Path(folder))
        spec = yaml.safe_load(text)
        self.assertEqual({c["image"] for w in workloads(objects) for c in w.pod["containers"]},
                         {f"{spec['images'][0]['newName']}:{spec['images'][0]['newTag']}"})
        settings = manifests.config(objects, workloads(objects)[0])
        for literal in spec["configMapGenerator"][0]["literals"]:
            section, key = re.fullmatch(r"CONCLAVE_([A-Z]+)_([A-Z0-9_]+)=.*", literal).groups()
            self.assertEqual(str(settings[section.lower()][key.lower()]), literal.partition("=")[2])
        self.assertIn("tls", settings)

    @needs_program
    def test_subcommands_exist(self):
        used = set(re.findall(r"(?:-- |conclave:\S+ )conclave ([a-z-]+)((?: --[a-z]+)*)", COMMANDS))
        self.assertGreaterEqual({name for name, _ in used}, {"key", "status", "diag"})
        for name, flags in used:
            text = subprocess.run([PROGRAM, name, "--help"], capture_output=True, text=True, check=True).stdout
            for flag in flags.split():
                self.assertIn(flag, text)

    @needs_program
    def test_keys_are_made_as_it_says(self):
        lines = [line for line in COMMANDS.splitlines() if "alice-key" in line and not line.startswith("curl")]
        commands = "\n".join(lines[:2]).replace("docker run --rm conclave:0.1.0 conclave", str(PROGRAM))
        header = re.search(r"Bearer (\$\(.*?\))\"", COMMANDS).group(1)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(["/bin/sh", "-ec", f"{commands}\necho {header}\ncat api-keys"], cwd=folder, capture_output=True, text=True, check=True)
        key, line = done.stdout.splitlines()
        self.assertRegex(key, r"^ck-[0-9a-f]{20,}$")
        self.assertRegex(line, r"^sha256:[0-9a-f]{64} name=alice$")


if __name__ == "__main__":
    unittest.main()
