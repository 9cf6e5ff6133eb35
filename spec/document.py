"""From YAML text to a validated document, or to every reason against it at once.

Promises: an error names file, line, column, the source line, the near key and the field's help; a value keeps its
origin. No I/O: texts and names come in. Knows nothing about experiments; that is `spec.load`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from spec.fields import SYNONYMS, fields_at, help_text
from spec.nodes import Mark, Node, OriginKind, Path, render_path
from spec.plan import Origin
from spec.problems import DocumentError, Problem, RemedyError, did_you_mean

M = TypeVar("M", bound=BaseModel)

_WANTED = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number", "bool_type": "true or false", "bool_parsing": "true or false", "string_type": "a text",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping of keys", "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys", "finite_number": "a finite number",
}  # fmt: skip
_LIMITS = {
    "greater_than_equal": ("at least", "ge"), "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"), "less_than": ("below", "lt"),
}  # fmt: skip


@dataclass(frozen=True)
class Located(Generic[M]):
    """A document and the places its values were written at."""

    value: M
    tree: Node

    def mark(self, path: Path, *, key: bool = False) -> Mark:
        """The place of the deepest written part of `path`; of its key rather than its value if asked."""
        node, reached = self.tree.find(path)
        wants_key = (key or reached != path or node.kind != "scalar") and node.key_mark is not None
        return node.key_mark if wants_key and node.key_mark is not None else node.mark

    def where(self, path: Path) -> str:
        """`file:line:column`, or the flag."""
        return self.mark(path).where

    def problem(self, path: Path, message: str, *, hint: str = "", key: bool = False) -> Problem:
        """A problem placed at `path`, with the field's help."""
        return self.mark(path, key=key).problem(
            message, path=render_path(path), hint=hint, help_text=help_text(type(self.value), path)
        )

    def origins(self) -> list[Origin]:
        """Every effective value with where it comes from. Secrets cannot be here: a document holds them by name."""
        return list(_origins(self.value.model_dump(mode="json"), self.tree, ()))


def validate(tree: Node, *, model: type[M], raw_keys: Iterable[str] = ()) -> Located[M]:
    """The document of `model` that the tree describes. Below `raw_keys` scalars are texts exactly as written."""
    problems: list[Problem] = []
    tree = replace(
        tree,
        entries={
            **tree.entries,
            **{key: _raw(tree.entries[key], (key,), problems) for key in raw_keys if key in tree.entries},
        },
    )
    try:
        value = model.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        problems.extend(_problems(error, tree, model))
    else:
        if not problems:
            return Located(value, tree)
    raise DocumentError(sorted(problems, key=lambda one: (one.file, one.line, one.column)))


def _raw(node: Node, path: Path, problems: list[Problem]) -> Node:
    if node.kind == "mapping":
        return replace(node, entries={key: _raw(one, (*path, key), problems) for key, one in node.entries.items()})
    if node.kind == "sequence" or node.quoted or isinstance(node.value, str):
        return node
    if node.value is None and not node.text:
        return node
    if node.value is None or isinstance(node.value, bool):
        where = render_path(path)
        message = f"{where} is the YAML value {node.text}, which has no text form of its own"
        problems.append(node.mark.problem(message, path=where, hint=f'quote it: "{node.text}"'))
    return replace(node, value=node.text)


def _problems(error: ValidationError, tree: Node, model: type[BaseModel]) -> list[Problem]:
    by_path: dict[Path, list[Any]] = {}
    for one in error.errors(include_url=False):
        by_path.setdefault(_document_path(one["loc"], tree, one["type"]), []).append(one)
    return [_translate(path, found, tree, model) for path, found in by_path.items()]


def _document_path(location: tuple[int | str, ...], tree: Node, kind: str) -> Path:
    """The error's location without the names of union branches and validators, which are not in the document."""
    path: Path = ()
    here = tree
    for index, part in enumerate(location):
        following = here.child(part)
        if following is not None:
            here, path = following, (*path, part)
        elif kind == "missing" and index == len(location) - 1:
            return (*path, part)
    return (*path, "kind") if kind == "union_tag_invalid" else path


def _translate(path: Path, errors: list[Any], tree: Node, model: type[BaseModel]) -> Problem:
    first = errors[0]
    kind = first["type"]
    node, reached = tree.find(path)
    shown, parent = render_path(path), f"in {render_path(path[:-1])}" if path[:-1] else "at the top level"
    help_line = help_text(model, path)
    mark = node.mark
    if kind == "missing":
        at = node.key_mark or node.mark
        return at.problem(
            f'missing key "{path[-1]}" {parent}', path=shown, hint=f"add {path[-1]}: ...", help_text=help_line
        )
    if kind == "extra_forbidden":
        keys = set(fields_at(model, path[:-1]))
        hint = did_you_mean(str(path[-1]), keys, aliases=SYNONYMS, noun="keys here")
        guess = hint.split('"')[1] if hint.startswith("did") else ""
        help_line = help_text(model, (*path[:-1], guess)) if guess else ""
        at = node.key_mark or mark
        return at.problem(f'unknown key "{path[-1]}" {parent}', path=shown, hint=hint, help_text=help_line)
    if kind == "value_error":
        reason = first["ctx"]["error"]
        hint = reason.hint if isinstance(reason, RemedyError) else ""
        at = node.key_mark if node.kind != "scalar" and node.key_mark else mark
        return at.problem(f"{shown}: {reason}" if shown else str(reason), path=shown, hint=hint, help_text=help_line)
    assert reached == path
    message, hint = _type_message(errors, node)
    return mark.problem(f"{shown or 'the file'}: {message}", path=shown, hint=hint, help_text=help_line)


def _type_message(errors: list[Any], node: Node) -> tuple[str, str]:
    first = errors[0]
    kind: str = first["type"]
    written = (
        f'the text "{node.text}"'
        if isinstance(node.value, str)
        else node.text
        if node.kind == "scalar"
        else f"a {node.kind}"
    )
    if kind in _LIMITS:
        word, key = _LIMITS[kind]
        return f"must be {word} {first['ctx'][key]}, got {node.text}", ""
    if kind == "literal_error":
        allowed = [one.strip("'") for one in str(first["ctx"]["expected"]).replace(" or ", ", ").split(", ")]
        return _not_among(allowed, node, written)
    if kind == "union_tag_invalid":
        return _not_among(first["ctx"]["expected_tags"].replace("'", "").split(", "), node, written)
    wanted = list(dict.fromkeys(_WANTED[one["type"]] for one in errors if one["type"] in _WANTED))
    if not wanted:
        return f"{first['msg'][0].lower()}{first['msg'][1:]}, got {written}", ""
    if node.kind == "scalar" and node.value is None and not node.text:
        return f"is empty; expected {' or '.join(wanted)}", "give a value or remove the key"
    hint = ""
    if wanted == ["a text"]:
        hint = f'quote it: "{node.text}"' if node.kind == "scalar" else ""
    elif isinstance(node.value, str) and _is_number(node.text) and wanted[0].endswith("number"):
        hint = f"remove the quotes: {node.text}" if node.quoted else f"write {node.text.lstrip('0') or '0'}"
    return f"expected {' or '.join(wanted)}, got {written}", hint


def _not_among(allowed: list[str], node: Node, written: str) -> tuple[str, str]:
    hint = did_you_mean(node.text, allowed, noun="choices")
    return f"expected one of {', '.join(allowed)}, got {written or 'nothing'}", hint


def _is_number(text: str) -> bool:
    return text.removeprefix("-").replace(".", "", 1).isdecimal()


def _origins(value: Any, tree: Node | None, path: Path) -> Iterable[Origin]:
    children: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(value, list):
        children = list(enumerate(value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if children:
        for part, one in children:
            below = (
                tree if tree is None or tree.kind == "scalar" else tree.child(part)
            )  # `cluster: a` stands for a list of one
            yield from _origins(one, below, (*path, part))
        return
    origin: OriginKind = tree.mark.origin if tree else "default"
    text = "" if value is None else json.dumps(value) if isinstance(value, (bool, dict, list)) else str(value)
    yield Origin(path=render_path(path), value=text, origin=origin, where=tree.mark.where if tree else "")
