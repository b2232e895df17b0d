"""The rendered objects against Kubernetes' own schemas, unknown fields refused. Runs in a virtual environment with
requirements.txt, which run_schemas.py makes."""

import unittest

import kubernetes_validate

import manifests

# Kinds of others' controllers, for which there is no schema here: their fields, as their documentation has them.
# A name in brackets is a list of such objects; None: any value.
POD_TEMPLATE = None  # compared with a StatefulSet's in manifests_test.py
BEHAVIOR = None
PARENT = [{"name": None, "namespace": None}]
BACKEND = [{"name": None, "port": None}]
OTHERS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": None, "startupPolicy": None,
        "rolloutStrategy": {"type": None, "rollingUpdateConfiguration": {"maxUnavailable": None, "maxSurge": None}},
        "leaderWorkerTemplate": {"size": None, "restartPolicy": None, "leaderTemplate": POD_TEMPLATE, "workerTemplate": POD_TEMPLATE}},
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef": {"apiVersion": None, "kind": None, "name": None}, "minReplicaCount": None, "maxReplicaCount": None,
        "triggers": [{"type": None, "metricType": None, "metadata": {"serverAddress": None, "query": None, "threshold": None}}],
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": BEHAVIOR}}},
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        "selector": {"matchLabels": None}, "targetLabels": None,
        "endpoints": [{"port": None, "path": None, "interval": None, "scrapeTimeout": None,
                       "relabelings": [{"sourceLabels": None, "targetLabel": None, "replacement": None}]}]},
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups": [{"name": None, "rules": [{"alert": None, "record": None, "expr": None, "for": None, "labels": None,
                                             "annotations": None}]}]},
    ("cert-manager.io/v1", "Issuer"): {"selfSigned": None, "ca": {"secretName": None}},
    ("cert-manager.io/v1", "Certificate"): {
        "isCA": None, "commonName": None, "secretName": None, "duration": None, "renewBefore": None, "usages": None,
        "dnsNames": None, "ipAddresses": None, "privateKey": {"algorithm": None, "size": None, "rotationPolicy": None},
        "issuerRef": {"group": None, "kind": None, "name": None}},
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        "parentRefs": PARENT,
        "rules": [{"matches": [{"path": {"type": None, "value": None}}], "timeouts": {"request": None, "backendRequest": None},
                   "backendRefs": BACKEND}]},
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): {"parentRefs": PARENT, "rules": [{"backendRefs": BACKEND}]},
}


def unknown_fields(value, shape, path):
    if shape is None:
        return []
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [path]
        return [fault for i, item in enumerate(value) for fault in unknown_fields(item, shape[0], f"{path}[{i}]")]
    if not isinstance(value, dict):
        return [path]
    return [fault for name, inner in value.items()
            for fault in ([f"{path}.{name}"] if name not in shape else unknown_fields(inner, shape[name], f"{path}.{name}"))]


class Schemas(unittest.TestCase):
    def check(self, obj):
        other = OTHERS.get((obj["apiVersion"], obj["kind"]))
        if other is None:
            kubernetes_validate.validate(obj, "1.37", strict=True)
            return
        self.assertLessEqual(set(obj), {"apiVersion", "kind", "metadata", "spec"})
        self.assertEqual(unknown_fields(obj["spec"], other, "spec"), [])

    def test_every_object(self):
        for name in manifests.KUSTOMIZATIONS:
            for obj in manifests.rendered(name):
                with self.subTest(f"{name}: {obj['kind']} {obj['metadata']['name']}"):
                    self.check(obj)

    def test_pods_of_leader_worker_sets(self):
        (obj,) = manifests.of_kind(manifests.rendered("leader-worker-set"), "LeaderWorkerSet")
        for template in ("leaderTemplate", "workerTemplate"):
            pod = obj["spec"]["leaderWorkerTemplate"][template]
            self.check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **pod["metadata"]}, "spec": pod["spec"]})

    def test_it_can_fail(self):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "imag": "b"}]}}
        with self.assertRaises(kubernetes_validate.ValidationError):
            self.check(pod)
        with self.assertRaises(AssertionError):
            self.check({"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "spec": {"triggers": [{"tipe": 1}]}})


if __name__ == "__main__":
    unittest.main()
