"""The rendered objects against Kubernetes' own schemas and those of the other controllers' kinds, unknown fields refused.
Runs in a virtual environment with requirements.txt, which run_schemas.py makes."""

import copy
import unittest

import jsonschema
import kubernetes_validate

import custom_schemas
import manifests

KUBERNETES = "1.37"


def check(obj):
    """Throws a ValidationError of one of the two libraries."""
    schema = custom_schemas.whole(obj["apiVersion"], obj["kind"])
    if schema is None:
        kubernetes_validate.validate(obj, KUBERNETES, strict=True)
        return
    jsonschema.Draft7Validator(schema).validate(obj)
    # What such an object holds of Kubernetes' own.
    if obj["kind"] == "LeaderWorkerSet":
        for template in ("leaderTemplate", "workerTemplate"):
            pod = obj["spec"]["leaderWorkerTemplate"][template]
            check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": pod})
    if obj["kind"] == "ScaledObject":
        behavior = obj["spec"].get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
        target = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "a"}
        check({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "a"},
               "spec": {"scaleTargetRef": target, "maxReplicas": 1, "behavior": behavior}})


def places(value, path=()):
    """Paths of all objects inside `value`, itself included."""
    found = [path] if isinstance(value, dict) else []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(inner, path + (key,))
    return found


def at(value, path):
    for key in path:
        value = value[key]
    return value


class Schemas(unittest.TestCase):
    def test_every_object(self):
        for name in manifests.KUSTOMIZATIONS:
            for obj in manifests.rendered(name):
                with self.subTest(f"{name}: {obj['kind']} {obj['metadata']['name']}"):
                    check(obj)

    def test_an_unknown_field_anywhere_is_refused(self):
        refused = (jsonschema.ValidationError, kubernetes_validate.ValidationError)
        kinds = {}
        for name in manifests.KUSTOMIZATIONS:
            for obj in manifests.rendered(name):
                kinds.setdefault((obj["apiVersion"], obj["kind"]), obj)
        self.assertLessEqual(set(custom_schemas.SPECS), set(kinds))
        free = {"labels", "annotations", "matchLabels", "data", "limits", "requests"}  # any name is good there
        for (version, kind), obj in kinds.items():
            for path in places(obj):
                # A resource's fields and all that a pod has are the business of Kubernetes' schemas: one kind shows it.
                if free & set(path) or path[:1] == ("metadata",) or (kind != "StatefulSet" and "template" in path) or (
                        kind == "Service" and "selector" in path):
                    continue
                faulty = copy.deepcopy(obj)
                at(faulty, path)["noSuchField"] = "a"
                with self.subTest(f"{kind} {path}"):
                    self.assertRaises(refused, check, faulty)

    def test_values_that_others_refuse(self):
        def of_kind(kind):
            objects = manifests.rendered("groups_mtls" if kind == "LeaderWorkerSet" else "every_component")
            return copy.deepcopy([o for o in objects if o["kind"] == kind][-1])
        faults = [
            ("LeaderWorkerSet", ("spec", "startupPolicy"), "AllAtOnce"), ("LeaderWorkerSet", ("spec", "replicas"), "2"),
            ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "restartPolicy"), "Never"),
            ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 0.7), ("ScaledObject", ("spec", "triggers"), []),
            ("ServiceMonitor", ("spec", "endpoints", 0, "interval"), "15"), ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expr"), None),
            ("Issuer", ("spec",), {"ca": {}}), ("Certificate", ("spec", "usages", 0), "server"),
            ("Certificate", ("spec", "dnsNames"), "a"), ("Certificate", ("spec", "duration"), "7d"),
            ("HTTPRoute", ("spec", "rules", 0, "timeouts", "request"), "0"), ("GRPCRoute", ("spec", "rules", 0, "backendRefs", 0, "port"), "grpc"),
        ]
        self.assertEqual({kind for kind, _, _ in faults}, {kind for _, kind in custom_schemas.SPECS})
        for kind, path, value in faults:
            obj = of_kind(kind)
            check(obj)
            at(obj, path[:-1])[path[-1]] = value
            with self.subTest(f"{kind} {path}"):
                self.assertRaises(jsonschema.ValidationError, check, obj)


if __name__ == "__main__":
    unittest.main()
