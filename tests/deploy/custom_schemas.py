"""JSON schemas of other controllers' kinds, of as many of their fields as deploy/kubernetes uses; any other is refused.

After the definitions that those projects publish (kinds, required fields, types, values and patterns alike):
  LeaderWorkerSet   github.com/kubernetes-sigs/lws, config/crd/bases (v0.10)
  ScaledObject      github.com/kedacore/keda, config/crd/bases (v2.20)
  ServiceMonitor, PrometheusRule
                    github.com/prometheus-operator/prometheus-operator, example/prometheus-operator-crd (v0.93)
  Certificate, Issuer
                    github.com/cert-manager/cert-manager, deploy/crds (v1.21)
  HTTPRoute, GRPCRoute
                    github.com/kubernetes-sigs/gateway-api, config/crd/standard (v1)
"""

TEXT = {"type": "string"}
NAME = {"type": "string", "minLength": 1, "maxLength": 253}
COUNT = {"type": "integer", "minimum": 0}
FLAG = {"type": "boolean"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
# Validated as what they are: schema_test.py.
POD_TEMPLATE = {"type": "object"}
SCALING_BEHAVIOR = {"type": "object"}
PROMETHEUS_DURATION = {"type": "string", "pattern": "^(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$"}
GATEWAY_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
GO_DURATION = {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}  # the definition says text; the controller parses it
TEXTS_BY_NAME = {"type": "object", "additionalProperties": TEXT}


def record(_needed="", **fields):
    return {"type": "object", "additionalProperties": False, "required": _needed.split(), "properties": fields}


def listed(item, **more):
    return {"type": "array", "items": item, **more}


def one_of(*values):
    return {"type": "string", "enum": list(values)}


PARENTS = listed(record("name", name=NAME, namespace={"type": "string", "maxLength": 63}), maxItems=32)
BACKENDS = listed(record("name", name=NAME, port=PORT), maxItems=16)

SPECS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): record(
        "leaderWorkerTemplate",
        replicas=COUNT,
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        rolloutStrategy=record("type", type=one_of("RollingUpdate"),
                               rollingUpdateConfiguration=record(maxUnavailable=COUNT, maxSurge=COUNT)),
        leaderWorkerTemplate=record(
            "workerTemplate", size=COUNT, leaderTemplate=POD_TEMPLATE, workerTemplate=POD_TEMPLATE,
            restartPolicy=one_of("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"))),
    ("keda.sh/v1alpha1", "ScaledObject"): record(
        "scaleTargetRef triggers",
        scaleTargetRef=record("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT, maxReplicaCount=COUNT,
        # The metadata of this type of trigger, of which the definition says only that they are texts.
        triggers=listed(record("type metadata", type=one_of("prometheus"), metricType=one_of("AverageValue", "Value", "Utilization"),
                               metadata=record("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT)),
                        minItems=1),
        advanced=record(horizontalPodAutoscalerConfig=record(behavior=SCALING_BEHAVIOR))),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): record(
        "endpoints selector",
        selector=record(matchLabels=TEXTS_BY_NAME),
        endpoints=listed(record(port=TEXT, path=TEXT, interval=PROMETHEUS_DURATION, scrapeTimeout=PROMETHEUS_DURATION,
                                relabelings=listed(record(sourceLabels=listed({"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}),
                                                          targetLabel=TEXT, replacement=TEXT))))),
    ("monitoring.coreos.com/v1", "PrometheusRule"): record(
        groups=listed(record("name", name=NAME,
                             rules=listed(record("expr", alert=TEXT, record=TEXT, expr=TEXT, labels=TEXTS_BY_NAME, annotations=TEXTS_BY_NAME,
                                                 **{"for": PROMETHEUS_DURATION}))))),
    ("cert-manager.io/v1", "Issuer"): record(selfSigned=record(), ca=record("secretName", secretName=TEXT)),
    ("cert-manager.io/v1", "Certificate"): record(
        "issuerRef secretName",
        isCA=FLAG, commonName={"type": "string", "maxLength": 64}, secretName=TEXT, duration=GO_DURATION, renewBefore=GO_DURATION,
        usages=listed(one_of("digital signature", "server auth", "client auth", "cert sign", "key encipherment")),
        dnsNames=listed(TEXT), ipAddresses=listed(TEXT),
        privateKey=record(algorithm=one_of("RSA", "ECDSA", "Ed25519"), size={"type": "integer"}, rotationPolicy=one_of("Never", "Always")),
        issuerRef=record("name", group=TEXT, kind=one_of("Issuer", "ClusterIssuer"), name=TEXT)),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): record(
        parentRefs=PARENTS,
        rules=listed(record(matches=listed(record(path=record(type=one_of("Exact", "PathPrefix", "RegularExpression"),
                                                              value={"type": "string", "maxLength": 1024})), maxItems=64),
                            timeouts=record(request=GATEWAY_DURATION, backendRequest=GATEWAY_DURATION), backendRefs=BACKENDS),
                     minItems=1, maxItems=16)),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): record(parentRefs=PARENTS, rules=listed(record(backendRefs=BACKENDS), maxItems=16)),
}

METADATA = record("name", name=NAME, namespace=NAME, labels=TEXTS_BY_NAME, annotations=TEXTS_BY_NAME)


def whole(api_version, kind):
    """The schema of an object of that kind, or None where it is none of these."""
    spec = SPECS.get((api_version, kind))
    return spec and record("apiVersion kind metadata spec", apiVersion=one_of(api_version), kind=one_of(kind), metadata=METADATA, spec=spec)
