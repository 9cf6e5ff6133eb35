"""Where an engine keeps what it knows, and the environment it runs in.

Against Google Cloud everything is as the person configured it; without a configured backend, state is in a folder of
this machine. With the test double, state, plugins and the stand-in for the cloud are in a folder of their own, whatever
is configured: a double must never touch the state of a real stack.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from spec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DOUBLE_MODULE = "tests.builders.gcp_double"
DOUBLE_CLOUD, DOUBLE_READS_ONLY = "GKR_DOUBLE_CLOUD", "GKR_DOUBLE_READS_ONLY"
"""Environment of the double: its folder; and, if set, that it changes nothing on a test bed."""
_AT_THE_END = {"PULUMI_EXPERIMENTAL": "true", "PULUMI_SKIP_CHECKPOINTS": "true"}
"""The double's state is written when the engine ends, also after an error or an interrupt, and not after each of 150
steps, which is most of the time of a platform. An engine that is killed loses what it did: with a double that is cheap.
"""
GCP_PLUGIN, KUBERNETES_PLUGIN = "pulumi-resource-gcp", "pulumi-resource-kubernetes"


@dataclass(frozen=True)
class Place:
    """One backend with its engine."""

    folder: Path
    """What is kept on this machine: state, unless a backend is configured, and the double's things."""
    double: bool
    reads_only: bool = False
    """The double changes nothing on a test bed: for a preview that has to bring up what is below it."""

    @property
    def home(self) -> Path:
        """Plugins and credentials of the double's engine, and the link to the binary for every engine."""
        return self.folder / "home"

    @property
    def cloud(self) -> Path:
        """Stands for Google Cloud."""
        return self.folder / "cloud"

    def work(self, stack: str) -> Path:
        """Folder of a stack's settings file: the repository's own, but for the double."""
        return self.folder / "work" / stack if self.double else ROOT

    def environment(self) -> dict[str, str]:
        """What the engine's process gets besides this one's own environment."""
        own = {"PULUMI_SKIP_UPDATE_CHECK": "true", "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "true"}
        if not self.double:
            return own if _has_backend() else {**own, "PULUMI_BACKEND_URL": _backend(self.folder), **_passphrase()}
        return {
            **own,
            "PULUMI_BACKEND_URL": _backend(self.folder),
            "PULUMI_HOME": str(self.home),
            "PULUMI_CONFIG_PASSPHRASE_FILE": str(self._own_passphrase()),
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            **_AT_THE_END,
            DOUBLE_CLOUD: str(self.cloud),
            DOUBLE_READS_ONLY: "yes" if self.reads_only else "",
        }

    def prepare(self, *, pulumi: Path, kubernetes: Path | None) -> None:
        """Lay out what the engine needs; idempotent. `kubernetes`: the provider's binary, where it was built here."""
        (self.home / "bin").mkdir(parents=True, exist_ok=True)
        _link(self.home / "bin" / "pulumi", pulumi)
        if not self.double:
            return
        self.cloud.mkdir(parents=True, exist_ok=True)
        _write_plugin(_plugin_folder(self.home, "gcp", "pulumi_gcp") / GCP_PLUGIN)
        if kubernetes is not None:
            _link(_plugin_folder(self.home, "kubernetes", "pulumi_kubernetes") / KUBERNETES_PLUGIN, kubernetes)

    def copied(self, folder: Path) -> Place:
        """The same stacks in another folder, in which a preview can bring up what is missing."""
        if self.folder.is_dir():
            shutil.copytree(self.folder, folder, symlinks=True, dirs_exist_ok=True)
        return Place(folder, double=self.double, reads_only=True)

    def _own_passphrase(self) -> Path:
        """Nothing real is encrypted with it, yet nothing is in clear text either."""
        path = self.folder / "passphrase"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(16), encoding="utf-8")
        return path


def place(*, double: bool) -> Place:
    """The usual place: GKR_STACKS, else a folder in the user's state folder."""
    own = os.environ.get("GKR_STACKS")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gkr" / "stacks"
    folder = Path(own).absolute() if own else state
    return Place(folder / ("double" if double else "cloud"), double=double)


def _backend(folder: Path) -> str:
    state = folder / "state"
    state.mkdir(parents=True, exist_ok=True)
    return f"file://{state}"


def _has_backend() -> bool:
    """Whether the person chose a backend: by environment, in the project, or by logging in."""
    if os.environ.get("PULUMI_BACKEND_URL"):
        return True
    home = Path(os.environ.get("PULUMI_HOME") or Path.home() / ".pulumi")
    try:
        return bool(json.loads((home / "credentials.json").read_text(encoding="utf-8")).get("current"))
    except (OSError, ValueError):
        return False


def _passphrase() -> dict[str, str]:
    if "PULUMI_CONFIG_PASSPHRASE" in os.environ or "PULUMI_CONFIG_PASSPHRASE_FILE" in os.environ:
        return {}
    raise ConfigError(
        "no backend is configured, and the state in a folder of this machine would have no passphrase",
        hint="log in with pulumi login gs://BUCKET, or set PULUMI_CONFIG_PASSPHRASE, which encrypts secrets",
    )


def _plugin_folder(home: Path, name: str, package: str) -> Path:
    """The engine looks for exactly the version that the SDK names."""
    from importlib.metadata import version

    folder = home / "plugins" / f"resource-{name}-v{version(package)}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_plugin(path: Path) -> None:
    text = f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m {DOUBLE_MODULE} "$@"\n'
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o755)
    fresh.replace(path)


def _link(path: Path, target: Path) -> None:
    if path.is_symlink() and path.readlink() == target:
        return
    path.unlink(missing_ok=True)
    path.symlink_to(target)
