"""Help for the fields of documents: what a path means, which keys stand beside it.

Read from the models themselves, so that help, error texts and JSON Schema cannot disagree.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spec.nodes import Path

SYNONYMS: Mapping[str, str] = {
    "accelerator": "gpu", "accelerators": "gpu", "gpus": "gpu", "gpu_type": "gpu", "cpus": "cpu", "mem": "memory",
    "ram": "memory", "shm_size": "shm", "num_nodes": "nodes", "replicas": "nodes", "num_replicas": "replicas",
    "nprocs": "ranks", "workers": "ranks", "procs": "ranks", "envs": "env", "environment": "env",
    "env_variables": "env", "command": "run", "commands": "run", "entrypoint": "run", "workdir": "code",
    "working_dir": "code", "image_id": "image", "container": "image", "region": "cluster", "clusters": "cluster",
    "infra": "cluster", "dataset": "data", "regions": "learners", "roles": "groups", "lr": "learning_rate",
    "batch_size": "batch", "secret": "secrets", "priority_class": "priority",
}  # fmt: skip
"""Other tools' words, and common shorthands, for our fields."""


@dataclass(frozen=True)
class FieldHelp:
    """One field as a person may ask about it."""

    path: str
    type: str
    default: str
    """Empty when the field must be given."""
    text: str
    fields: tuple[tuple[str, str], ...] = ()
    """Keys below it, with the first sentence of their help."""


def fields_at(model: type[BaseModel], path: Path) -> Mapping[str, FieldInfo]:
    """The keys of the mapping at `path`; of all its kinds where it has several. None in other places."""
    annotation: Any = model
    for part in path:
        annotation = _below(annotation, part)
    return _fields(annotation)


def field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """The field that the last name in `path` belongs to."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    return fields_at(model, path[:-1]).get(str(path[-1])) if path else None


def help_text(model: type[BaseModel], path: Path) -> str:
    """The field's docstring on one line, with its path in front; empty for an unknown path."""
    field = field_at(model, path)
    if field is None or not field.description:
        return ""
    name = next(str(part) for part in reversed(path) if isinstance(part, str))
    return f"{name}: {' '.join(field.description.split())}"


def describe(model: type[BaseModel], path: Path) -> FieldHelp | None:
    """Everything known about the field at `path`; indexes and names inside lists may be left out."""
    annotation: Any = model
    field: FieldInfo | None = None
    for part in path:
        field = _fields(_item(annotation)).get(str(part))
        if field is None:
            return None
        annotation = field.annotation
    below = _fields(_item(annotation))
    keys = tuple((name, first_sentence(one.description or "")) for name, one in below.items())
    text = " ".join((field.description or "").split()) if field else " ".join((model.__doc__ or "").split())
    default = "" if field is None or field.is_required() else repr(field.get_default(call_default_factory=True))
    return FieldHelp(".".join(str(part) for part in path), type_name(annotation), "" if below else default, text, keys)


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence."""
    flat = " ".join(text.split())
    return flat.split(". ")[0].rstrip(".")


def type_name(annotation: Any) -> str:
    """A type as a person would say it."""
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "empty"}
    if get_origin(annotation) is Annotated:
        return type_name(get_args(annotation)[0])
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is Literal:
        return " | ".join(str(one) for one in get_args(annotation))
    if _is_union(annotation):
        return " | ".join(dict.fromkeys(type_name(one) for one in get_args(annotation) if one is not type(None)))
    if get_origin(annotation) in (list, tuple):
        return f"list of {type_name(get_args(annotation)[0])}"
    return "mapping" if get_origin(annotation) is dict or isinstance(annotation, type) else str(annotation)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)


def _arms(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _arms(get_args(annotation)[0])
    if _is_union(annotation):
        return [arm for one in get_args(annotation) for arm in _arms(one)]
    return [annotation]


def _fields(annotation: Any) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for one in _arms(annotation):
        if isinstance(one, type) and issubclass(one, BaseModel):
            fields |= {name: field for name, field in one.model_fields.items() if name not in fields}
    return fields


def _item(annotation: Any) -> Any:
    """The element type of a list or a mapping by name, else the annotation itself."""
    for arm in _arms(annotation):
        if get_origin(arm) is list:
            return get_args(arm)[0]
        if get_origin(arm) is dict:
            return get_args(arm)[1]
    return annotation


def _below(annotation: Any, part: str | int) -> Any:
    for arm in _arms(annotation):
        if isinstance(part, int) and get_origin(arm) in (list, tuple):
            return get_args(arm)[0]
        if isinstance(part, str) and get_origin(arm) is dict:
            return get_args(arm)[1]
        if isinstance(part, str) and isinstance(arm, type) and issubclass(arm, BaseModel) and part in arm.model_fields:
            return arm.model_fields[part].annotation
    return None
