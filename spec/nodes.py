"""YAML text as a tree in which every value knows its place.

YAML 1.2 core rules, not 1.1's: `no`, `off`, `22:22` and `010` stay the texts they look like, `2e-4` is a number.
Refused, with the place: duplicate keys, tabs for indentation, tags, more than one document, an empty file. Anchors and
merge keys work; top-level `x-...` keys hold anchors and are dropped. Pure: text in, tree out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import yaml

from spec.problems import DocumentError, Problem, snippet

OriginKind = Literal["default", "recipe", "file", "flag", "facts"]
Value = str | int | float | bool | None
Path = tuple[str | int, ...]

_MERGE = "tag:yaml.org,2002:merge"
_CORE: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
    ),
    (_MERGE, r"^<<$", "<"),
)
_DEEPEST = 64  # levels; deeper ones would exhaust the stack of the parser
_MOST_NODES = 20_000  # a file a person writes is far below; nested aliases can make a small one explode


_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""What an escape can write and no program takes as an argument, a path or a variable: NUL, and half a character."""
_LONGEST_INT = 100  # digits; a longer one stays the text it is, and is no number to any field
_TOO_DEEP = f"nested deeper than {_DEEPEST} levels"
_FLATTEN = "a file here has a few levels; is it the right file?"


@dataclass(frozen=True)
class Source:
    """A text and the name it is known by."""

    text: str
    file: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@dataclass(frozen=True)
class Mark:
    """Where a value was written."""

    source: Source
    line: int
    column: int
    width: int = 1
    origin: OriginKind = "file"

    @property
    def where(self) -> str:
        return self.source.file if self.origin == "flag" else f"{self.source.file}:{self.line}:{self.column}"

    def problem(self, message: str, *, path: str = "", hint: str = "", help_text: str = "") -> Problem:
        """A problem at this place."""
        shown = snippet(self.source.lines, line=self.line, column=self.column, width=self.width)
        at_line, at_column = (0, 0) if self.origin == "flag" else (self.line, self.column)
        if self.origin == "flag":
            shown = ""
        return Problem(self.source.file, at_line, at_column, path, message, hint, help_text, shown)


@dataclass(frozen=True)
class Node:
    """One value: exactly one of scalar, mapping and sequence, told apart by `kind`."""

    kind: Literal["scalar", "mapping", "sequence"]
    mark: Mark
    key_mark: Mark | None = None
    """Where its key stands, for a value in a mapping."""
    value: Value = None
    text: str = ""
    """A scalar as it was written."""
    quoted: bool = False
    entries: dict[str, Node] = field(default_factory=dict[str, "Node"])
    items: tuple[Node, ...] = ()

    def child(self, part: str | int) -> Node | None:
        """The value under a key or an index."""
        if isinstance(part, int):
            return self.items[part] if self.kind == "sequence" and 0 <= part < len(self.items) else None
        return self.entries.get(part)

    def find(self, path: Path) -> tuple[Node, Path]:
        """The deepest node on the way to `path`, and how far it goes."""
        here: Node = self
        for depth, part in enumerate(path):
            following = here.child(part)
            if following is None:
                return here, path[:depth]
            here = following
        return here, path

    def plain(self) -> object:
        """The same as dicts, lists and scalars."""
        if self.kind == "mapping":
            return {key: one.plain() for key, one in self.entries.items()}
        return [one.plain() for one in self.items] if self.kind == "sequence" else self.value

    def leaves(self, path: Path = ()) -> Iterator[tuple[Path, Node]]:
        """All scalars and empty containers with their paths."""
        children: list[tuple[str | int, Node]] = [*self.entries.items(), *enumerate(self.items)]
        if not children:
            yield path, self
        for part, one in children:
            yield from one.leaves((*path, part))


def render_path(path: Sequence[str | int]) -> str:
    """`learners[0].groups[1].nodes`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_tree(source: Source, *, origin: OriginKind = "file") -> Node:
    """The tree of a one-document file whose top level is a mapping; every defect of the text is a DocumentError."""
    text = source.text.removeprefix("\ufeff")
    source = replace(source, text=text)
    start = Mark(source, 1, 1, origin=origin)
    try:
        loader = _CoreLoader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise DocumentError([_syntax_problem(error, source)]) from None
    except yaml.reader.ReaderError as error:
        place = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        mark = Mark(source, place, column)
        raise DocumentError(
            [mark.problem(f"character {error.character!r} is not allowed here", hint="remove it")]
        ) from None
    if loader.tagged:
        marks = [Mark(source, place.line + 1, place.column + 1, len(tag)) for tag, place in loader.tagged]
        raise DocumentError([_tag_problem(mark, tag) for mark, (tag, _) in zip(marks, loader.tagged, strict=True)])
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        raise DocumentError([Problem(source.file, 0, 0, "", "the file is empty", "start from `gkr init`")])
    builder = _Builder(source, origin)
    tree = builder.build(root, ())
    if tree.kind != "mapping":
        builder.problems.append(
            start.problem(f"the file holds a {tree.kind}, not a mapping of keys", hint="start from `gkr init`")
        )
    if builder.problems:
        raise DocumentError(builder.problems)
    return replace(tree, entries={key: one for key, one in tree.entries.items() if not key.startswith("x-")})


def overlay(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings merge key by key, everything else is replaced whole."""
    if base.kind != "mapping" or over.kind != "mapping":
        return over
    merged = dict(base.entries)
    for key, one in over.entries.items():
        merged[key] = overlay(merged[key], one) if key in merged else one
    return replace(over, entries=merged)


class _CoreLoader(yaml.SafeLoader):
    """Composes nodes by the YAML 1.2 core schema; constructs nothing, and remembers every explicit tag."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tagged: list[tuple[str, yaml.Mark]] = []
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = cast("yaml.NodeEvent", self.peek_event())  # pyright: ignore[reportUnknownMemberType]
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            self.tagged.append((str(tag), cast("yaml.Mark", event.start_mark)))
        if self._depth >= _DEEPEST:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


_CoreLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _CORE:
    _CoreLoader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        _tag, re.compile(_pattern), ["" if c == "\0" else c for c in _first]
    )


class _Builder:
    """Turns composed YAML nodes into our tree; collects every problem instead of stopping at the first."""

    def __init__(self, source: Source, origin: OriginKind) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._origin: OriginKind = origin
        self._count = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: Path) -> Node:
        mark = self._mark(node)
        self._count += 1
        if id(node) in self._open:
            raise DocumentError([mark.problem("an alias refers to a value that contains it", path=render_path(path))])
        if len(self._open) >= _DEEPEST:
            raise DocumentError([mark.problem(_TOO_DEEP, path=render_path(path), hint=_FLATTEN)])
        if self._count > _MOST_NODES:
            raise DocumentError([mark.problem(f"more than {_MOST_NODES} values after aliases are expanded")])
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Node("mapping", mark, entries=self._entries(node, path))
            if isinstance(node, yaml.SequenceNode):
                items = tuple(self.build(one, (*path, index)) for index, one in enumerate(node.value))
                return Node("sequence", mark, items=items)
        finally:
            self._open.discard(id(node))
        assert isinstance(node, yaml.ScalarNode)
        wrong = _UNUSABLE.search(node.value)
        if wrong is not None:
            message = f"character {ord(wrong.group()):#06x} is not allowed in a text"
            self.problems.append(mark.problem(message, path=render_path(path), hint="remove it"))
        return Node("scalar", mark, value=_scalar(node), text=node.value, quoted=node.style is not None)

    def _entries(self, node: yaml.MappingNode, path: Path) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key_mark = self._mark(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(key_mark.problem("a key must be a plain text", path=render_path(path)))
                continue
            if key_node.tag == _MERGE:
                for key, one in self._merged(value_node, path).items():
                    merged.setdefault(key, one)
                continue
            key = key_node.value
            if key in own:
                first = own[key].key_mark
                assert first is not None
                self.problems.append(
                    key_mark.problem(
                        f'key "{key}" is given twice; it was first given at line {first.line}',
                        path=render_path((*path, key)),
                        hint="keep one of the two",
                    )
                )
                continue
            own[key] = replace(self.build(value_node, (*path, key)), key_mark=key_mark)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Node]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found: dict[str, Node] = {}
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                self.problems.append(
                    self._mark(part).problem("<< needs a mapping or a list of mappings", path=render_path(path))
                )
                continue
            for key, one in self.build(part, path).entries.items():
                found.setdefault(key, one)
        return found

    def _mark(self, node: yaml.Node) -> Mark:
        start, end = node.start_mark, node.end_mark
        width = end.column - start.column if end.line == start.line else 1
        return Mark(self._source, start.line + 1, start.column + 1, max(1, width), self._origin)


def _scalar(node: yaml.ScalarNode) -> Value:
    kind = node.tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return node.value.lower() == "true"
    if kind == "int":
        return int(node.value) if len(node.value) <= _LONGEST_INT else node.value
    return float(node.value) if kind == "float" else node.value


def _syntax_problem(error: yaml.MarkedYAMLError, source: Source) -> Problem:
    place = error.problem_mark or error.context_mark
    line, column = (place.line + 1, place.column + 1) if place else (1, 1)
    mark = Mark(source, line, column)
    text = source.lines[line - 1] if line <= len(source.lines) else ""
    if "\t" in text[: len(text) - len(text.lstrip())] or "'\\t'" in (error.problem or ""):
        column = text.find("\t") + 1 or column
        return Mark(source, line, column).problem("a tab is used for indentation", hint="indent with spaces")
    if "expected a single document" in (error.context or ""):
        return mark.problem("the file holds more than one document", hint="one file, one document: remove the line ---")
    if error.problem == _TOO_DEEP:
        return mark.problem(_TOO_DEEP, hint=_FLATTEN)
    if "tag" in (error.problem or "") or "tag" in (error.context or ""):
        return _tag_problem(mark, "")
    if "undefined alias" in (error.problem or ""):
        return mark.problem(error.problem or "undefined alias", hint="define the anchor (&name) above its use (*name)")
    return mark.problem(
        f"not valid YAML: {error.problem or error.context}",
        hint="check quotes, colons and indentation around this place",
    )


def _tag_problem(mark: Mark, tag: str) -> Problem:
    return mark.problem(f"unknown tag {tag}".rstrip(), hint="remove the tag; a file here holds plain values only")
