"""Values as Kubernetes takes them: quantities, whole seconds, and environment variables that survive kubelet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from spec.units import format_bytes

_SUFFIXES = ("", "k", "M", "G", "T", "P", "E")
LONGEST_SECONDS = 2**31 - 1
"""KubeRay keeps deadlines in 32 bits."""


def cpu(cores: float) -> str:
    """Cores as a quantity, at least a thousandth."""
    thousandths = max(1, round(cores * 1000))
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def memory(size: int) -> str:
    """Bytes as a quantity, exactly."""
    return format_bytes(size) if size % 1024 == 0 else str(size)


def canonical(amount: int, *, thousandths: bool = False) -> str:
    """A whole amount as the API server writes it back: where it keeps a custom resource in that form, any other would
    be a change in every preview.
    """
    suffixes = ["m", *_SUFFIXES] if thousandths else list(_SUFFIXES)
    while amount and amount % 1000 == 0 and len(suffixes) > 1:
        amount //= 1000
        del suffixes[0]
    return f"{amount}{suffixes[0] if amount else ''}"


def seconds(duration: float) -> int:
    """Whole seconds, not fewer; deadlines must be above zero."""
    return min(max(1, math.ceil(duration)), LONGEST_SECONDS)


def literal(value: str) -> str:
    """The value as kubelet must read it to hand over exactly this: it turns `$$` into `$` and expands `$(NAME)`."""
    return value.replace("$", "$$")


def env_list(
    literals: Mapping[str, str],
    *,
    fields: Mapping[str, str] | None = None,
    secret: str = "",
    secret_keys: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """A container's `env`, sorted by name: given values, fields of the pod, and keys of one Secret."""
    found: dict[str, dict[str, Any]] = {name: {"value": literal(value)} for name, value in literals.items()}
    for name in secret_keys:
        found[name] = {"valueFrom": {"secretKeyRef": {"key": name, "name": secret}}}
    for name, path in (fields or {}).items():
        found[name] = {"valueFrom": {"fieldRef": {"fieldPath": path}}}
    return [{"name": name, **found[name]} for name in sorted(found)]


def env_from(secrets: Iterable[str]) -> list[dict[str, Any]]:
    """A container's `envFrom`: all keys of each Secret; a later one wins."""
    return [{"secretRef": {"name": name}} for name in dict.fromkeys(secrets) if name]
