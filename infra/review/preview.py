"""The engine's preview as values: what `pulumi preview --json --show-sames` prints.

The form is the engine's `PreviewDigest` (pkg/display/json.go of Pulumi 3.274): steps with old and new state,
diagnostics, a summary. A replacement appears as one step or as several; they become one change here. Read leniently: a
newer engine may say more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from infra.policy.resource import Resource
from spec.errors import ConfigError

Kind = Literal["create", "update", "replace", "delete", "same", "import", "read"]

_KINDS: dict[str, Kind] = {
    "create": "create", "update": "update", "delete": "delete", "same": "same", "import": "import", "read": "read",
    "replace": "replace", "create-replacement": "replace", "delete-replaced": "replace",
    "import-replacement": "replace", "read-replacement": "read", "discard": "read", "discard-replaced": "read",
    "remove-pending-replace": "delete",
}  # fmt: skip
"""The engine's word for a step, and ours. `refresh`, `diff` and `extend-parameterize` change nothing by themselves."""
_HIDDEN_TYPES = ("pulumi:pulumi:Stack", "pulumi:providers:", "pulumi:pulumi:StackReference")


@dataclass(frozen=True)
class State:
    """A resource before or after."""

    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    protect: bool = False
    retain_on_delete: bool = False


@dataclass(frozen=True)
class Step:
    """What happens to one resource."""

    kind: Kind
    urn: str
    type: str
    name: str
    old: State | None = None
    new: State | None = None
    reasons: tuple[str, ...] = ()
    """Fields that the engine names as the cause of a replacement."""
    detailed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path to kind of difference: add, delete, update, each also with `-replace`."""

    @property
    def custom(self) -> bool:
        """A thing in a cloud or cluster rather than a component, a provider or the stack itself."""
        return not self.type.startswith(_HIDDEN_TYPES) and not self.type.startswith("gkr:")

    @property
    def protected(self) -> bool:
        """Protected before the change: afterwards is too late."""
        return bool(self.old and self.old.protect)

    @property
    def kept(self) -> bool:
        """Forgotten rather than deleted: the thing itself stays."""
        return self.kind == "delete" and bool(self.old and self.old.retain_on_delete)


@dataclass(frozen=True)
class Diagnostic:
    """Something the engine, the program or a provider said."""

    severity: str
    message: str
    urn: str = ""


@dataclass(frozen=True)
class Preview:
    """One stack's preview."""

    stack: str
    steps: tuple[Step, ...]
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def complete(self) -> bool:
        """Unchanged resources are in it, so that totals are totals."""
        return any(step.kind == "same" for step in self.steps) or all(
            step.kind in ("create", "read") for step in self.steps
        )

    def resources(self) -> list[Resource]:
        """What the stack will consist of, for the rules."""
        return [
            Resource(step.type, step.name, step.new.inputs, protect=step.new.protect, urn=step.urn)
            for step in self.steps
            if step.new is not None and step.kind != "delete"
        ]


def read_preview(text: str, *, stack: str = "", where: str = "") -> Preview:
    """A preview from the engine's JSON; a ConfigError if it is none."""
    hint = "make it with: pulumi preview --json --show-sames --stack STACK > preview.json"
    try:
        digest: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not a preview in JSON: {error}", hint=hint, where=where) from None
    if not isinstance(digest, dict):
        raise ConfigError("not a preview: no object", hint=hint, where=where)
    document = cast("dict[str, Any]", digest)
    if not {"steps", "changeSummary", "diagnostics"} & set(document):
        raise ConfigError("not a preview: neither steps nor diagnostics nor changeSummary", hint=hint, where=where)
    steps = [_step(one) for one in _list(document.get("steps")) if one.get("op") in _KINDS]
    diagnostics = [_diagnostic(one) for one in _list(document.get("diagnostics"))]
    return Preview(stack or _stack_of(steps), tuple(fold(steps)), tuple(diagnostics))


def fold(steps: list[Step]) -> list[Step]:
    """One step per resource: the parts of a replacement become one, in the place of the first."""
    by_urn: dict[str, Step] = {}
    for step in steps:
        before = by_urn.get(step.urn)
        by_urn[step.urn] = step if before is None else _merged(before, step)
    return list(by_urn.values())


def _merged(one: Step, other: Step) -> Step:
    kind: Kind = "replace" if "replace" in (one.kind, other.kind) or {one.kind, other.kind} == {"create", "delete"} \
        else other.kind  # fmt: skip
    return Step(
        kind, one.urn, one.type, one.name, old=one.old or other.old, new=other.new or one.new,
        reasons=tuple(dict.fromkeys((*one.reasons, *other.reasons))), detailed={**one.detailed, **other.detailed},
    )  # fmt: skip


def urn_parts(urn: str) -> tuple[str, str, str]:
    """Stack, type and name of `urn:pulumi:stack::project::parent$type::name`."""
    parts = urn.removeprefix("urn:pulumi:").split("::", 3)
    if len(parts) != 4:
        return "", urn, urn
    return parts[0], parts[2].rsplit("$", 1)[-1], parts[3]


def _step(raw: Mapping[str, Any]) -> Step:
    _, kind, name = urn_parts(str(raw.get("urn", "")))
    detailed = cast("dict[str, Any]", raw.get("detailedDiff") or {})
    return Step(
        _KINDS[raw["op"]], str(raw.get("urn", "")), kind, name,
        old=_state(raw.get("oldState")), new=_state(raw.get("newState")),
        reasons=tuple(str(one) for one in raw.get("replaceReasons") or ()),
        detailed={path: str(one.get("kind", "update")) for path, one in detailed.items()},
    )  # fmt: skip


def _state(raw: Mapping[str, Any] | None) -> State | None:
    if raw is None:
        return None
    return State(
        raw.get("inputs") or {}, raw.get("outputs") or {}, protect=bool(raw.get("protect")),
        retain_on_delete=bool(raw.get("retainOnDelete")),
    )  # fmt: skip


def _diagnostic(raw: Mapping[str, Any]) -> Diagnostic:
    text = f"{raw.get('prefix', '')}{raw.get('message', '')}".strip()
    return Diagnostic(str(raw.get("severity", "info")), text, str(raw.get("urn", "")))


def _list(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        return []
    return [cast("Mapping[str, Any]", one) for one in cast("list[Any]", value) if isinstance(one, Mapping)]


def _stack_of(steps: list[Step]) -> str:
    return next((urn_parts(step.urn)[0] for step in steps), "")
