"""Renders a kustomization: `kubectl kustomize` where there is one that can, and always a small renderer of our own.

Ours knows what deploy/kubernetes uses, refuses what it does not know, and is compared with kubectl's in
render_test.py. So the tests of the manifests need no kubectl.
"""

import copy
import functools
import hashlib
import json
import pathlib
import re
import shutil
import subprocess

import yaml

# By which field the elements of a list are told apart in a strategic merge; lists that are not here are replaced.
MERGE_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name",
              "volumeMounts": "mountPath", "ports": "containerPort", "topologySpreadConstraints": "topologyKey"}
CLUSTER_KINDS = {"Namespace", "PersistentVolume", "ClusterRole", "ClusterRoleBinding", "PriorityClass"}
KNOWN_FIELDS = {"apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "images", "labels",
                "nameSuffix", "patches", "configurations"}
# Files of patches that have changed something since this program started.
PATCHES_USED = set()


def key_of(obj):
    return obj["kind"], obj["metadata"]["name"]


@functools.cache
def parsed(path):
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [doc for doc in yaml.load_all(path.read_text(), loader) if doc is not None]


def documents(path):
    return copy.deepcopy(parsed(path.resolve()))


def merge(base, patch, field=""):
    """A strategic merge of `patch` into `base`; null removes, the patch's elements of a keyed list come first."""
    if isinstance(base, dict) and isinstance(patch, dict):
        out = dict(base)
        for name, value in patch.items():
            if value is None:
                out.pop(name, None)
            elif name in out:
                out[name] = merge(out[name], value, name)
            else:
                out[name] = without_nulls(value)
        return out
    if isinstance(base, list) and isinstance(patch, list) and field in MERGE_KEYS:
        by = MERGE_KEYS[field]
        old = {item[by]: item for item in base}
        named = [item[by] for item in patch]
        return ([merge(old[item[by]], item) if item[by] in old else without_nulls(item) for item in patch]
                + [item for item in base if item[by] not in named])
    return without_nulls(patch)


def without_nulls(value):
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def selected(obj, target):
    unknown = set(target) - {"kind", "name", "labelSelector"}
    if unknown:
        raise ValueError(f"patch target: {unknown}")
    labels = obj["metadata"].get("labels", {})
    wanted = dict(pair.split("=") for pair in target.get("labelSelector", "").split(",") if pair)
    return (obj["kind"] == target.get("kind", obj["kind"])
            and re.fullmatch(target.get("name", ".*"), obj["metadata"]["name"]) is not None
            and all(labels.get(k) == v for k, v in wanted.items()))


def json_patched(obj, operations):
    """`obj` after a JSON patch (RFC 6902): add, replace and test."""
    out = copy.deepcopy(obj)
    for operation in operations:
        if set(operation) != {"op", "path", "value"} or operation["op"] not in ("add", "replace", "test"):
            raise ValueError(f"JSON patch: {operation}")
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        parent = out
        for part in path:
            parent = parent[int(part) if isinstance(parent, list) else part]
        value = copy.deepcopy(operation["value"])
        if operation["op"] == "add" and isinstance(parent, list):
            parent.insert(len(parent) if last == "-" else int(last), value)
            continue
        key = int(last) if isinstance(parent, list) else last
        if operation["op"] == "test" and parent[key] != value:
            raise ValueError(f"JSON patch: {operation['path']} is not {value!r}")
        if operation["op"] == "replace":
            parent[key]  # must be there
        if operation["op"] != "test":
            parent[key] = value
    return out


def apply_patch(objects, patch, target):
    """A patch without a target names its object, which must exist; one with a target changes whatever the target selects."""
    matching = [o for o in objects if (selected(o, target) if target else key_of(o) == key_of(patch))]
    if not matching and not target:
        raise ValueError(f"patch of {key_of(patch)} matches nothing")
    if isinstance(patch, list):
        return [json_patched(o, patch) if any(o is m for m in matching) else o for o in objects]
    patch = copy.deepcopy(patch)
    delete = patch.pop("$patch", None) == "delete"
    if delete:
        return [o for o in objects if not any(o is m for m in matching)]
    for field in ("apiVersion", "kind"):
        patch.pop(field)
    patch["metadata"].pop("name")
    return [merge(o, patch) if any(o is m for m in matching) else o for o in objects]


def walk(value, visit):
    """Calls visit(field, value) for every member of every object inside."""
    if isinstance(value, dict):
        for field, inner in list(value.items()):
            visit(value, field, inner)
            walk(inner, visit)
    elif isinstance(value, list):
        for inner in value:
            walk(inner, visit)


def set_images(obj, images):
    def visit(parent, field, value):
        if field not in ("containers", "initContainers"):
            return
        for container in value:
            name, _, tag = container["image"].partition(":")
            for image in images:
                if image["name"] == name:
                    tag = image.get("newTag", tag)
                    container["image"] = image.get("newName", name) + (f":{tag}" if tag else "")
                    break
    walk(obj, visit)


def set_labels(obj, pairs):
    obj["metadata"].setdefault("labels", {}).update(pairs)
    if obj["kind"] == "Service":
        obj["spec"].setdefault("selector", {}).update(pairs)

    def visit(parent, field, value):
        if field == "matchLabels":
            value.update(pairs)
        if field == "template":
            value["metadata"].setdefault("labels", {}).update(pairs)
    if obj["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        walk(obj, visit)


def rename_references(objects, kind, old, new):
    """Where other objects name one of this kind."""
    def visit(parent, field, value):
        if kind == "ConfigMap" and field in ("configMap", "configMapRef") and value.get("name") == old:
            value["name"] = new
        if kind == "Service" and field == "serviceName" and value == old:
            parent[field] = new
        if field == "scaleTargetRef" and value.get("kind") == kind and value.get("name") == old:
            value["name"] = new
    for obj in objects:
        walk(obj, visit)


def generate_config_map(objects, spec, root):
    unknown = set(spec) - {"name", "files", "literals", "behavior"}
    if unknown:
        raise ValueError(f"configMapGenerator: {unknown}")
    data = {}
    for entry in spec.get("files", []):
        name, _, path = entry.rpartition("=")
        data[name or pathlib.PurePosixPath(path).name] = (root / path).read_text()
    for entry in spec.get("literals", []):
        name, _, value = entry.partition("=")
        data[name] = value
    existing = [o for o in objects if key_of(o) == ("ConfigMap", spec["name"])]
    if spec.get("behavior") == "merge":
        existing[0]["data"].update(data)
    elif existing:
        raise ValueError(f"config map {spec['name']} exists")
    else:
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": spec["name"]}, "data": data,
                        "generated": True})


def content_hash(config_map):
    """A suffix that changes with the content; kustomize's own differs."""
    return hashlib.sha256(json.dumps(config_map["data"], sort_keys=True).encode()).hexdigest()[:10]


def accumulate(root, objects):
    """Reads the kustomization in `root` on top of `objects`."""
    (spec,) = documents(root / "kustomization.yaml")
    unknown = set(spec) - KNOWN_FIELDS
    if unknown:
        raise ValueError(f"{root}: fields that this renderer does not know: {unknown}")
    for entry in spec.get("resources", []):
        path = root / entry
        if path.is_dir():
            objects = objects + accumulate(path, [])
        else:
            objects = objects + documents(path)
    for entry in spec.get("configMapGenerator", []):
        generate_config_map(objects, entry, root)
    for entry in spec.get("components", []):
        objects = accumulate(root / entry, objects)
    for entry in spec.get("patches", []):
        for patch in documents(root / entry["path"]):
            changed = apply_patch(objects, patch, entry.get("target"))
            if len(changed) != len(objects) or any(a is not b for a, b in zip(changed, objects)):
                PATCHES_USED.add((root / entry["path"]).resolve())
            objects = changed
    for obj in objects:
        for entry in spec.get("labels", []):
            set_labels(obj, entry["pairs"])
        set_images(obj, spec.get("images", []))
        if "namespace" in spec:
            if obj["kind"] == "Namespace":
                obj["metadata"]["name"] = spec["namespace"]
            elif obj["kind"] not in CLUSTER_KINDS:
                obj["metadata"]["namespace"] = spec["namespace"]
    if "nameSuffix" in spec:
        for obj in objects:
            old = obj["metadata"]["name"]
            obj["metadata"]["name"] = old + spec["nameSuffix"]
            rename_references(objects, obj["kind"], old, obj["metadata"]["name"])
    names = [key_of(o) for o in objects]
    if len(set(names)) != len(names):
        raise ValueError(f"{root}: objects that exist twice: {sorted(n for n in names if names.count(n) > 1)}")
    return objects


def render(root):
    objects = copy.deepcopy(accumulate(pathlib.Path(root), []))
    for obj in objects:
        if obj.pop("generated", False):
            old = obj["metadata"]["name"]
            obj["metadata"]["name"] = f"{old}-{content_hash(obj)}"
            rename_references(objects, "ConfigMap", old, obj["metadata"]["name"])
    return objects


@functools.cache
def kubectl():
    """A kubectl whose kustomize knows components (1.21 and later), or None."""
    program = shutil.which("kubectl")
    if program is None:
        return None
    done = subprocess.run([program, "version", "--client", "-o", "json"], capture_output=True, text=True, timeout=60)
    found = re.search(r'"kustomizeVersion":\s*"v(\d+)', done.stdout)
    return program if found and int(found.group(1)) >= 4 else None


def render_by_kubectl(root):
    done = subprocess.run([kubectl(), "kustomize", str(root)], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return [doc for doc in yaml.safe_load_all(done.stdout) if doc is not None]
