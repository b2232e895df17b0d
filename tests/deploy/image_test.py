"""The image's recipe carried out (image.py), and the cluster run in what comes of it.

usage: image_test.py [cpu|cuda]...

Exits 77 (skipped) where there is no mmdebstrap, no right to chroot, or no mirror.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

import image
import manifests

BIN_DIR = pathlib.Path(os.environ["CONCLAVE_BIN_DIR"]).resolve()
# Stand in for CUDA's image, of which the stage ucx-cuda needs the headers, the runtime, and libraries to link against.
CUDA_WHEELS = ["nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvcc-cu12==12.9.86", "nvidia-nvml-dev-cu12==12.9.79"]
OF_THE_DRIVER = {"libcuda.so.1", "libnvidia-ml.so.1"}

SERVE = r"""
conclave up --model /opt/conclave/models/demo-m2 --attention 1 --experts 2 --run-dir /tmp/run --ready-file /tmp/ready >/tmp/up.log 2>&1 &
up=$!
while [ ! -s /tmp/ready ]; do kill -0 $up || { cat /tmp/up.log; exit 9; }; sleep 0.1; done
echo "user $(id -u):$(id -g)"
touch /opt/conclave/x 2>/dev/null && echo "the root can be written"
echo "answer $(conclave chat -m 'Count from 3 to 9.' | tr '\n' ' ')"
for pid in /proc/[0-9]*; do
  case "$(cat $pid/comm)" in conclave-expert|conclave-attent*)
    echo "ucx $(grep -o '/[^ ]*libucp[^ ]*' $pid/maps | sort -u | tr '\n' ' ')";;
  esac
done
conclave diag --json >/tmp/diag; echo "diag $?"
kill -TERM $up; wait $up; echo "ended $?"
"""


def skip(why):
    print("SKIPPED:", why, flush=True)
    sys.exit(77)


def expect(ok, what, *details):
    if not ok:
        print("FAILED:", what, *details, flush=True)
        sys.exit(1)
    print("ok:", what, flush=True)


def make_cuda(builder, scratch):
    """A root that has as much of CUDA's image as the recipe uses."""
    wheels = pathlib.Path(scratch, "wheels")
    got = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels), *CUDA_WHEELS],
                         capture_output=True, text=True)
    if got.returncode != 0:
        skip(f"CUDA's headers cannot be had: {got.stderr[-300:]}")
    root = pathlib.Path(scratch, "cuda")
    subprocess.run(["cp", "-a", "--reflink=auto", str(builder.images.get(image.RECIPE.arguments["DEBIAN"]) or builder.make_debian()), str(root)], check=True)
    cuda = root / "usr/local/cuda"
    stubs = cuda / "lib64/stubs"
    stubs.mkdir(parents=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                found = re.match(r"nvidia/\w+/(include/.+|lib/.+\.so.*)$", name)
                if found:
                    place = cuda / found.group(1).replace("lib/", "lib64/", 1)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(archive.read(name))
    (cuda / "lib64/libcudart.so").symlink_to("libcudart.so.12")
    # Libraries of the driver, to link against.
    for library, header, prefix in (("libcuda.so.1", "cuda.h", "cu"), ("libnvidia-ml.so.1", "nvml.h", "nvml")):
        names = sorted(set(re.findall(rf"\b({prefix}[A-Z]\w+)\s*\(", (cuda / "include" / header).read_text(errors="replace"))))
        # Those that the headers rename are asked for by their newer names.
        names = sorted(set(names) | {f"{n}_v2" for n in names} | {f"{n}_v3" for n in names})
        source = stubs / f"{library}.c"
        source.write_text("".join(f"void {n}(void) {{}}\n" for n in names if not n.endswith(("_v2_v2", "_v3_v3"))))
        subprocess.run(["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(stubs / library.removesuffix(".1")), str(source)], check=True)
    builder.images[image.RECIPE.arguments["CUDA"]] = root


def missing_libraries(made):
    """Libraries that something in the image names and that are not there."""
    listed = image.run_in(made, ["/bin/sh", "-c", "find /opt/conclave/bin /opt/ucx -type f | xargs ldd 2>/dev/null"])
    expect("libucp" in listed.stdout, "ldd has looked at the image", listed.stderr)
    return set(re.findall(r"^\s*(\S+) => not found", listed.stdout, re.MULTILINE))


def check(builder, name):
    made = builder.build(name)
    expect(made.user == "65532:65532", f"{name}: not root")
    expect(missing_libraries(made) == (OF_THE_DRIVER if name == "cuda" else set()), f"{name}: every library is there but the driver's")
    modules = {p.name for p in (made.root / "opt/ucx/lib/ucx").glob("*.so")}
    expect({"libuct_ib.so", "libuct_rdmacm.so"} <= modules, f"{name}: UCX has RDMA", modules)
    expect(("libuct_cuda.so" in modules) == (name == "cuda"), f"{name}: UCX has CUDA only where it should", modules)
    shown = image.run_container(made, json.loads(made.command))
    expect(shown.returncode == 0 and "Usage" in shown.stdout, f"{name}: the default command", shown.stderr)
    served = image.run_container(made, ["/bin/sh", "-c", SERVE])
    lines = served.stdout.splitlines()
    expect(served.returncode == 0 and "ended 0" in lines, f"{name}: conclave up starts and ends", served.stdout, served.stderr)
    expect("user 65532:65532" in lines and "the root can be written" not in lines, f"{name}: as its user, on a read-only root", lines)
    (answer,) = [line for line in lines if line.startswith("answer")]
    expect("3 4 5 6 7 8 9" in answer, f"{name}: a completion: {answer}")
    used = [line.split()[1:] for line in lines if line.startswith("ucx")]
    expect(len(used) == 3 and all(u == [u[0]] and u[0].startswith("/opt/ucx/lib/libucp.so") for u in used),
           f"{name}: worker and shards use the image's UCX", used)
    size = subprocess.run(["du", "-sm", str(made.root)], capture_output=True, text=True, check=True).stdout.split()[0]
    print(f"{name}: {size} MB", flush=True)
    return made


def main():
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        skip("needs root and mmdebstrap")
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        skip("no namespaces here")
    try:
        urllib.request.urlopen("http://deb.debian.org/debian/dists/bookworm/InRelease", timeout=30).close()
    except OSError as error:
        skip(f"no mirror of Debian: {error}")
    with tempfile.TemporaryDirectory(prefix="conclave-image-") as scratch:
        os.chmod(scratch, 0o755)
        builder = image.Builder(scratch, BIN_DIR, say=lambda line: print(line, flush=True))
        for name in sys.argv[1:] or ["cpu"]:
            if name == "cuda":
                make_cuda(builder, scratch)
            made = check(builder, name)
            # The pods of the manifests, in this root instead of the machine's.
            here = pathlib.Path(__file__).resolve().parent
            pods = subprocess.run([sys.executable, "-B", "pods_test.py", "Pods"], cwd=here, env=dict(os.environ, CONCLAVE_TEST_IMAGE=str(made.root)))
            expect(pods.returncode == 0, f"{name}: the demo's pods run in it")


if __name__ == "__main__":
    main()
