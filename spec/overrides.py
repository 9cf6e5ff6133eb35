"""`--set a.b=c`: one value changed from the command line, with its place kept so that an error points to the flag.

The path is dots and indexes (`learners[0].cluster`, `learners.0.cluster`), or an item of a list by its name
(`learners.east.cluster`). The value is YAML; the text is split at the first `=` only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import yaml

from spec.nodes import Mark, Node, Path, Source, read_tree, render_path
from spec.problems import DocumentError, Problem

_PART = re.compile(r"\[(?P<index>[^\]]+)\]|(?P<key>[^.\[\]]+)")


def apply_overrides(tree: Node, *, overrides: Iterable[str]) -> Node:
    """The tree with each override in turn; all that cannot be applied are reported together."""
    problems: list[Problem] = []
    for text in overrides:
        try:
            tree = _apply(tree, text)
        except DocumentError as error:
            problems.extend(error.problems)
    if problems:
        raise DocumentError(problems)
    return tree


def _apply(tree: Node, text: str) -> Node:
    mark = Mark(Source(text, f"--set {text}"), 1, 1, origin="flag")
    path_text, equals, value_text = text.partition("=")
    parts = [match["index"] or match["key"] for match in _PART.finditer(path_text)]
    if not equals or not parts or "".join(_PART.findall(path_text)[0]) == "":
        raise DocumentError([mark.problem("expected a.b=value", hint="for example --set train.batch=128")])
    return _put(tree, parts, (), _value(value_text, mark), mark)


def _value(text: str, mark: Mark) -> Node:
    try:
        node = read_tree(Source(f"value: {text}" if "\n" not in text else f"value:\n{text}", mark.source.file)).entries[
            "value"
        ]
    except DocumentError as error:
        raise DocumentError([mark.problem(one.message, hint=one.hint) for one in error.problems]) from None
    except yaml.YAMLError as error:
        raise DocumentError([mark.problem(f"not valid YAML: {error}")]) from None
    return _remark(node, mark)


def _remark(node: Node, mark: Mark) -> Node:
    entries = {key: _remark(one, mark) for key, one in node.entries.items()}
    return replace(
        node, mark=mark, key_mark=mark, entries=entries, items=tuple(_remark(one, mark) for one in node.items)
    )


def _put(node: Node | None, parts: list[str], done: Path, value: Node, mark: Mark) -> Node:
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if node is None or (node.kind == "scalar" and node.value is None):
        node = Node("mapping", mark, key_mark=mark)
    if node.kind == "sequence":
        index = _index(node, head, done, mark)
        items = list(node.items)
        items[index] = _put(items[index], rest, (*done, index), value, mark)
        return replace(node, items=tuple(items))
    if node.kind == "scalar":
        raise DocumentError(
            [
                mark.problem(
                    f"{render_path(done)} is the single value {node.text!r}; it has no {head}", path=render_path(done)
                )
            ]
        )
    changed = _put(node.entries.get(head), rest, (*done, head), value, mark)
    return replace(node, entries={**node.entries, head: changed})


def _index(node: Node, part: str, done: Path, mark: Mark) -> int:
    names = [str(name.value) if (name := one.child("name")) else "" for one in node.items]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(node.items):
        return int(part)
    known = ", ".join([*(one for one in names if one), *(str(index) for index in range(len(node.items)))])
    message = f"{render_path(done)} has no item {part!r}"
    raise DocumentError([mark.problem(message, path=render_path(done), hint=f"items: {known or 'none'}")])
