"""The rendered kustomizations, and what the tests ask of them."""

import dataclasses
import functools
import pathlib
import re

import yaml

import kustomize

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
HERE = pathlib.Path(__file__).resolve().parent
KUSTOMIZATIONS = {
    "base": KUBERNETES / "base",
    "cpu-demo": KUBERNETES / "overlays" / "cpu-demo",
    "gpu-rdma": KUBERNETES / "overlays" / "gpu-rdma",
    "leader-worker-set": KUBERNETES / "overlays" / "leader-worker-set",
    # Components with each overlay, as somebody who deploys would put them together.
    **{name: HERE / name for name in ("every_component", "demo_mtls", "gpu_components", "groups_mtls", "groups_gpu", "demo_groups")},
}
WITH_MTLS = ("every_component", "demo_mtls", "gpu_components", "groups_mtls", "demo_groups")
WITH_RDMA = ("gpu-rdma", "gpu_components")
WITH_GPUS = ("gpu-rdma", "gpu_components", "groups_gpu")
WITH_MONITORING = ("every_component", "gpu_components", "groups_mtls")
# Which section of the configuration each role's own keys are in, and the keys that say where it listens.
SECTION = {"router": "router", "scheduler": "scheduler", "attention": "attention", "expert": "experts"}
LISTENS = {"router": {"http": "http_listen", "grpc": "grpc_listen", "ops": "ops_listen"},
           "scheduler": {"control": "listen", "ops": "ops_listen"},
           "attention": {"ops": "ops_listen"}, "expert": {"ops": "ops_listen"}}


@functools.cache
def rendered(name):
    return kustomize.render(KUSTOMIZATIONS[name])


@dataclasses.dataclass
class Workload:
    kind: str
    name: str
    spec: dict      # of the Deployment, StatefulSet or LeaderWorkerSet
    labels: dict    # of its pods
    pod: dict       # the pod's spec

    @property
    def role(self):
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self):
        return self.pod["containers"][0]


def workloads(objects):
    out = []
    for obj in objects:
        spec = obj.get("spec", {})
        templates = [spec["template"]] if obj["kind"] in ("Deployment", "StatefulSet") else []
        if obj["kind"] == "LeaderWorkerSet":
            templates = [spec["leaderWorkerTemplate"]["leaderTemplate"], spec["leaderWorkerTemplate"]["workerTemplate"]]
        out += [Workload(obj["kind"], obj["metadata"]["name"], spec, t["metadata"]["labels"], t["spec"])
                for t in templates]
    return out


def of_kind(objects, kind):
    return [o for o in objects if o["kind"] == kind]


def named(objects, kind, name):
    found = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == name]
    return found[0] if found else None


def matches(selector, labels):
    """Whether a label selector (matchLabels, matchExpressions with In) selects these labels; {} selects all."""
    unknown = set(selector) - {"matchLabels", "matchExpressions"}
    if unknown:
        raise ValueError(f"selector: {unknown}")
    for expression in selector.get("matchExpressions", []):
        if expression["operator"] != "In":
            raise ValueError(f"selector: {expression}")
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())


def quantity(value):
    """A Kubernetes quantity as a number."""
    found = re.fullmatch(r"([0-9.]+)(m|Ki|Mi|Gi|Ti)?", str(value))
    return float(found.group(1)) * {None: 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[found.group(2)]


def config_map_data(objects, name):
    return named(objects, "ConfigMap", name)["data"]


def environment(objects, workload, pod_name="pod-0"):
    """The container's environment as the kubelet makes it."""
    env = {}
    for source in workload.container.get("envFrom", []):
        env.update(config_map_data(objects, source["configMapRef"]["name"]))
    for entry in workload.container.get("env", []):
        if "value" in entry:
            env[entry["name"]] = entry["value"]
            continue
        ((source, how),) = entry["valueFrom"].items()
        if source == "fieldRef" and how["fieldPath"] == "metadata.name":
            env[entry["name"]] = pod_name
        elif source == "resourceFieldRef" and how["resource"] == "limits.cpu":
            env[entry["name"]] = str(-int(-quantity(workload.container["resources"]["limits"]["cpu"]) // 1))
        else:
            raise ValueError(f"env {entry}")
    return env


def config_files(objects, workload):
    """path in the container -> (kind, name, content or None) of every file that is mounted from an object."""
    files = {}
    volumes = {v["name"]: v for v in workload.pod["volumes"]}
    for mount in workload.container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            for key, text in config_map_data(objects, volume["configMap"]["name"]).items():
                files[f"{mount['mountPath']}/{key}"] = text
    return files


def config(objects, workload):
    """The configuration as the process sees it: {section: {key: text}}."""
    files = config_files(objects, workload)
    args = workload.container["args"]
    sections = yaml.safe_load(files[args[args.index("--config") + 1]])
    for name, value in environment(objects, workload).items():
        found = re.fullmatch(r"CONCLAVE_([A-Z]+)_([A-Z0-9_]+)", name)
        if found:
            sections.setdefault(found.group(1).lower(), {})[found.group(2).lower()] = value
    return sections


@functools.cache
def config_keys():
    """section -> {key: default}, of docs/config.md, which a test keeps true."""
    keys, section = {}, None
    for line in (ROOT / "docs" / "config.md").read_text().splitlines():
        if line.startswith("## "):
            section = keys.setdefault(line[3:].strip(), {})
        found = re.match(r"\| `([a-z0-9_]+)` \| (?:`(.*?)`|\(empty\)) \|", line)
        if found:
            section[found.group(1)] = found.group(2) or ""
    return keys


@functools.cache
def source_metrics():
    """Names of metrics in the sources of the services."""
    names = set()
    for top in ("libs", "router_service", "scheduler", "attention_service", "expert_service"):
        for path in (ROOT / top).rglob("*.cc"):
            names.update(re.findall(r'"(conclave_[a-z0-9_]+)"', path.read_text()))
    return names
