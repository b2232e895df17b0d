"""The dashboards of deploy/grafana and docs/dashboards.md: they are what their generator writes, complete, and read metrics
that exist; and each has a picture with all of its panels.

usage: dashboards_test.py ROOT
"""

import json
import pathlib
import re
import struct
import sys
import unittest

import observability

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ".")
sys.path.insert(0, str(ROOT / "deploy/grafana"))
import generate  # noqa: E402

# Units of Grafana that panels may use: a typing error would show no unit and no fault.
UNITS = {"none", "short", "s", "bytes", "Bps", "ops", "reqps", "percentunit"}


def loaded():
    return [(path.stem, json.loads(path.read_text())) for path in observability.dashboard_files(ROOT)]


def picture(path):
    """(width in pixels, {keyword: text}) of a PNG."""
    data = path.read_bytes()
    width, at, texts = struct.unpack(">I", data[16:20])[0], 8, {}
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at:at + 8])
        if kind == b"tEXt":
            key, _, text = data[at + 8:at + 8 + size].partition(b"\0")
            texts[key.decode()] = text.decode("latin-1")
        at += 12 + size
    return width, texts


class Dashboards(unittest.TestCase):
    def test_the_committed_files_are_what_the_generator_writes(self):
        committed = {path.name: path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*")}
        self.assertEqual(set(committed), set(generate.dashboards()))
        for name, text in generate.dashboards().items():
            self.assertEqual(committed[name], text, f"{name}: run deploy/grafana/generate.py")

    def test_the_page_is_what_the_generator_writes(self):
        self.assertEqual((ROOT / "docs/dashboards.md").read_text(), generate.page(), "run deploy/grafana/generate.py")

    def test_each_has_a_picture_with_all_its_panels(self):
        pictures = ROOT / "docs/pictures"
        self.assertEqual({path.name for path in pictures.iterdir()}, {f"{name}.png" for name, _ in loaded()})
        for name, dashboard in loaded():
            path = pictures / f"{name}.png"
            width, texts = picture(path)
            self.assertEqual(width, 1400, name)
            self.assertLess(path.stat().st_size, 150_000, name)
            self.assertEqual(texts["Panels"].splitlines(), [p["title"] for p in observability.panels(dashboard)],
                             f"{name}: run tests/observability/pictures.py")

    def test_there_is_one_for_each_subject(self):
        self.assertEqual({name for name, _ in loaded()},
                         {"overview", "latency", "scheduler", "experts", "data-plane", "faults"})
        self.assertEqual(len({d["uid"] for _, d in loaded()}), 6)
        self.assertIn("heatmap", {p["type"] for name, d in loaded() if name == "experts" for p in d["panels"]})

    def test_every_panel_is_complete(self):
        for name, dashboard in loaded():
            variables = {v["name"]: v["type"] for v in dashboard["templating"]["list"]}
            self.assertEqual(variables.get("datasource"), "datasource", name)
            self.assertTrue(dashboard["title"] and dashboard["description"], name)
            titles = [p["title"] for p in dashboard["panels"]]
            self.assertEqual(len(titles), len(set(titles)), f"{name}: a title twice")
            self.assertEqual(len({p["id"] for p in dashboard["panels"]}), len(titles), name)
            for panel in observability.panels(dashboard):
                if panel["type"] == "row":
                    continue
                where = f"{name}: {panel['title']}"
                self.assertTrue(panel["description"].endswith("."), where)
                self.assertEqual(panel["datasource"]["uid"], "${datasource}", where)
                self.assertIn(panel["fieldConfig"]["defaults"]["unit"], UNITS, where)
                self.assertTrue(panel["targets"], where)
                for target in panel["targets"]:
                    self.assertEqual(target["datasource"]["uid"], "${datasource}", where)
                    self.assertTrue(target["expr"], where)

    def test_panels_lie_side_by_side_without_holes(self):
        for name, dashboard in loaded():
            taken = {}
            for panel in dashboard["panels"]:
                place = panel["gridPos"]
                self.assertLessEqual(place["x"] + place["w"], 24, name)
                for x in range(place["x"], place["x"] + place["w"]):
                    for y in range(place["y"], place["y"] + place["h"]):
                        self.assertNotIn((x, y), taken, f"{name}: {panel['title']} lies on {taken.get((x, y))}")
                        taken[x, y] = panel["title"]
            bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"])
            holes = {(x, y) for x in range(24) for y in range(bottom)} - set(taken)
            self.assertEqual(holes, set(), f"{name}: nothing lies there")

    def test_every_expression_reads_metrics_and_labels_that_exist(self):
        documented = observability.documented_metrics(ROOT)
        known = set(documented) | set(observability.records(ROOT)) | observability.BUILT_IN
        targets = {"job", "instance", "le", "alertname", "alertstate", "severity", "part"}
        count = 0
        for name, panel, expression in observability.dashboard_expressions(ROOT):
            metrics = observability.metric_names(expression)
            self.assertTrue(metrics, f"{name}: {panel}")
            for metric in metrics:
                self.assertTrue(metric in known or observability.base_name(metric) in known, f"{name}: {panel}: {metric}")
                count += 1
            labels = set()
            for metric in metrics:
                labels |= documented.get(metric, documented.get(observability.base_name(metric), ("", set(), set())))[1]
            if any(":" in metric for metric in metrics):
                labels |= {"outcome"}
            for group in re.findall(r"by \(([^)]*)\)", expression):
                for label in group.split(", "):
                    self.assertIn(label, labels | targets, f"{name}: {panel}")
        self.assertGreater(count, 100)

    def test_legends_name_labels_that_the_expression_keeps(self):
        for name, dashboard in loaded():
            for panel in observability.panels(dashboard):
                for target in panel.get("targets", []):
                    kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
                    if not kept and "(" not in target["expr"].replace("(?", ""):
                        continue  # a plain series keeps all of its labels
                    if re.match(r"[\w:]+(\{[^}]*\})?( / [\w:]+)?$", target["expr"]):
                        continue
                    for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                        self.assertIn(label, kept, f"{name}: {panel['title']}")


if __name__ == "__main__":
    unittest.main()
