"""The environment of a run's processes, and whether this machine has what they import."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from spec.errors import RefusedError

_FIXED = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
}
_MODULES = {
    "torch": "training",
    "ray": "training",
    "zmq": "services",
    "msgspec": "services",
    "safetensors": "training",
    "sklearn": "services",
}


def child_environment(caller: Mapping[str, str], *, plan_env: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, then the plan's, then what a run on one machine always needs.

    Children must import the same code as the supervisor, also when it runs from a checkout that is not installed.
    """
    environment = {**caller, **_FIXED, **plan_env}
    source = Path(__file__).resolve().parents[2]
    if source.name != "site-packages":
        former = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{source}:{former}" if former else f"{source}"
    return environment


def require_roles() -> None:
    """Refuse if training or services cannot be imported here; looks for the packages without importing them."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if not missing:
        return
    roles = sorted({_MODULES[name] for name in missing})
    raise RefusedError(
        f"this environment cannot run an experiment: {', '.join(missing)} not installed (roles {', '.join(roles)})",
        hint="`make setup` installs all roles; or pip install 'gkr[training,services,encoder]'",
    )
