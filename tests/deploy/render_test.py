"""Our renderer and kubectl's give the same objects, where there is a kubectl."""

import json
import re
import unittest

import kustomize
import manifests


def without_hashes(objects):
    """kustomize's hashes in the names of config maps differ from ours."""
    text = re.sub(r"(conclave-(?:config|env))-[0-9a-z]{10}\b", r"\1", json.dumps(objects))
    return {kustomize.key_of(o): o for o in json.loads(text)}


class Render(unittest.TestCase):
    maxDiff = None

    @unittest.skipUnless(kustomize.kubectl(), "no kubectl of 1.21 or later; our own renderer serves the other tests")
    def test_kubectl_gives_the_same(self):
        for name, path in manifests.KUSTOMIZATIONS.items():
            with self.subTest(name):
                theirs = without_hashes(kustomize.render_by_kubectl(path))
                self.assertEqual(without_hashes(manifests.rendered(name)), theirs)

    def test_every_kustomization_is_rendered(self):
        reached = set()

        def visit(path):
            path = path.resolve()
            reached.add(path)
            spec = manifests.yaml.safe_load((path / "kustomization.yaml").read_text())
            for entry in spec.get("resources", []) + spec.get("components", []):
                if (path / entry).is_dir():
                    visit(path / entry)
        for path in manifests.KUSTOMIZATIONS.values():
            visit(path)
        there = {p.parent for p in manifests.KUBERNETES.rglob("kustomization.yaml")}
        self.assertEqual(there - reached, set())

    def test_every_file_is_used(self):
        for root in {p.parent for p in manifests.KUBERNETES.rglob("kustomization.yaml")}:
            text = (root / "kustomization.yaml").read_text()
            for path in root.glob("*.yaml"):
                if path.name != "kustomization.yaml":
                    self.assertIn(path.name, text, path)

    def test_every_patch_changes_something(self):
        for name in manifests.KUSTOMIZATIONS:
            manifests.rendered(name)
        for root in {p.parent for p in manifests.KUBERNETES.rglob("kustomization.yaml")}:
            for entry in manifests.yaml.safe_load((root / "kustomization.yaml").read_text()).get("patches", []):
                self.assertIn((root / entry["path"]).resolve(), kustomize.PATCHES_USED)

    def test_a_patch_that_names_nothing_is_refused(self):
        there = {"kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"name": "x"}]}}
        with self.assertRaises(ValueError):
            kustomize.apply_patch([there], {"kind": "Service", "metadata": {"name": "b"}}, None)
        for faulty in ({"op": "test", "path": "/spec/ports/0/name", "value": "y"}, {"op": "move", "path": "/spec", "value": 1}):
            with self.assertRaises(ValueError):
                kustomize.apply_patch([there], [faulty], {"kind": "Service"})
        with self.assertRaises(KeyError):
            kustomize.apply_patch([there], [{"op": "replace", "path": "/spec/type", "value": 1}], {"kind": "Service"})

    def test_unknown_fields_are_refused(self):
        with self.assertRaises(ValueError):
            kustomize.apply_patch([], {"kind": "Service", "metadata": {"name": "a"}}, None)
        with self.assertRaises(ValueError):
            kustomize.selected({"kind": "Service", "metadata": {"name": "a"}}, {"namespace": "x"})


if __name__ == "__main__":
    unittest.main()
