"""What a machine needs for a bed; a refusal names the two ways to go on without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from spec.errors import ConfigError, RefusedError
from tools.binaries import TOOLS, binary, build

PACKAGES: dict[str, str] = {
    "containerd": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/lib/cni/portmap": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "wget": "wget",
    "openssl": "openssl",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}
"""Program -> Debian package. `wget` and `buildah` serve pods: probes of Ray's pods, images."""
APT_SECONDS = 600.0
SYSTEM_PATH = ":/usr/sbin:/sbin"
"""Where a person's PATH may not look and programs for root lie."""
WAYS_OUT = "use any other cluster instead: `kind create cluster`, or KUBECONFIG=/path of one that you have"


def check(*, platform: str = sys.platform, user: int | None = None) -> None:
    """Refuse where a bed cannot be."""
    if platform != "linux":
        raise RefusedError(f"the one-node cluster needs Linux; this is {platform}", hint=WAYS_OUT)
    if (os.geteuid() if user is None else user) != 0:
        raise RefusedError("the one-node cluster needs root: it makes network namespaces and runs pods", hint=WAYS_OUT)
    overlay = any(line.split()[-1] == "overlay" for line in Path("/proc/filesystems").read_text().splitlines())
    if not overlay:
        raise RefusedError("this kernel has no overlay file system, which containers need", hint=WAYS_OUT)


def missing_packages(programs: Iterable[str] = PACKAGES) -> list[str]:
    """Debian packages of programs that are not on this machine."""
    path = f"{os.environ.get('PATH', '')}{SYSTEM_PATH}"
    return sorted({PACKAGES[program] for program in programs if shutil.which(program, path=path) is None})


def provide_packages(*, say: Callable[[str], None]) -> None:
    """Install what is missing, and say so."""
    packages = missing_packages()
    if not packages:
        return
    listed = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise ConfigError(
            f"programs are missing (Debian names: {listed})", hint="install them; there is no apt-get here"
        )
    say(f"installing Debian packages: {listed}")
    _apt("update")
    _apt("install", "--yes", "--no-install-recommends", *packages)
    left = missing_packages()
    if left:
        raise ConfigError(f"apt-get installed {listed}, but programs of {' '.join(left)} are still not found")


def _apt(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", "-q", *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", check=False, timeout=APT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"apt-get {arguments[0]} did not end within {APT_SECONDS:g} s") from None
    if done.returncode:
        tail = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise ConfigError(f"apt-get {' '.join(arguments)} failed:\n  {tail}", hint="install these packages yourself")


def provide_binaries(names: Iterable[str]) -> None:
    """Build the named tools where a binary is missing; the first time that takes minutes, and it says how many."""
    wanted = set(names)
    try:
        missing = [tool.name for tool in TOOLS if tool.name in wanted and not all(map(_is_built, tool.binaries))]
        if missing:
            build(missing)
    except SystemExit as error:
        raise ConfigError(str(error.code)) from None


def _is_built(name: str) -> bool:
    try:
        binary(name)
    except SystemExit:
        return False
    return True
