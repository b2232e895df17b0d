"""Rules, runbooks, dashboards and the reference of metrics speak of the same things.

usage: names_test.py ROOT
"""

import pathlib
import re
import sys
import unittest

import observability
import yaml

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else ".")


class Rules(unittest.TestCase):
    def known(self):
        return (set(observability.documented_metrics(ROOT)) | set(observability.records(ROOT)) | observability.BUILT_IN)

    def unknown(self, text):
        return {name for name in observability.metric_names(text)
                if name not in self.known() and observability.base_name(name) not in self.known()}

    def test_the_reference_is_read(self):
        documented = observability.documented_metrics(ROOT)
        self.assertGreater(len(documented), 100)
        self.assertEqual(documented["conclave_router_requests_total"], ("counter", {"outcome"}, {"router"}))

    def test_a_wrong_name_is_found(self):
        self.assertEqual(self.unknown('rate(conclave_router_request_total{outcome="up"}[5m]) + conclave:nothing:rate5m'),
                         {"conclave_router_request_total", "conclave:nothing:rate5m"})

    def test_every_expression_reads_metrics_that_exist(self):
        for rule in observability.rules(ROOT):
            name = rule.get("alert") or rule["record"]
            self.assertTrue(observability.metric_names(rule["expr"]), name)
            self.assertEqual(self.unknown(rule["expr"]), set(), name)

    def test_counters_are_read_through_a_rate(self):
        counters = {name for name, (kind, _, _) in observability.documented_metrics(ROOT).items() if kind == "counter"}
        self.assertGreater(len(counters), 50)
        expressions = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in observability.rules(ROOT)]
        expressions += [(f"{d}: {p}", e) for d, p, e in observability.dashboard_expressions(ROOT)]
        for name, expression in expressions:
            for counter in observability.metric_names(expression) & counters:
                self.assertRegex(expression, rf"(rate|increase|changes)\({counter}(\{{[^}}]*\}})?\[", name)

    def test_every_alert_is_complete_and_has_its_runbook(self):
        pages = {page.stem for page in (ROOT / "docs/runbooks").glob("*.md")} - {"README"}
        self.assertEqual(pages, set(observability.alerts(ROOT)))
        index = (ROOT / "docs/runbooks/README.md").read_text()
        for rule in observability.rules(ROOT):
            if "alert" not in rule:
                continue
            name = rule["alert"]
            self.assertIn(rule["labels"]["severity"], ("warning", "critical"), name)
            self.assertTrue(rule["annotations"]["summary"], name)
            self.assertEqual(rule["annotations"]["runbook"], f"docs/runbooks/{name}.md")
            text = (ROOT / f"docs/runbooks/{name}.md").read_text()
            self.assertTrue(text.startswith(f"# {name}\n\nSeverity: {rule['labels']['severity']}."), name)
            self.assertEqual(re.findall(r"^## (.*)$", text, re.MULTILINE),
                             ["What it means", "How to look", "What to do"], name)
            self.assertIn(f"| [{name}]({name}.md) | {rule['labels']['severity']} |", index)

    def test_the_rules_for_kubernetes_are_the_same(self):
        sys.path.insert(0, str(ROOT / "deploy/prometheus"))
        import kubernetes
        self.assertEqual(kubernetes.TARGET.read_text(), kubernetes.text(), "run deploy/prometheus/kubernetes.py")
        written = yaml.safe_load(kubernetes.text())["spec"]["groups"]
        self.assertEqual([rule for group in written for rule in group["rules"]], observability.rules(ROOT))
        monitor = (kubernetes.TARGET.parent / "service-monitor.yaml").read_text()
        self.assertIn("targetLabel: job\n          replacement: conclave-$1", monitor)

    def test_runbooks_speak_of_metrics_and_settings_that_exist(self):
        config = (ROOT / "docs/config.md").read_text()
        sections = {}
        for section in re.split(r"^## ", config, flags=re.MULTILINE)[1:]:
            sections[section.split("\n", 1)[0].strip()] = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
        self.assertIn("max_requests", sections["router"])
        for page in sorted((ROOT / "docs/runbooks").glob("*.md")):
            for code in re.findall(r"`([^`]+)`", page.read_text()):
                self.assertEqual(self.unknown(code), set(), page.name)
                setting = re.match(r"(\w+)\.(\w+)(:|$)", code)
                if setting and setting[1] in sections:
                    self.assertIn(setting[2], sections[setting[1]], f"{page.name}: {code}")


if __name__ == "__main__":
    unittest.main()
