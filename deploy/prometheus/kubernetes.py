#!/usr/bin/env python3
"""Writes the rules beside this file as a PrometheusRule of the Prometheus operator:
deploy/kubernetes/components/monitoring/prometheus-rule.yaml, which is committed and never edited by hand.

usage: kubernetes.py
"""

import pathlib

import yaml

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE.parent / "kubernetes/components/monitoring/prometheus-rule.yaml"


class Dumper(yaml.SafeDumper):
    """Long expressions as blocks."""


def text_of(dumper, value):
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


Dumper.add_representer(str, text_of)


def text():
    groups = [group for path in sorted((HERE / "rules").glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    rule = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
            "metadata": {"name": "conclave", "labels": {"app.kubernetes.io/name": "conclave"}}, "spec": {"groups": groups}}
    return ("# Written by deploy/prometheus/kubernetes.py from deploy/prometheus/rules.\n" +
            yaml.dump(rule, Dumper=Dumper, sort_keys=False, width=120))


if __name__ == "__main__":
    TARGET.write_text(text())
