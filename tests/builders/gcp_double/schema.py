"""What the Google Cloud provider takes: read from the SDK's argument classes, so that it cannot differ from them.

The real provider refuses an unknown or missing key; mocks of the SDK do not, and a misspelt key in a dict reaches the
wire as it is. Values that are not known yet pass.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from pulumi._types import input_type_types

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""What the engine sends for a value that is known later."""
PACKAGE = "pulumi_gcp"
OWN_KEYS = frozenset({"__defaults", "__internal", "version", "pluginDownloadURL"})
"""Keys that the engine adds."""


class SchemaError(Exception):
    """Inputs that the provider does not take."""


def arguments(token: str) -> type[Any]:
    """The argument class of a resource type such as gcp:container/nodePool:NodePool."""
    package, module, name = token.split(":")
    if package != "gcp":
        raise SchemaError(f"{token} is not a type of Google Cloud")
    folder = importlib.import_module(f"{PACKAGE}.{module.split('/')[0]}")
    found = getattr(folder, f"{name}Args", None)
    if found is None:
        raise SchemaError(f"the SDK has no {token}")
    return cast("type[Any]", found)


def provider_arguments() -> type[Any]:
    """Of the provider itself."""
    return cast("type[Any]", importlib.import_module(f"{PACKAGE}.provider").ProviderArgs)


@cache
def types(arguments: type[Any]) -> Mapping[str, Any]:
    """Key as on the wire -> type."""
    return dict(input_type_types(arguments))


@cache
def required(arguments: type[Any]) -> frozenset[str]:
    """Keys, as on the wire, without which the class cannot be made."""
    names = dict(zip(inspect.signature(arguments).parameters, types(arguments), strict=True))
    parameters = inspect.signature(arguments).parameters.items()
    return frozenset(names[name] for name, one in parameters if one.default is inspect.Parameter.empty)


def faults(values: Mapping[str, Any], *, of: type[Any], where: str = "") -> list[tuple[str, str]]:
    """Everything wrong, as (path, reason)."""
    known = types(of)
    found = [
        (f"{where}{key}", f"the provider has no such input; {of.__name__} has {', '.join(sorted(known))}")
        for key in values
        if key not in known and key not in OWN_KEYS
    ]
    found += [(f"{where}{key}", "is required") for key in sorted(required(of)) if values.get(key) is None]
    for key, value in values.items():
        if key in known and value is not None:
            found += _faults_of(value, known[key], where=f"{where}{key}")
    return found


def _faults_of(value: Any, kind: Any, *, where: str) -> list[tuple[str, str]]:
    if value == UNKNOWN:
        return []
    kind = _plain(kind)
    origin = typing.get_origin(kind)
    if origin in (Sequence, list):
        if not isinstance(value, list):
            return [(where, f"is {_name(value)}, the provider takes a list")]
        inner = typing.get_args(kind)[0]
        each = enumerate(cast("list[Any]", value))
        return [one for index, item in each for one in _faults_of(item, inner, where=f"{where}[{index}]")]
    if origin in (Mapping, dict):
        if not isinstance(value, dict):
            return [(where, f"is {_name(value)}, the provider takes a mapping")]
        inner = typing.get_args(kind)[1]
        items = cast("dict[str, Any]", value).items()
        return [one for key, item in items for one in _faults_of(item, inner, where=f"{where}.{key}")]
    if isinstance(kind, type) and hasattr(kind, "__init__") and kind not in (str, int, float, bool, object):
        if not isinstance(value, dict):
            return [(where, f"is {_name(value)}, the provider takes fields")]
        return faults(cast("dict[str, Any]", value), of=kind, where=f"{where}.")
    return _scalar(value, kind, where=where)


def _scalar(value: Any, kind: Any, *, where: str) -> list[tuple[str, str]]:
    fits = {
        str: isinstance(value, str),
        bool: isinstance(value, bool),
        int: isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer(),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
    }
    return [] if fits.get(kind, True) else [(where, f"is {_name(value)}, the provider takes {kind.__name__}")]


def _plain(kind: Any) -> Any:
    """The type itself, of a union with its output and awaitable forms."""
    while typing.get_origin(kind) is typing.Union:
        kind = typing.get_args(kind)[0]
    return kind


def _name(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:60]
