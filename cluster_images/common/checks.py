"""What every image promises, checked inside the image with its own Python: the base of the smoke tests.

Standard library only at import: a check that cannot import what it checks says so instead of ending the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CODE = Path("/opt/gkr/code")
OLDEST_GLIBC = (2, 35)
"""The NCCL plugins of A3 Mega are built against it."""
_SECRETS = Path("/run/secrets")


def run(checks: Sequence[tuple[str, Callable[[], str]]]) -> int:
    """Run every check, print a line for each, and give the exit code: 1 if any failed."""
    failed = 0
    for name, check in checks:
        started = time.monotonic()
        try:
            verdict, text = "ok", check()
        except Exception as error:  # noqa: BLE001 - one failed check must not hide the others
            verdict, text, failed = "FAILED", f"{type(error).__name__}: {error}", failed + 1
        sys.stdout.write(f"{verdict:6} {name:16} {time.monotonic() - started:5.1f} s  {text}\n")
        sys.stdout.flush()
    return 1 if failed else 0


def shell(command: str, *, login: bool = False, deadline_seconds: float = 300) -> str:
    """Run it as KubeRay runs a container's command: `bash -c`, or `bash -lc` in its older versions."""
    done = subprocess.run(
        ["/bin/bash", "-lc" if login else "-c", "--", command],
        capture_output=True, text=True, check=False, timeout=deadline_seconds,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command!r} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-800:]}")
    return done.stdout.strip()


def user() -> str:
    """Not root, cannot become it, and cannot change what it runs."""
    if os.getuid() == 0:
        raise RuntimeError("runs as root")
    for path in (CODE, Path("/opt/gkr/venv"), Path("/etc")):
        if os.access(path, os.W_OK):
            raise RuntimeError(f"{path} can be written by uid {os.getuid()}")
    (Path.home() / ".smoke").write_text("")
    (Path.home() / ".smoke").unlink()
    return f"uid {os.getuid()}, home {Path.home()}"


def system() -> str:
    """Python of the locks, the C library of the NCCL plugins, and what KubeRay's probes execute."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the base decides the version, and this is its check
        raise RuntimeError(f"Python {sys.version.split()[0]} is older than 3.11")
    glibc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    if tuple(int(part) for part in glibc.split()[-1].split(".")[:2]) < OLDEST_GLIBC:
        raise RuntimeError(f"{glibc} is older than 2.35")
    missing = [name for name in ("bash", "wget", "ray", "gcc", "g++", "ps") if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"not on PATH: {', '.join(missing)}")
    for login in (False, True):
        found = shell("command -v ray && command -v gkr", login=login).split()
        if found != ["/opt/gkr/venv/bin/ray", "/opt/gkr/code/bin/gkr"]:
            raise RuntimeError(f"a {'login' if login else 'plain'} shell finds {found}")
    return f"Python {sys.version.split()[0]}, {glibc}"


def no_secret() -> str:
    """Nothing of the build's secret mounts is left."""
    left = [str(path) for path in _SECRETS.rglob("*") if path.is_file()] if _SECRETS.is_dir() else []
    named = [name for name in os.environ if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy")]
    if left or named:
        raise RuntimeError(f"left over from the build: {left + named}")
    return "none left"


def imports(*packages: str) -> Callable[[], str]:
    """Every module of these packages imports."""
    code = (
        "import importlib, pathlib, sys\n"
        "names = ['.'.join(path.with_suffix('').parts).removesuffix('.__init__')\n"
        "         for package in sys.argv[1:] for path in sorted(pathlib.Path(package).rglob('*.py'))]\n"
        "names = [name for name in names if not name.endswith('__main__')]\n"
        "[importlib.import_module(name) for name in names]\n"
        "print(len(names))"
    )

    def check() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *packages], cwd=CODE, capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-800:])
        return f"{done.stdout.strip()} modules of {', '.join(packages)}"

    return check


def torch() -> str:
    """torch computes, and brings CUDA and NCCL."""
    import torch as library

    if not bool(library.isfinite(library.nn.Linear(8, 8)(library.ones(4, 8))).all()):
        raise RuntimeError("a linear layer gives no finite numbers")
    nccl = ".".join(str(part) for part in library.cuda.nccl.version())
    return f"torch {library.__version__}, CUDA {library.version.cuda}, NCCL {nccl}"


def compiled() -> str:
    """A module compiled as `train.compile` does it: needs the compilers and the headers of the image."""
    import torch as library

    if not Path("/usr/include/python3.11/Python.h").is_file():
        raise RuntimeError("no Python.h: triton builds its launchers with it")
    model = library.nn.Linear(8, 8)
    with library.no_grad():
        plain = model(library.ones(4, 8))
        model.compile()
        if not library.allclose(model(library.ones(4, 8)), plain):
            raise RuntimeError("the compiled module gives other numbers")
    return "one module"


def ray() -> str:
    """A head as KubeRay starts it, its probes as KubeRay executes them, and one task."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        options = "--head --node-ip-address=127.0.0.1 --num-cpus=1 --object-store-memory=100000000 --port=6399"
        shell(
            f"ulimit -n 65536; ray start {options} --dashboard-agent-listen-port=52365 --temp-dir={folder}", login=True
        )
        try:
            probe = "wget --tries 1 -T 2 -q -O- http://127.0.0.1:{port}/{path} | grep success"
            deadline = time.monotonic() + 90
            for port, path in ((52365, "api/local_raylet_healthz"), (8265, "api/gcs_healthz")):
                _until(probe.format(port=port, path=path), deadline=deadline)
            code = "import ray; ray.init('127.0.0.1:6399'); print(ray.get(ray.remote(lambda: 7).remote()))"
            if shell(f'python -c "{code}"').split()[-1] != "7":
                raise RuntimeError("a task gave another result")
        finally:
            shell("ray stop --force --grace-period 5")
    return "head, both probes, a task"


def _until(command: str, *, deadline: float) -> None:
    while True:
        try:
            shell(command, deadline_seconds=30)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def fabric(kind: str) -> Callable[[], str]:
    """In a GPU pod: what a node of `kind` (a3-mega, a3-ultra) mounts meets the image."""
    profile, plugin = {
        "a3-mega": ("/usr/local/nvidia/lib64/nccl-env-profile.sh", "/usr/local/nvidia/lib64/libnccl-net.so"),
        "a3-ultra": ("/usr/local/gib/scripts/set_nccl_env.sh", "/usr/local/gib/lib64/libnccl-net.so"),
    }[kind]

    def check() -> str:
        for path in (profile, plugin):
            if not os.access(path, os.R_OK):
                raise RuntimeError(f"{path} cannot be read: the installer's DaemonSet or the pod's mounts are missing")
        found = dict(line.split("=", 1) for line in shell("env").splitlines() if "=" in line)
        if found.get("GKR_FABRIC") != kind:
            raise RuntimeError(
                f"a shell of the image takes this node for {found.get('GKR_FABRIC') or 'one without fabric'}"
            )
        shell(f"python -c \"import ctypes; ctypes.CDLL('{plugin}')\"")
        shell("python -c \"import ctypes; ctypes.CDLL('libcuda.so.1')\"")
        devices = shell('python -c "import torch; print(torch.cuda.device_count())"')
        if devices != "8":
            raise RuntimeError(f"{devices} GPUs are visible, not 8")
        return f"{kind}: profile, plugin, driver and {devices} GPUs"

    return check
