"""Which fields of a resource change, from what to what, and which of them force a replacement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from infra.policy.resource import SECRET, UNKNOWN, look
from infra.review.fields import Effect, effect_of, plain_path
from infra.review.preview import Step
from infra.review.secrets import shown

_IGNORED = ("__defaults", "__meta", "__provider")


@dataclass(frozen=True)
class Change:
    """One field."""

    path: str
    before: str
    """Printable and masked."""
    after: str
    forces: bool
    """The engine names it as a cause of the replacement."""
    effect: Effect | None
    """What the table knows about it."""

    def __str__(self) -> str:
        return f"`{self.path}` {self.before} -> {self.after}"


def changes(step: Step) -> list[Change]:
    """Every field that changes, those that force a replacement first."""
    if step.old is None or step.new is None:
        return []
    found = dict(_differences(step.old.inputs, step.new.inputs, path=""))
    paths = dict.fromkeys(path for path in step.detailed if not _ignored(path))
    if not paths:
        paths = dict.fromkeys(found)
    rows = [_change(step, path) for path in paths]
    named = [row for row in rows if row.forces]
    rows += [_named(step, reason) for reason in step.reasons if not _covered(reason, named)]
    return sorted(rows, key=lambda row: (not row.forces, row.effect != "recreates nodes"))


def forcing(step: Step) -> list[Change]:
    """The fields that force a replacement: as the engine says; if it only names a field's top, what the table knows."""
    return [one for one in changes(step) if one.forces]


def _change(step: Step, path: str) -> Change:
    kind = step.detailed.get(path, "")
    effect = effect_of(step.type, path)
    forces = kind.endswith("-replace") if kind else False
    if not forces and step.kind == "replace" and not any(one.endswith("-replace") for one in step.detailed.values()):
        # An older provider says only which field at the top; the table then tells which one below it.
        tops = [reason for reason in step.reasons if plain_path(path).startswith(plain_path(reason))]
        forces = effect == "replaces" or (bool(tops) and effect is None)
    old, new = _value(step.old, path), _value(step.new, path)
    return Change(path, shown(old, path=path), _after(old, new, path=path), forces, effect)


def _after(old: Any, new: Any, *, path: str) -> str:
    text = shown(new, path=path)
    if text != shown(old, path=path):
        return text
    return f"another {text}" if text == SECRET else f"{text}, changed"


def _named(step: Step, reason: str) -> Change:
    old, new = _value(step.old, reason), _value(step.new, reason)
    return Change(reason, shown(old, path=reason), _after(old, new, path=reason), forces=True,
                  effect=effect_of(step.type, reason))  # fmt: skip


def _covered(reason: str, rows: list[Change]) -> bool:
    top = plain_path(reason)
    return any(plain_path(row.path) == top or plain_path(row.path).startswith(f"{top}.") for row in rows)


def _value(state: Any, path: str) -> Any:
    value = look(state.inputs, path)
    return value if value is not None else look(state.outputs, path)


def _differences(old: Any, new: Any, *, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        before, after = cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", new)
        for key in dict.fromkeys((*before, *after)):
            if not _ignored(key):
                yield from _differences(before.get(key), after.get(key), path=_join(path, key))
    elif isinstance(old, list) and isinstance(new, list):
        left, right = cast("list[Any]", old), cast("list[Any]", new)
        for index in range(max(len(left), len(right))):
            yield from _differences(
                left[index] if index < len(left) else None, right[index] if index < len(right) else None,
                path=f"{path}[{index}]",
            )  # fmt: skip
    elif old != new and UNKNOWN not in (old, new):
        yield path, (old, new)


def _join(path: str, key: str) -> str:
    name = f'["{key}"]' if any(one in key for one in ".[]") else key
    return f"{path}.{name}" if path and not name.startswith("[") else f"{path}{name}"


def _ignored(path: str) -> bool:
    return any(part in path for part in _IGNORED)
