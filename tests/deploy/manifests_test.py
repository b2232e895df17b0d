"""What the objects of the manifests owe each other."""

import re
import unittest

import yaml

import manifests
from manifests import LISTENS, SECTION, config, matches, named, of_kind, quantity, workloads

SECRETS = {"conclave-cluster-secret": {"secret"}, "conclave-api-keys": {"api-keys"}}  # made as docs/kubernetes.md says
TLS_SECRETS = {f"conclave-tls-{role}": {"ca.crt", "tls.crt", "tls.key"} for role in SECTION}  # by cert-manager, or as docs/security.md says
DATA_PLANE = (17000, 17999)
LEAVE_AFTER_DRAIN_S = 5  # Service::limit_end(drain_time + 5 s)


def replicas_can_be_many(objects, workload):
    if workload.kind == "LeaderWorkerSet" or workload.spec.get("replicas", 1) > 1:
        return True
    return any(o["spec"]["scaleTargetRef"]["name"] == workload.name
               for o in objects if o["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"))


class Manifests(unittest.TestCase):
    def every(self):
        for name in manifests.KUSTOMIZATIONS:
            with self.subTest(name):
                yield name, manifests.rendered(name)

    def every_workload(self):
        for name, objects in self.every():
            for workload in workloads(objects):
                with self.subTest(f"{name} {workload.name} {workload.role}"):
                    yield name, objects, workload

    def test_the_roles_are_all_there(self):
        for _, objects in self.every():
            roles = [w.role for w in workloads(objects)]
            self.assertEqual(set(roles), set(SECTION))
            self.assertEqual(roles.count("router"), 1)
            self.assertEqual(roles.count("scheduler"), 1)

    def test_namespaces(self):
        for _, objects in self.every():
            for obj in objects:
                if obj["kind"] == "Namespace":
                    self.assertEqual(obj["metadata"]["name"], "conclave")
                else:
                    self.assertEqual(obj["metadata"].get("namespace"), "conclave", obj["metadata"]["name"])

    def test_selectors_match_their_own_pods_alone(self):
        for _, objects, workload in self.every_workload():
            if workload.kind == "LeaderWorkerSet":
                continue
            own = [w for w in workloads(objects) if matches(workload.spec["selector"], w.labels)]
            self.assertEqual([w.name for w in own], [workload.name])
            for spread in workload.pod.get("topologySpreadConstraints", []):
                self.assertTrue(matches(spread["labelSelector"], workload.labels), spread)

    def test_members_and_routers_are_spread(self):
        for _, _, workload in self.every_workload():
            if workload.role != "scheduler":
                keys = [s["topologyKey"] for s in workload.pod["topologySpreadConstraints"]]
                self.assertIn("kubernetes.io/hostname", keys)
                self.assertIn("topology.kubernetes.io/zone", keys)

    def test_services(self):
        for _, objects in self.every():
            for service in of_kind(objects, "Service"):
                behind = [w for w in workloads(objects) if matches({"matchLabels": service["spec"]["selector"]}, w.labels)]
                self.assertEqual(len(behind), 1, service["metadata"]["name"])
                ports = {p["name"] for p in behind[0].container["ports"]}
                for port in service["spec"]["ports"]:
                    self.assertIn(port["targetPort"], ports, service["metadata"]["name"])
            for workload in workloads(objects):
                if workload.kind == "StatefulSet":
                    service = named(objects, "Service", workload.spec["serviceName"])
                    self.assertEqual(service["spec"]["clusterIP"], "None")
                    self.assertTrue(matches({"matchLabels": service["spec"]["selector"]}, workload.labels))

    def test_listening_addresses_are_the_declared_ports(self):
        for _, objects, workload in self.every_workload():
            settings = config(objects, workload)
            section = settings[SECTION[workload.role]]
            self.assertEqual({p["name"]: p["containerPort"] for p in workload.container["ports"]},
                             {name: int(section[key].rpartition(":")[2]) for name, key in LISTENS[workload.role].items()})
            for key in LISTENS[workload.role].values():
                self.assertRegex(section[key], r"^0\.0\.0\.0:[1-9][0-9]*$")
            admin = settings["router"].get("admin_listen", manifests.config_keys()["router"]["admin_listen"])
            self.assertTrue(admin.startswith("127.0.0.1:"))

    def test_the_scheduler_is_found_before_it_is_ready(self):
        for _, objects, workload in self.every_workload():
            host, _, port = config(objects, workload)["scheduler"]["address"].partition(":")
            service = named(objects, "Service", host)
            self.assertTrue(service["spec"]["publishNotReadyAddresses"])
            self.assertNotEqual(service["spec"].get("clusterIP"), "None")
            (target,) = [p["targetPort"] for p in service["spec"]["ports"] if str(p["port"]) == port]
            (behind,) = [w for w in workloads(objects) if matches({"matchLabels": service["spec"]["selector"]}, w.labels)]
            self.assertEqual((behind.role, target), ("scheduler", "control"))

    def test_one_scheduler_at_a_time(self):
        for _, _, workload in self.every_workload():
            if workload.role == "scheduler":
                self.assertEqual((workload.kind, workload.spec["replicas"], workload.spec["strategy"]["type"]),
                                 ("Deployment", 1, "Recreate"))

    def test_members_start_together(self):
        # A shard alone is never ready: it would have to hold every expert.
        for _, _, workload in self.every_workload():
            if workload.kind == "StatefulSet":
                self.assertEqual(workload.spec["podManagementPolicy"], "Parallel")
                self.assertEqual(workload.spec["updateStrategy"]["type"], "RollingUpdate")

    def test_probes(self):
        source = (manifests.ROOT / "libs" / "telemetry" / "ops_server.cc").read_text()
        for _, _, workload in self.every_workload():
            for probe, path in (("startupProbe", "/startupz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
                self.assertEqual(workload.container[probe]["httpGet"], {"path": path, "port": "ops"})
                self.assertIn(f'"{path}"', source)
            if workload.role == "router":
                # While the scheduler is replaced the router takes requests, though it is not ready: its endpoint must stay.
                gateway = (manifests.ROOT / "router_service" / "gateway" / "gateway.h").read_text()
                forgiven = int(re.search(r"unready_grace = (\d+) \* kSecond", gateway).group(1))
                readiness = workload.container["readinessProbe"]
                self.assertGreaterEqual(readiness["periodSeconds"] * (readiness["failureThreshold"] - 1), forgiven)
            startup = workload.container["startupProbe"]
            if workload.role != "scheduler":  # the others wait for weights
                self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 3600)

    def test_grace_is_longer_than_the_drain(self):
        for _, objects, workload in self.every_workload():
            section = SECTION[workload.role]
            drain = config(objects, workload)[section].get("drain_time_s", manifests.config_keys()[section]["drain_time_s"])
            hook = workload.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["/bin/sleep", "0"])
            self.assertEqual(hook[0], "/bin/sleep")
            # The hook counts against the grace period.
            self.assertGreater(workload.pod["terminationGracePeriodSeconds"],
                               float(drain) + float(hook[1]) + LEAVE_AFTER_DRAIN_S)
            self.assertEqual(float(hook[1]) > 0, workload.role == "router")

    def test_disruption_budgets(self):
        for _, objects, workload in self.every_workload():
            budgets = [b for b in of_kind(objects, "PodDisruptionBudget") if matches(b["spec"]["selector"], workload.labels)]
            self.assertEqual(len(budgets), 1 if replicas_can_be_many(objects, workload) else 0)
            for budget in budgets:
                self.assertEqual(budget["spec"]["maxUnavailable"], 1)
        for _, objects in self.every():
            for budget in of_kind(objects, "PodDisruptionBudget"):
                self.assertEqual(sum(matches(budget["spec"]["selector"], w.labels) for w in workloads(objects)), 1)

    def test_autoscalers(self):
        rules = yaml.safe_load((manifests.KUBERNETES / "prometheus-adapter" / "rules.yaml").read_text())["rules"]["custom"]
        made = {}
        for rule in rules:
            series = re.match(r"[a-z0-9_]+", rule["seriesQuery"]).group(0)
            self.assertIn(series, manifests.source_metrics())
            made[rule["name"]["as"]] = series
        for _, objects in self.every():
            targets = []
            for scaler in of_kind(objects, "HorizontalPodAutoscaler") + of_kind(objects, "ScaledObject"):
                ref = scaler["spec"]["scaleTargetRef"]
                target = named(objects, ref["kind"], ref["name"])
                self.assertEqual(target["apiVersion"], ref["apiVersion"])
                # Else every apply would undo the autoscaler.
                self.assertNotIn("replicas", target["spec"])
                targets.append(ref["name"])
                for metric in scaler["spec"].get("metrics", []):
                    if metric["type"] == "Pods":
                        self.assertIn(metric["pods"]["metric"]["name"], made)
                    else:
                        self.assertEqual(metric["resource"]["name"], "cpu")
                for trigger in scaler["spec"].get("triggers", []):
                    query = trigger["metadata"]["query"]
                    (series,) = re.findall(r"conclave_[a-z0-9_]+", query)
                    self.assertIn(series, manifests.source_metrics())
                    # Of the pods that it scales, and of no others.
                    self.assertEqual(re.search(r'service="([^"]+)"', query).group(1), target["spec"]["serviceName"])
                    self.assertEqual(re.search(r'namespace="([^"]+)"', query).group(1), scaler["metadata"]["namespace"])
            self.assertEqual(len(set(targets)), len(targets))
            for workload in workloads(objects):  # each class of shards by itself
                if workload.kind == "StatefulSet" and workload.role == "expert":
                    self.assertIn(workload.name, targets)
            self.assertIn("conclave-router", targets)

    def test_scaling_down_waits_for_the_drain(self):
        for _, objects in self.every():
            for scaler in of_kind(objects, "HorizontalPodAutoscaler") + of_kind(objects, "ScaledObject"):
                target = scaler["spec"]["scaleTargetRef"]["name"]
                (workload,) = [w for w in workloads(objects) if w.name == target]
                if workload.role != "expert":
                    continue
                behavior = scaler["spec"].get("behavior") or scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
                drain = float(config(objects, workload)["experts"]["drain_time_s"])
                for policy in behavior["scaleDown"]["policies"]:
                    self.assertEqual((policy["type"], policy["value"]), ("Pods", 1))
                    self.assertGreater(policy["periodSeconds"], drain)

    def test_security(self):
        for name, _, workload in self.every_workload():
            pod = workload.pod
            self.assertFalse(pod["automountServiceAccountToken"])
            self.assertFalse(pod["enableServiceLinks"])
            self.assertTrue(pod["securityContext"]["runAsNonRoot"])
            self.assertGreater(pod["securityContext"]["runAsUser"], 0)
            self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
            for field in ("hostNetwork", "hostPID", "hostIPC"):
                self.assertNotIn(field, pod)
            for container in pod["containers"] + pod.get("initContainers", []):
                context = container["securityContext"]
                self.assertIs(context["allowPrivilegeEscalation"], False)
                self.assertIs(context["readOnlyRootFilesystem"], True)
                self.assertEqual(context["capabilities"]["drop"], ["ALL"])
                moves_rows = workload.role in ("attention", "expert") and container is workload.container
                self.assertEqual(context["capabilities"].get("add", []),
                                 ["IPC_LOCK"] if name in manifests.WITH_RDMA and moves_rows else [])
                self.assertRegex(container["image"], r"^conclave(-weights)?:[0-9]|^conclave-weights$")
                for kind in ("requests", "limits"):
                    self.assertIn("cpu", container["resources"][kind])
                    self.assertIn("memory", container["resources"][kind])
                for resource, value in container["resources"]["requests"].items():
                    self.assertLessEqual(quantity(value), quantity(container["resources"]["limits"][resource]))

    def test_pod_security_level_admits_the_pods(self):
        for name, objects in self.every():
            level = of_kind(objects, "Namespace")[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
            more = any("add" in w.container["securityContext"]["capabilities"] or any("hostPath" in v for v in w.pod["volumes"])
                       for w in workloads(objects))
            self.assertEqual(level, "privileged" if more else "restricted")

    def test_volumes(self):
        page = (manifests.ROOT / "docs" / "kubernetes.md").read_text()
        for secret, keys in SECRETS.items():
            self.assertRegex(page, rf"create secret generic {secret} \\?\s*--from-")
            for key in keys:
                self.assertRegex(page, rf"create secret generic {secret} \\?\s*--from-(file|literal)={key}=")
        for _, objects, workload in self.every_workload():
            volumes = {v["name"]: v for v in workload.pod["volumes"]}
            used = {m["name"] for c in workload.pod["containers"] + workload.pod.get("initContainers", []) for m in c.get("volumeMounts", [])}
            self.assertEqual(used, set(volumes))
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    self.assertIsNotNone(named(objects, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
                if "configMap" in volume:
                    self.assertIsNotNone(named(objects, "ConfigMap", volume["configMap"]["name"]))
                if "secret" in volume:
                    self.assertIn(volume["secret"]["secretName"], {**SECRETS, **TLS_SECRETS})
            claims = {v["persistentVolumeClaim"]["claimName"] for w in workloads(objects) for v in w.pod["volumes"] if "persistentVolumeClaim" in v}
            self.assertEqual({o["metadata"]["name"] for o in of_kind(objects, "PersistentVolumeClaim")}, claims)

    def test_files_that_the_configuration_names_are_mounted(self):
        for name, objects, workload in self.every_workload():
            mtls = name in manifests.WITH_MTLS
            volumes = {v["name"]: v for v in workload.pod["volumes"]}
            mounts = {m["mountPath"]: volumes[m["name"]] for m in workload.container["volumeMounts"]}
            settings = config(objects, workload)
            needed = {"router": ["router.api_keys_file"], "attention": ["transport.secret_file"], "expert": ["transport.secret_file"],
                      "scheduler": []}[workload.role] + mtls * ["tls.ca_file", "tls.cert_file", "tls.key_file"]
            self.assertEqual("tls" in settings, mtls)
            for key in needed:
                section, _, key = key.partition(".")
                folder, _, file = settings[section][key].rpartition("/")
                self.assertIn(file, {**SECRETS, **TLS_SECRETS}[mounts[folder]["secret"]["secretName"]])
            if workload.role != "scheduler":
                self.assertTrue(settings["model"]["path"].startswith("/models/"))
                self.assertIn("/models", mounts)
            # Files of every process, and of nobody else.
            own = {"router": {"conclave-api-keys"}, "scheduler": set()}.get(workload.role, {"conclave-cluster-secret"})
            self.assertEqual({v["secret"]["secretName"] for v in volumes.values() if "secret" in v},
                             own | ({f"conclave-tls-{workload.role}"} if mtls else set()))

    def test_certificates(self):
        def hours(text):
            return int(re.fullmatch(r"([0-9]+)h", text).group(1))
        for name in manifests.WITH_MTLS:
            objects = manifests.rendered(name)
            certificates = {c["spec"]["secretName"]: c["spec"] for c in of_kind(objects, "Certificate")}
            for workload in workloads(objects):
                with self.subTest(f"{name} {workload.name}"):
                    spec = certificates[f"conclave-tls-{workload.role}"]
                    self.assertLessEqual({"server auth", "client auth", "digital signature"}, set(spec["usages"]))
                    self.assertNotIn("isCA", spec)
                    self.assertEqual(spec["privateKey"]["rotationPolicy"], "Always")
                    # Renewed long before the alert ConclaveCertificateExpires, and read again by itself.
                    self.assertLessEqual(hours(spec["duration"]), 31 * 24)
                    self.assertGreaterEqual(hours(spec["renewBefore"]), 48)
                    self.assertLess(hours(spec["renewBefore"]), hours(spec["duration"]) / 2)
                    settings = config(objects, workload)
                    # Whom the scheduler lets in, and as whom members know it.
                    allowed = settings["tls"]["client_names"].split(",")
                    self.assertTrue(set(spec["dnsNames"]) & set(allowed))
                    if workload.role == "scheduler":
                        self.assertIn(settings["scheduler"]["address"].partition(":")[0], spec["dnsNames"])
                        self.assertIn("127.0.0.1", spec["ipAddresses"])
            issuers = {i["metadata"]["name"]: i["spec"] for i in of_kind(objects, "Issuer")}
            for secret, spec in certificates.items():
                issuer = issuers[spec["issuerRef"]["name"]]
                if spec.get("isCA"):
                    self.assertEqual(issuer, {"selfSigned": {}})
                    # Else certificates that it has signed would be refused as soon as it is renewed.
                    self.assertEqual(spec["privateKey"]["rotationPolicy"], "Never")
                else:
                    self.assertTrue(certificates[issuer["ca"]["secretName"]]["isCA"])

    def test_configuration_keys_exist(self):
        keys = manifests.config_keys()
        self.assertGreater(len(keys), 5)
        for _, objects, workload in self.every_workload():
            for section, values in config(objects, workload).items():
                for key in values:
                    self.assertIn(key, keys[section])

    def test_threads_follow_the_cpu_limit(self):
        for _, objects, workload in self.every_workload():
            if workload.role in ("attention", "expert"):
                threads = int(config(objects, workload)[SECTION[workload.role]]["threads"])
                self.assertEqual(threads, quantity(workload.container["resources"]["limits"]["cpu"]))

    def test_ucx(self):
        for name, objects, workload in self.every_workload():
            if workload.role not in ("attention", "expert"):
                continue
            env = manifests.environment(objects, workload)
            interface = config(objects, workload)["transport"]["interface"]
            self.assertEqual(env["UCX_TCP_PORT_RANGE"], "%d-%d" % DATA_PLANE)
            self.assertEqual(env.get("UCX_NET_DEVICES", interface), interface)
            rdma, gpus = name in manifests.WITH_RDMA, name in manifests.WITH_GPUS
            self.assertEqual(interface, "mlx5_0:1" if rdma else "eth0")
            limits = workload.container["resources"]["limits"]
            self.assertEqual(any(r.startswith("rdma/") for r in limits), rdma)
            self.assertEqual("nvidia.com/gpu" in limits, gpus)
            self.assertEqual("nvidia.com/gpu" in [t["key"] for t in workload.pod.get("tolerations", [])], gpus)
            if rdma:
                (shm,) = [m["name"] for m in workload.container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
                (volume,) = [v for v in workload.pod["volumes"] if v["name"] == shm]
                self.assertEqual(volume["emptyDir"]["medium"], "Memory")

    def test_leader_worker_sets_have_the_same_pods(self):
        def in_order(value):  # patches put their elements of a list first or last
            if isinstance(value, dict):
                return {k: in_order(v) for k, v in value.items()}
            if isinstance(value, list) and all(isinstance(v, dict) for v in value):
                return sorted((in_order(v) for v in value), key=lambda v: v.get("name", repr(sorted(v.items(), key=str))))
            return value
        for groups, others in (("leader-worker-set", "base"), ("groups_mtls", "every_component")):
            pods = {w.role: w for w in workloads(manifests.rendered(others))}
            for workload in workloads(manifests.rendered(groups)):
                with self.subTest(f"{groups} {workload.role}"):
                    self.assertEqual(in_order(workload.pod), in_order(pods[workload.role].pod))
                    self.assertEqual(workload.labels, pods[workload.role].labels)
        (obj,) = of_kind(manifests.rendered("leader-worker-set"), "LeaderWorkerSet")
        leader, worker = (obj["spec"]["leaderWorkerTemplate"][t] for t in ("leaderTemplate", "workerTemplate"))
        self.assertEqual((leader["metadata"]["labels"]["app.kubernetes.io/component"], worker["metadata"]["labels"]["app.kubernetes.io/component"]),
                         ("attention", "expert"))

    def test_shard_classes_differ_in_name_and_size_alone(self):
        for name in manifests.WITH_RDMA:
            shards = [w for w in workloads(manifests.rendered(name)) if w.role == "expert"]
            self.assertEqual(sorted(w.labels["conclave/shard-class"] for w in shards), ["highmem", "standard"])
            scalers = of_kind(manifests.rendered(name), "HorizontalPodAutoscaler") + of_kind(manifests.rendered(name), "ScaledObject")
            kinds = {o["kind"] for o in scalers if o["metadata"]["labels"]["app.kubernetes.io/component"] == "expert"}
            self.assertEqual(kinds, {"ScaledObject"} if name == "gpu_components" else {"HorizontalPodAutoscaler"})
        for workload in shards:
            self.assertEqual(workload.spec["serviceName"], workload.name)
            for spread in workload.pod["topologySpreadConstraints"]:
                self.assertEqual(spread["labelSelector"]["matchLabels"]["conclave/shard-class"], workload.labels["conclave/shard-class"])

    def test_monitoring(self):
        for name in manifests.WITH_MONITORING:
            with self.subTest(name):
                self.check_monitoring(manifests.rendered(name))

    def check_monitoring(self, objects):
        (monitor,) = of_kind(objects, "ServiceMonitor")
        (endpoint,) = monitor["spec"]["endpoints"]
        self.assertEqual(endpoint["path"], "/metrics")
        for workload in workloads(objects):
            services = [s for s in of_kind(objects, "Service")
                        if matches({"matchLabels": s["spec"]["selector"]}, workload.labels)
                        and matches(monitor["spec"]["selector"], s["metadata"]["labels"])
                        and endpoint["port"] in [p["name"] for p in s["spec"]["ports"]]]
            self.assertEqual(len(services), 1, workload.name)  # each pod once

    def test_routes(self):
        objects = manifests.rendered("every_component")
        for kind, port_name in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
            (route,) = of_kind(objects, kind)
            (rule,) = route["spec"]["rules"]
            (backend,) = rule["backendRefs"]
            service = named(objects, "Service", backend["name"])
            self.assertEqual([p["name"] for p in service["spec"]["ports"] if p["port"] == backend["port"]], [port_name])
        (route,) = of_kind(objects, "HTTPRoute")
        self.assertEqual(route["spec"]["rules"][0]["timeouts"], {"request": "0s", "backendRequest": "0s"})


class Network(unittest.TestCase):
    """The policies open the links of the design and no other."""

    def peer_matches(self, peer, source):
        if set(peer) - {"podSelector", "namespaceSelector"}:
            raise ValueError(peer)
        space = peer.get("namespaceSelector")
        in_space = matches(space, source["namespace"]) if space is not None else source["namespace"].get("own")
        return bool(in_space) and matches(peer.get("podSelector", {}), source["labels"])

    def side_allows(self, objects, pod, direction, other, port, ports_of_target):
        """Whether the policies of `pod` let it talk with `other`; direction: ingress or egress."""
        applying = [p["spec"] for p in of_kind(objects, "NetworkPolicy")
                    if matches(p["spec"]["podSelector"], pod["labels"]) and direction.capitalize() in p["spec"]["policyTypes"]]
        if not pod["namespace"].get("own") or not applying:
            return True
        for spec in applying:
            for rule in spec.get(direction, []):
                peers = rule.get("from" if direction == "ingress" else "to")
                if peers is not None and not any(self.peer_matches(p, other) for p in peers):
                    continue
                for allowed in rule["ports"]:
                    first = ports_of_target.get(allowed["port"]) if isinstance(allowed["port"], str) else allowed["port"]
                    if first is not None and first <= port <= allowed.get("endPort", first):
                        return True
        return False

    def test_links(self):
        for name in manifests.KUSTOMIZATIONS:
            objects = manifests.rendered(name)
            own = {"own": True, "kubernetes.io/metadata.name": "conclave"}
            pods = {w.role: {"labels": w.labels, "namespace": own, "ports": {p["name"]: p["containerPort"] for p in w.container["ports"]}}
                    for w in workloads(objects)}
            outside = {"labels": {}, "namespace": {"kubernetes.io/metadata.name": "elsewhere"}, "ports": {"any": 443}}
            prometheus = {"labels": {}, "namespace": {"kubernetes.io/metadata.name": "monitoring"}, "ports": {"any": 9090}}
            dns = {"labels": {"k8s-app": "kube-dns"}, "namespace": {"kubernetes.io/metadata.name": "kube-system"}, "ports": {"dns": 53}}
            everyone = {**pods, "outside": outside, "monitoring": prometheus, "dns": dns}

            # With no rule for anybody but these: who asks, who is asked, by the name of the port.
            links = {("router", "scheduler", "control"), ("attention", "scheduler", "control"), ("expert", "scheduler", "control"),
                     ("attention", "expert", "rows"), ("expert", "attention", "rows")}
            links |= {(who, "router", port) for who in ("outside", "monitoring", "dns") for port in ("http", "grpc")}
            links |= {("monitoring", role, "ops") for role in pods}
            links |= {(role, "dns", "dns") for role in pods}
            for role in ("attention", "expert"):
                pods[role]["ports"]["rows"] = DATA_PLANE[0]
                pods[role]["ports"]["rows, last"] = DATA_PLANE[1]
                pods[role]["ports"]["past rows"] = DATA_PLANE[1] + 1
            links |= {(a, b, "rows, last") for a, b, port in links if port == "rows"}
            pods["router"]["ports"]["admin"] = 8003
            for who, source in everyone.items():
                for whom, target in everyone.items():
                    if not source["namespace"].get("own") and not target["namespace"].get("own"):
                        continue
                    for port_name, port in target["ports"].items():
                        allowed = (self.side_allows(objects, source, "egress", target, port, target["ports"])
                                   and self.side_allows(objects, target, "ingress", source, port, target["ports"]))
                        self.assertEqual(allowed, (who, whom, port_name) in links, f"{name}: {who} to {whom} at {port_name}")


if __name__ == "__main__":
    unittest.main()
