"""Carries out deploy/docker/Dockerfile without Docker: each stage is a directory, and its literal RUN lines run in it
(chroot). Needs root, mmdebstrap and Debian's mirrors.

The stage `build` is not carried out: its result /out is the programs that are built already. Of the images that stages begin
with, Debian's is made by mmdebstrap, and others are handed in.
"""

import os
import pathlib
import re
import shutil
import subprocess

import dockerfile
import manifests

RECIPE = dockerfile.parse((manifests.ROOT / "deploy" / "docker" / "Dockerfile").read_text())
LEFT_OUT = dockerfile.ignores((manifests.ROOT / "deploy" / "docker" / "Dockerfile.dockerignore").read_text())
PROGRAMS = ["conclave", "conclave-router", "conclave-scheduler", "conclave-attention", "conclave-expert"]
# Where packages come from in Debian's own images.
SOURCES = """Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
RUN_TIMEOUT_S = 1500
PROXIES = ("http_proxy", "https_proxy", "no_proxy")

IN_ROOT = r"""
set -e
cd "$ROOT"
mkdir -p proc dev sys etc "./$WORK"
mount --rbind /dev dev
mount -t proc proc proc
touch etc/resolv.conf etc/hosts
mount --bind /etc/resolv.conf etc/resolv.conf
mount --bind /etc/hosts etc/hosts
exec chroot . /usr/bin/env -i "$@"
"""


class Failed(Exception):
    """A step of the recipe failed."""


def machine_settings():
    """How this machine's apt reaches its mirrors."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    return "".join(line + "\n" for line in dump.splitlines() if re.match(r"Acquire::[A-Za-z:-]+ ", line) and '""' not in line)


class Image:
    """What a stage has come to: its root and what its containers start with."""

    def __init__(self, root):
        self.root, self.env, self.user, self.work, self.command = root, {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, "0:0", "/", None


class Builder:
    """`scratch`: a directory for the roots. `programs`: where the built programs are. `images`: roots of base images by name."""

    def __init__(self, scratch, programs, images=None, say=print):
        self.scratch, self.programs, self.images, self.say = pathlib.Path(scratch), pathlib.Path(programs), dict(images or {}), say
        self.done = {}

    def make_debian(self):
        """The root that the name debian:12-slim stands for."""
        root = self.scratch / "debian"
        settings = self.scratch / "apt-settings"
        settings.write_text(machine_settings())
        self.say("mmdebstrap bookworm")
        made = subprocess.run(["mmdebstrap", "--variant=minbase", "--mode=root", f"--aptopt={settings}", "--dpkgopt=path-exclude=/usr/share/doc/*",
                               "--dpkgopt=path-exclude=/usr/share/man/*", "bookworm", str(root)],
                              capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
        if made.returncode != 0:
            raise Failed(f"mmdebstrap: {made.stderr[-2000:]}")
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
        (root / "etc/apt/sources.list.d/debian.sources").write_text(SOURCES)
        shutil.copy(settings, root / "etc/apt/apt.conf.d/99of-this-machine")
        self.images[RECIPE.arguments["DEBIAN"]] = root
        return root

    def build(self, name):
        """The image of a stage."""
        if name in self.done:
            return self.done[name]
        stage = RECIPE.stages[name]
        image = Image(self.scratch / f"stage-{name}")
        self.done[name] = image
        if name == "build":
            (image.root / "out").mkdir(parents=True)
            for program in PROGRAMS:
                shutil.copy(self.programs / program, image.root / "out" / program)
            return image
        if stage.base in RECIPE.stages:
            base = self.build(stage.base)
            image.env, image.user, image.work, image.command = dict(base.env), base.user, base.work, base.command
        else:
            if stage.base == RECIPE.arguments["DEBIAN"] and stage.base not in self.images:
                self.make_debian()
            base = Image(self.images[stage.base])
        subprocess.run(["cp", "-a", "--reflink=auto", str(base.root), str(image.root)], check=True)
        for instruction, rest in stage.steps:
            self.say(f"{name}: {instruction} {rest[:100]}")
            self.step(stage, image, instruction, rest)
        return image

    def step(self, stage, image, instruction, rest):
        if instruction == "WORKDIR":
            image.work = rest
            self.at(image, rest).mkdir(parents=True, exist_ok=True)
        elif instruction == "ENV":
            image.env.update(dockerfile.assignments(rest))
        elif instruction == "USER":
            image.user = rest
        elif instruction == "CMD":
            image.command = rest
        elif instruction == "COPY":
            ((origin, sources, target),) = dockerfile.Stage("", "", [(instruction, rest)]).copies()
            for source in sources:
                self.copy(manifests.ROOT if origin is None else self.build(origin).root, source.lstrip("/"), image, target, origin is None)
        elif instruction == "RUN":
            done = run_in(image, ["/bin/sh", "-c", rest], as_root=True)
            if done.returncode != 0:
                raise Failed(f"{stage.name}: {rest}: {done.stdout[-1500:]} {done.stderr[-3000:]}")

    @staticmethod
    def at(image, path):
        return image.root / (path.lstrip("/") if path.startswith("/") else f"{image.work.lstrip('/')}/{path}")

    def copy(self, top, source, image, target, of_context):
        """As COPY does: of a directory what is in it; of a file the file, into the target where that ends in a slash."""
        where = self.at(image, target)
        start = top / source
        if start.is_file():
            where = where / start.name if target.endswith("/") else where
            where.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(start, where)
            return

        def left_out(folder, names):
            if not of_context:
                return []
            return [n for n in names if LEFT_OUT((pathlib.Path(folder) / n).relative_to(top))]
        shutil.copytree(start, where, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def run_in(image, words, as_root=False, timeout=RUN_TIMEOUT_S):
    """Runs a step in an image's root, which it may change."""
    env = dict(image.env, **{k: os.environ[k] for k in PROXIES if k in os.environ})
    user = [] if as_root else ["setpriv", "--reuid", image.user.split(":")[0], "--regid", image.user.split(":")[1], "--clear-groups"]
    inner = [f"{k}={v}" for k, v in env.items()] + user + ["/bin/sh", "-c", 'cd "$0" && exec "$@"', image.work] + words
    return subprocess.run(["unshare", "--mount", "--propagation", "private", "/bin/bash", "-c", IN_ROOT, "in-root", *inner],
                          env=dict(os.environ, ROOT=str(image.root), WORK=image.work), stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=timeout)


CONTAINER = r"""
set -e
ip link set lo up
mount --bind "$ROOT" "$ROOT"
cd "$ROOT"
mount --rbind /dev dev
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -o remount,bind,ro "$ROOT"
exec chroot . setpriv --pdeathsig KILL --reuid "${RUN_AS%:*}" --regid "${RUN_AS#*:}" --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all /usr/bin/env -i "$@"
"""


def run_container(image, words, timeout=300):
    """Runs a command as a container of the image would: its user and environment, without capabilities, on a read-only root,
    with a /tmp, a network of its own and its own process numbers."""
    inner = [f"{k}={v}" for k, v in image.env.items()] + words
    return subprocess.run(["unshare", "--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "/bin/bash", "-c", CONTAINER,
                           "container", *inner],
                          env=dict(os.environ, ROOT=str(image.root), RUN_AS=image.user), stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=timeout)
