"""Runs pods of the manifests as processes: the literal command, arguments, environment, configuration and mounts, each in
network and mount namespaces of its own, as their user, without capabilities, on a read-only root file system, with the
probes and the TERM and KILL of a kubelet. Needs root; enter_node() first.

A pod's root has the machine's /usr, and the programs and demo checkpoint where the image has them; or, with CONCLAVE_TEST_IMAGE,
the /usr and /opt of that directory (image_test.py). It has an eth0 on the node's bridge. Its /etc/hosts stands in for the
cluster's DNS.
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import manifests

NODE_MARK = "CONCLAVE_TEST_NODE"
NETWORK = "10.77.0."
DEADLINE_S = 150  # for what should take seconds; nothing is judged by it but that it ends

# Pods are killed when the thread ends that started them (setpriv --pdeathsig): one that lives as long as this program.
STARTER = concurrent.futures.ThreadPoolExecutor(1)

SCRIPT = r"""
set -e
echo unshared; read -r go
ip link set lo up
ip addr add "$ADDRESS/24" dev eth0
ip link set eth0 up
mount -t tmpfs -o mode=755 root "$POD_ROOT"
cd "$POD_ROOT"
mkdir -p usr etc proc dev sys opt
for link in bin sbin lib lib64; do ln -s "usr/$link" "$link"; done
mount --bind "$IMAGE/usr" usr; mount -o remount,bind,ro usr
mount --rbind /proc proc; mount --rbind /dev dev
mount -t sysfs -o ro sysfs sys  # of this network: UCX finds eth0 there
for i in $(seq 3000); do  # the kernel says that a link is up a little after it is
  [ "$(cat sys/class/net/eth0/operstate)" = up ] && break
  sleep 0.02
done
cp "$IMAGE"/etc/ld.so.cache "$IMAGE"/etc/nsswitch.conf "$IMAGE"/etc/host.conf etc/ 2>/dev/null || true
cp "$POD_FILES/hosts" etc/hosts
if [ -n "$IMAGE" ]; then
  mount --bind "$IMAGE/opt" opt; mount -o remount,bind,ro opt
else
  mkdir -p opt/conclave/bin opt/conclave/models
  mount --bind "$BIN_DIR" opt/conclave/bin; mount -o remount,bind,ro opt/conclave/bin
  mount --bind "$MODELS" opt/conclave/models; mount -o remount,bind,ro opt/conclave/models
fi
. "$POD_FILES/mounts"
mount -o remount,ro "$POD_ROOT"
in_pod="chroot $POD_ROOT $AS_USER"
exec </dev/null >>"$POD_FILES/log" 2>&1
. "$POD_FILES/command"
"""


def enter_node():
    """Starts this program again as a node: in namespaces of its own with a bridge. Returns in the node. Exits 77 where
    the machine does not allow it."""
    if os.environ.get(NODE_MARK):
        # With an address of its own: else it takes that of one of its links, and changes it when that pod ends.
        subprocess.run(["/bin/bash", "-ec", f"ip link set lo up; ip link add br0 address 02:00:00:00:00:01 type bridge; "
                        f"ip addr add {NETWORK}1/24 dev br0; ip link set br0 up"], check=True)
        return
    node = ["unshare", "--net", "--mount", "--propagation", "private"]
    tried = subprocess.run(node + ["/bin/bash", "-ec", "ip link add br0 type bridge; mount -t tmpfs t /mnt"], capture_output=True, text=True)
    if tried.returncode != 0:
        print("SKIPPED: no namespaces, bridges or mounts here:", tried.stderr.strip(), flush=True)
        sys.exit(77)
    os.environ[NODE_MARK] = "1"
    os.execvp(node[0], node + [sys.executable, "-B"] + sys.argv)


class Kubelet(threading.Thread):
    """Asks a pod's probes as its manifest says, and comes to the kubelet's verdicts."""

    def __init__(self, pod):
        super().__init__(daemon=True)
        self.pod = pod
        self.started = self.ready = self.alive = False
        self.changes = [(0.0, False)]   # of `ready`: when, and to what
        self.times_unready = 0
        self.verdict = None     # the probe for which a kubelet would kill the container
        self.over = threading.Event()

    def settings(self, kind):
        return {"initialDelaySeconds": 0, "periodSeconds": 10, "failureThreshold": 3, "successThreshold": 1, **self.pod.workload.container[kind]}

    def run(self):
        failures = dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), 0)
        due = {"startupProbe": time.monotonic() + self.settings("startupProbe")["initialDelaySeconds"]}
        while not self.over.wait(max(0.0, min(due.values()) - time.monotonic())):
            kind = min(due, key=due.get)
            settings = self.settings(kind)
            due[kind] = time.monotonic() + settings["periodSeconds"]
            good = self.pod.probe(kind)
            failures[kind] = 0 if good else failures[kind] + 1
            failed = failures[kind] >= settings["failureThreshold"]
            if self.over.is_set():
                return
            if kind == "startupProbe" and good:
                self.started = True
                # The others begin now.
                due = {k: time.monotonic() + self.settings(k)["initialDelaySeconds"] for k in ("readinessProbe", "livenessProbe")}
            elif kind == "readinessProbe" and (good or failed):
                self.times_unready += self.ready and not good
                self.set_ready(good)
            elif kind == "livenessProbe" and good:
                self.alive = True
            if failed and kind != "readinessProbe":
                self.verdict = kind
                return

    def end(self):
        """The pod is to go: its endpoint is withdrawn, and its probes have no more say."""
        self.over.set()
        self.set_ready(False)

    def set_ready(self, ready):
        if ready != self.ready:
            self.changes.append((time.monotonic(), ready))
            self.ready = ready

    def was_ready(self, when):
        return [ready for at, ready in list(self.changes) if at <= when][-1]


class Pod:
    """One pod of a workload. `secrets`: name -> {key: text}; `hosts`: name -> address. With `probes` a Kubelet looks at it."""

    links = itertools.count(1)

    def __init__(self, scratch, objects, workload, name, number, secrets, hosts, bin_dir, more_args=(), models=None, probes=True):
        self.workload, self.name = workload, name
        self.address = f"{NETWORK}{number}"
        self.link = f"pod{next(Pod.links)}"
        self.files = pathlib.Path(scratch, f"{name}.{self.link}")
        self.files.mkdir()
        self.files.chmod(0o755)
        self.log_path = self.files / "log"
        root = self.files / "root"
        root.mkdir()
        (self.files / "hosts").write_text("127.0.0.1 localhost\n" + f"{self.address} {name}\n"
                                          + "".join(f"{address} {host}\n" for host, address in hosts.items()))
        user = workload.pod["securityContext"]["runAsUser"]
        (self.files / "mounts").write_text(self.mount_commands(objects, secrets, user, models))
        env = {"PATH": "/opt/conclave/bin:/usr/bin:/bin", "HOSTNAME": name, **manifests.environment(objects, workload, name)}
        words = workload.container["command"] + workload.container["args"] + list(more_args)
        lines = [f"$in_pod env -i {shlex.join(c['command'])}" for c in workload.pod.get("initContainers", []) if models is None]
        lines.append("exec $in_pod env -i " + shlex.join([f"{k}={v}" for k, v in env.items()] + words))
        (self.files / "command").write_text("\n".join(lines) + "\n")
        self.as_user = ["setpriv", "--pdeathsig", "KILL", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs",
                        "--bounding-set=-all", "--inh-caps=-all"]
        outer = dict(os.environ, ADDRESS=self.address, POD_ROOT=str(root), POD_FILES=str(self.files), BIN_DIR=str(bin_dir),
                     MODELS=str(manifests.ROOT / "models"), IMAGE=os.environ.get("CONCLAVE_TEST_IMAGE", ""), AS_USER=shlex.join(self.as_user))
        with open(self.log_path, "w") as log:
            self.process = STARTER.submit(subprocess.Popen, ["unshare", "--net", "--mount", "--propagation", "private", "/bin/bash", "-c", SCRIPT],
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=outer).result()
        if self.process.stdout.readline() != "unshared\n":
            raise AssertionError(f"{name} did not start: {self.log()}")
        # One hardware address for each address: a pod that takes over another's is found without waiting for ARP.
        subprocess.run(["/bin/bash", "-ec", f"ip link add {self.link} type veth peer name eth0 address 02:00:00:00:01:{number:02x} netns {self.process.pid}; "
                        f"ip link set {self.link} master br0; ip link set {self.link} up"], check=True)
        self.process.stdin.write("go\n")
        self.process.stdin.close()
        self.kubelet = Kubelet(self)
        if probes:
            self.kubelet.start()

    def mount_commands(self, objects, secrets, user, models):
        """Shell lines that mount the pod's volumes below its root."""
        lines = []
        volumes = {v["name"]: v for v in self.workload.pod["volumes"]}
        for mount in self.workload.container["volumeMounts"]:
            volume, where = volumes[mount["name"]], mount["mountPath"].lstrip("/")
            source = None
            if "configMap" in volume:
                source = self.write_files(mount["name"], manifests.config_map_data(objects, volume["configMap"]["name"]), user, 0o444)
            elif "secret" in volume:
                source = self.write_files(mount["name"], secrets[volume["secret"]["secretName"]], user, 0o440)
            elif "persistentVolumeClaim" in volume or "hostPath" in volume or models:
                source = models if where == "models" else None
            lines.append(f"mkdir -p {where}")
            if source is not None:
                lines.append(f"mount --bind {source} {where}; mount -o remount,bind,ro {where}")
            elif "emptyDir" in volume and where != "dev/shm":
                lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {where}")
        return "\n".join(lines) + "\n"

    def write_files(self, name, data, user, mode):
        folder = self.files / name
        folder.mkdir()
        folder.chmod(0o755)
        for key, text in data.items():
            path = folder / key
            path.write_text(text)
            os.chown(path, 0, user)
            path.chmod(mode)
        return folder

    def log(self):
        return self.log_path.read_text()

    def warnings(self):
        found = []
        for line in self.log().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                found.append(line)
                continue
            if entry["level"] in ("warn", "error"):
                found.append(line)
        return found

    def probe(self, kind):
        """Whether a probe of the container succeeds now."""
        http = self.workload.container[kind]["httpGet"]
        (port,) = [p["containerPort"] for p in self.workload.container["ports"] if p["name"] == http["port"]]
        try:
            timeout = self.workload.container[kind]["timeoutSeconds"]
            with urllib.request.urlopen(f"http://{self.address}:{port}{http['path']}", timeout=timeout) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def wait_for(self, what, others=()):
        """Until its kubelet says so: "started", "ready" or "alive". Fails at once when this pod or one of `others` ends, or would
        be killed for a probe."""
        until = time.monotonic() + DEADLINE_S
        while not getattr(self.kubelet, what):
            for pod in (self, *others):
                if pod.process.poll() is not None:
                    raise AssertionError(f"{pod.name} ended with {pod.process.returncode}: {pod.log()[-2000:]}")
                if pod.kubelet.verdict:
                    raise AssertionError(f"{pod.name} would be killed for its {pod.kubelet.verdict}: {pod.log()[-2000:]}")
            if time.monotonic() > until:
                raise AssertionError(f"{self.name} is not {what}: {self.log()[-2000:]}")
            time.sleep(0.1)

    def stop(self):
        """As a kubelet does: the hook, TERM, and KILL when the grace period is over. Returns whether it ended by itself
        with exit code 0."""
        grace = self.workload.pod["terminationGracePeriodSeconds"]
        hook = self.workload.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        self.kubelet.end()
        begin = time.monotonic()
        if hook:  # in the container
            inside = ["nsenter", "--target", str(self.process.pid), "--mount", "--net", "--root", "--wd", *self.as_user, "/usr/bin/env", "-i", *hook]
            subprocess.run(inside, check=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=grace - (time.monotonic() - begin)) == 0
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def kill(self):
        self.kubelet.end()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def listening_ports(self):
        """TCP ports that the pod listens on."""
        ports = set()
        for line in pathlib.Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].partition(":")[2], 16))
        return ports
