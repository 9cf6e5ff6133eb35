"""A small validator of Kubernetes schemas: those of CRDs (structural) and the API server's own (OpenAPI v3).

Finds what the API server would refuse and, unlike it, what it would silently drop: fields that a schema does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "integer": (int,),
    "number": (int, float),
}  # fmt: skip


def problems(
    value: Any, schema: Mapping[str, Any], *, definitions: Mapping[str, Any] | None = None, path: str = ""
) -> Iterator[str]:
    """What is wrong with the value, each with its path."""
    known = definitions or {}
    schema = _resolved(schema, known)
    if value is None:
        if not schema.get("nullable"):
            yield f"{path}: null"
        return
    yield from _scalar(value, schema, path)
    if isinstance(value, dict):
        yield from _object(value, schema, known, path)
    if isinstance(value, list):
        items = schema.get("items")
        for index, one in enumerate(value):
            if items is not None:
                yield from problems(one, items, definitions=known, path=f"{path}[{index}]")


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without `$ref` and a lone `allOf`."""
    while True:
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
        elif len(schema.get("allOf", [])) == 1 and "properties" not in schema:
            schema = schema["allOf"][0]
        else:
            return schema


def _scalar(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    kind = schema.get("type")
    union = schema.get("x-kubernetes-int-or-string") or "oneOf" in schema
    if union:
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            yield f"{path}: {value!r} is neither a whole number nor text"
    elif kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path}: {value!r} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if isinstance(value, str) and "pattern" in schema and not _matches(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{path}: longer than {schema['maxLength']}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value) or value > schema.get("maximum", value):
            yield f"{path}: {value} is out of range"
        if schema.get("format") == "int32" and abs(value) > 2**31 - 1:
            yield f"{path}: {value} has more than 32 bits"
    if isinstance(value, (list, dict)) and len(value) > schema.get("maxItems", len(value)):
        yield f"{path}: more than {schema['maxItems']}"


def _matches(pattern: str, value: str) -> bool:
    """As the server's expressions do, where `(?i)` may stand behind the anchor."""
    flags = re.IGNORECASE if "(?i)" in pattern else re.NOFLAG
    return re.search(pattern.replace("(?i)", ""), value, flags) is not None


def _object(
    value: dict[str, Any], schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str
) -> Iterator[str]:
    properties = schema.get("properties", {})
    rest = schema.get("additionalProperties")
    open_end = schema.get("x-kubernetes-preserve-unknown-fields") or rest is True or not (properties or rest)
    for name, one in value.items():
        where = f"{path}.{name}" if path else name
        if name in properties:
            yield from problems(one, properties[name], definitions=definitions, path=where)
        elif isinstance(rest, dict):
            yield from problems(one, rest, definitions=definitions, path=where)
        elif not open_end:
            yield f"{where}: unknown field"
    for name in schema.get("required", []):
        if name not in value:
            yield f"{path}: {name} is missing"
