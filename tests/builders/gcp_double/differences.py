"""Old inputs and new ones -> what changes and what that forces, by the table of `infra.review.fields`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from infra.review.fields import replaces
from tests.builders.gcp_double.schema import UNKNOWN

Kind = Literal["add", "delete", "update"]
SETS = frozenset({"enableComponents", "natIps", "sourceRanges", "members", "tags", "reservedPeeringRanges"})
"""Lists whose order means nothing to the provider."""


@dataclass(frozen=True)
class Difference:
    """One place that changes."""

    path: str
    kind: Kind
    forces: bool
    """A replacement."""

    @property
    def top(self) -> str:
        """The top-level input it is in."""
        return self.path.partition(".")[0].partition("[")[0]


def differences(resource_type: str, *, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Every place that changes, deepest first known."""
    places = _between(_given(old), _given(new), path="")
    return [Difference(path, kind, replaces(resource_type, path)) for path, kind in places]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith("__") and value is not None}


def _between(old: Any, new: Any, *, path: str) -> list[tuple[str, Kind]]:
    if old == new:
        return []
    if new == UNKNOWN or old is None or new is None or type(old) is not type(new):
        return [(path, "add" if old is None else "delete" if new is None else "update")]
    if isinstance(old, dict):
        before, after = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
        keys = sorted({*before, *after})
        return [one for key in keys for one in _between(before.get(key), after.get(key), path=_below(path, key))]
    if isinstance(old, list):
        return _lists(cast("list[Any]", old), cast("list[Any]", new), path=path)
    return [(path, "update")]


def _lists(old: list[Any], new: list[Any], *, path: str) -> list[tuple[str, Kind]]:
    if path.rpartition(".")[2] in SETS and sorted(map(repr, old)) == sorted(map(repr, new)):
        return []
    longest = max(len(old), len(new))
    padded = [(one + [None] * longest)[:longest] for one in (old, new)]
    each = enumerate(zip(*padded, strict=True))
    return [one for index, (before, after) in each for one in _between(before, after, path=f"{path}[{index}]")]


def _below(path: str, key: str) -> str:
    if "." in key or "/" in key:
        return f'{path}["{key}"]'
    return f"{path}.{key}" if path else key
