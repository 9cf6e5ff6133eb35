"""A resource as the rules see it, and what they say about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from spec.machines import CATALOGUE, Machine

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""What the engine writes for a value that is known only after an update."""
SECRET = "[secret]"  # noqa: S105
"""What the engine's preview writes for a secret."""

Severity = Literal["refuse", "warn"]


@dataclass(frozen=True)
class Resource:
    """One resource that a program declares."""

    type: str
    name: str
    inputs: Mapping[str, Any]
    protect: bool | None = None
    """None: not recorded (mocks do not see resource options)."""
    urn: str = ""

    def get(self, path: str) -> Any:
        """The input at a path such as `nodeConfig.guestAccelerators[0].type`; None if there is none."""
        return look(self.inputs, path)

    def each(self, path: str) -> list[Any]:
        """The items of a list input; a single value counts as one item."""
        return items(self.get(path))


@dataclass(frozen=True)
class Finding:
    """One thing that a rule objects to."""

    rule: str
    severity: Severity
    type: str
    name: str
    message: str
    """What is wrong and what it would cause."""
    remedy: str
    final: bool = False
    """A refusal that no label lifts: what is declared could not work."""

    def document(self) -> dict[str, str]:
        """The same for a program."""
        return {
            "rule": self.rule, "severity": self.severity, "resource": self.name, "type": self.type,
            "message": self.message, "remedy": self.remedy,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.severity}: {self.name} ({self.type}): {self.message} [{self.rule}]\n  hint: {self.remedy}"


@dataclass(frozen=True)
class Settings:
    """What the rules compare with. The defaults hold for a stack of which nothing else is known."""

    environment: str = ""
    """First part of the stack's name."""
    regions: frozenset[str] = frozenset()
    """Regions that resources may be in. Empty: any."""
    machine_types: frozenset[str] = field(
        default_factory=lambda: frozenset(row.machine_type for row in CATALOGUE if not row.unsupported)
    )
    machine_families: tuple[str, ...] = ("e2-", "n2-", "n2d-", "n4-", "c3-", "c3d-", "c4-")
    """Starts of names of CPU machines that are allowed besides the catalogue's."""
    labels: tuple[str, ...] = ()
    """Label keys that every resource with labels must carry; empty: any one label is enough."""
    protected_environments: tuple[str, ...] = ("prod",)
    throwaway_environments: tuple[str, ...] = ("dev", "local")
    registries: tuple[str, ...] = ()
    """Prefixes of our own registries, whose images must be given by digest; empty: every `-docker.pkg.dev` one that
    is not Google's own.
    """
    applies: bool = False
    """The change is about to be made for real, not only looked at."""
    engine: bool = True
    """The inputs come from the engine, which has masked the secrets; mocks do not mask."""

    @property
    def protected(self) -> bool:
        """Things of this environment must not be deleted by accident."""
        return self.environment in self.protected_environments

    @property
    def throwaway(self) -> bool:
        """Nothing in this environment is worth keeping."""
        return self.environment in self.throwaway_environments


Rule = Callable[[Resource, Settings], Iterator[Finding]]
_PART = re.compile(r'\["(?P<quoted>[^"]*)"\]|\[(?P<index>\d+)\]|(?P<key>[^.\[\]]+)')


def parts(path: str) -> list[str | int]:
    """`a.b[0]["c.d"]` in its keys and indices."""
    found: list[str | int] = []
    for match in _PART.finditer(path):
        if match["index"] is not None:
            found.append(int(match["index"]))
        else:
            found.append(match["quoted"] if match["quoted"] is not None else match["key"])
    return found


def look(value: Any, path: str) -> Any:
    """The value at a path, None where a part of the path is missing."""
    for part in parts(path):
        if isinstance(part, int):
            if not isinstance(value, list):
                return None
            sequence = cast("list[Any]", value)
            if part >= len(sequence):
                return None
            value = sequence[part]
        else:
            if not isinstance(value, Mapping):
                return None
            value = cast("Mapping[str, Any]", value).get(part)
    return value


def items(value: Any) -> list[Any]:
    """A list as it is, nothing as an empty one, anything else as a list of one."""
    if value is None:
        return []
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def texts(value: Any) -> list[str]:
    """The known texts in a value or list."""
    return [one for one in items(value) if isinstance(one, str) and one != UNKNOWN]


def is_set(value: Any) -> bool:
    """True of a value that is there, also if it is known only after the update."""
    return value not in (None, "", [], {}, False)


def finding(
    resource: Resource, rule: str, *, message: str, remedy: str, severity: Severity = "refuse", final: bool = False
) -> Finding:
    """A finding about this resource."""
    return Finding(rule, severity, resource.type, resource.name, message, remedy, final)


def machine_of(resource: Resource) -> Machine | None:
    """The catalogue row of a node pool's machine."""
    name = resource.get("nodeConfig.machineType")
    return next((row for row in CATALOGUE if row.machine_type == name), None)


def has_gpus(resource: Resource) -> bool:
    """True of a node pool whose machines carry GPUs."""
    row = machine_of(resource)
    return bool(resource.each("nodeConfig.guestAccelerators")) or (row is not None and row.gpus > 0)
