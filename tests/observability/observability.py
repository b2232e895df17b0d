"""What the tests here share: the rules, the dashboards and the names of the metrics."""

import functools
import json
import pathlib
import re

import yaml

# Names that Prometheus itself makes.
BUILT_IN = {"up", "ALERTS"}
METRIC = re.compile(r"(?<![\w:\"])(?:conclave[:_][\w:]+|process_\w+|up|ALERTS)(?![\w:])")


def rule_files(root):
    return sorted(pathlib.Path(root, "deploy/prometheus/rules").glob("*.yml"))


def shortened(text, divisor):
    """A file of rules whose windows are so many times shorter (4 s at least), and whose alerts wait no longer than 2 s before
    they fire. Nothing else changes: thresholds stay."""
    def window(match):
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
        return f"[{max(seconds // divisor, 4)}s]"
    text = re.sub(r"\[(\d+)([smh])\]", window, text)
    if re.search(r"\[\d+[^\ds\]]", text):
        raise ValueError("a window of a form that is not known here")
    return re.sub(r"^(\s+for:) \w+$", r"\1 2s", text, flags=re.MULTILINE)


@functools.cache
def rules(root):
    """Every rule: {"alert" or "record", "expr", ...}."""
    return [rule for path in rule_files(root) for group in yaml.safe_load(path.read_text())["groups"]
            for rule in group["rules"]]


def alerts(root):
    return [rule["alert"] for rule in rules(root) if "alert" in rule]


@functools.cache
def records(root):
    return {rule["record"]: rule["expr"] for rule in rules(root) if "record" in rule}


def expressions_with_records(root):
    """{alert: its expression and those of the recorded series it reads}."""
    recorded = records(root)

    def widen(expression):
        return expression + "".join("\n" + widen(recorded[name]) for name in metric_names(expression)
                                    if name in recorded)

    return {rule["alert"]: widen(rule["expr"]) for rule in rules(root) if "alert" in rule}


def metric_names(expression):
    """The metrics that an expression reads."""
    return set(METRIC.findall(re.sub(r'"[^"]*"', '""', expression)))


def base_name(name):
    """Of a histogram's series, the histogram."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


@functools.cache
def documented_metrics(root):
    """{name: (type, set of labels, set of roles)} as docs/metrics.md says."""
    out = {}
    for line in pathlib.Path(root, "docs/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 4 and re.fullmatch(r"`\w+`", cells[0]):
            out[cells[0].strip("`")] = (cells[1], set(re.findall(r"`(\w+)`", cells[2])), set(cells[3].split(", ")))
    return out


def dashboard_files(root):
    return sorted(pathlib.Path(root, "deploy/grafana/dashboards").glob("*.json"))


def panels(dashboard):
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def dashboard_expressions(root):
    """(dashboard, panel, expression) of every target."""
    for path in dashboard_files(root):
        for panel in panels(json.loads(path.read_text())):
            for target in panel.get("targets", []):
                yield path.stem, panel["title"], target["expr"]
