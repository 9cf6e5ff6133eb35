"""A base image from Debian's archive, for machines that reach no image registry: `BASE=local`.

The same distribution as the pinned base, made by debootstrap and kept in buildah's storage, so the second build takes
it from there. It holds no archive address: the caller's own sources are a secret mount of the commands that install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from spec.errors import ConfigError, GkrError
from tools.image_commands import LOCAL_PREFIX, Engine

SUITE = "bookworm"
REFERENCE = f"{LOCAL_PREFIX}/base:debian-{SUITE}-1"
"""The number grows when what is done here changes, so that an older one is not taken for it."""
DEADLINE_SECONDS = 1800
_DOCUMENTS = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")
_EXCLUDES = "".join(f"path-exclude /{path}/*\n" for path in _DOCUMENTS)


def apt_sources(targets: str) -> str:
    """One-line apt sources of our suite from `apt-get indextargets`; empty where this machine has none."""
    lines: list[str] = []
    for target in targets.splitlines():
        uri, release, component = target.split()
        if release == SUITE or release.startswith(f"{SUITE}-"):
            lines.append(f"deb {uri} {release} {component}\n")
    return "".join(dict.fromkeys(lines))


def host_sources() -> str:
    """What this machine installs Debian packages from; empty on another distribution."""
    if shutil.which("apt-get") is None:
        return ""
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return apt_sources(done.stdout) if done.returncode == 0 else ""


def local_base(*, engine: Engine, say: Callable[[str], None]) -> str:
    """The reference of the local base, made if it is not there yet (about a minute)."""
    if engine != "buildah":
        raise ConfigError(
            f"BASE=local is made with buildah, and this build uses {engine}",
            hint="add --engine buildah, or leave BASE away where docker reaches a registry",
        )
    have = subprocess.run(["buildah", "images", "-q", REFERENCE], capture_output=True, check=False, timeout=60)
    if have.returncode == 0:
        return REFERENCE
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        raise ConfigError("BASE=local needs root on Linux: debootstrap changes its root", hint="or BASE=REFERENCE")
    if shutil.which("debootstrap") is None:
        raise ConfigError("BASE=local needs debootstrap, which is not on PATH", hint="apt-get install debootstrap")
    say(f"making a base of Debian {SUITE} with debootstrap, once: about a minute")
    with tempfile.TemporaryDirectory(prefix="gkr-base-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "root"
        mirror = next((line.split()[1] for line in host_sources().splitlines()), "")
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, str(root)]
        _run([*command, mirror] if mirror else command)
        _trim(root)
        _commit(root)
    return REFERENCE


def _trim(root: Path) -> None:
    """What the slim images of Debian leave out as well, and every archive address."""
    for path in (*_DOCUMENTS, "var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / path, ignore_errors=True)
        (root / path).mkdir(parents=True, exist_ok=True)
    for path in (root / "var" / "log").rglob("*.log"):
        path.unlink()
    (root / "etc" / "apt" / "sources.list").unlink(missing_ok=True)
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "slim").write_text(_EXCLUDES)


def _commit(root: Path) -> None:
    container = _run(["buildah", "from", "scratch"]).strip()
    try:
        _run(["buildah", "add", "--quiet", container, str(root), "/"])
        _run(["buildah", "config", "--cmd", "bash", container])
        _run(["buildah", "commit", "--quiet", container, REFERENCE])
    finally:
        subprocess.run(["buildah", "rm", container], capture_output=True, check=False, timeout=120)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=DEADLINE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise GkrError(f"{command[0]} was not done after {DEADLINE_SECONDS} s") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise GkrError(f"{command[0]} failed (exit {done.returncode}):\n{tail}")
    return done.stdout
