"""Reading the JSON of objects: what is missing reads as empty. Light, for `gkr ps`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]


def part(obj: Object, *keys: str) -> Object:
    """The mapping at a path."""
    for key in keys:
        obj = obj.get(key) or {}
    return obj


def items(obj: Object, *keys: str) -> Sequence[Object]:
    """The list of mappings at a path."""
    found: Sequence[Object] = part(obj, *keys[:-1]).get(keys[-1]) or ()
    return found


def text(obj: Object, *keys: str) -> str:
    """The text at a path."""
    return str(part(obj, *keys[:-1]).get(keys[-1]) or "")


def name_of(obj: Object) -> str:
    """Its name."""
    return text(obj, "metadata", "name")


def label(obj: Object, key: str) -> str:
    """One of its labels."""
    return text(obj, "metadata", "labels", key)
