"""The engine's events -> the JSON that `infra.review` reads, and lines of progress. Pure but for the list it keeps.

The form is that of `pulumi preview --json --show-sames`, so that a comment on a pull request and a preview on a
terminal come from the same reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from pulumi.automation import DiagnosticEvent, EngineEvent, StepEventMetadata, StepEventStateMetadata

from infra.policy.resource import SECRET
from infra.review.preview import urn_parts
from infra.review.secrets import SIGNATURE

_COLORS = re.compile(r"<\{%[^%]*%\}>")
"""The engine's own marks for colors."""
_SECRET_SIGNATURE = "1b47061264138c4ac30d75fd1eb44270"  # noqa: S105
"""Value of the envelope's key for secrets; assets and archives have others."""
_SEVERE = ("warning", "error")
_DONE = {"create": "made", "update": "changed", "delete": "deleted", "create-replacement": "made anew",
         "delete-replaced": "deleted to be made anew", "import": "imported", "refresh": "read"}  # fmt: skip

Say = Callable[[str], None]


@dataclass
class Record:
    """What one run of the engine said."""

    say: Say
    """Gets lines of progress."""
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    diagnostics: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def take(self, event: EngineEvent) -> None:
        """Keep what matters of an event."""
        if event.resource_pre_event is not None and event.resource_pre_event.planning:
            self.steps.append(step(event.resource_pre_event.metadata))
        if event.res_outputs_event is not None and not event.res_outputs_event.planning:
            self._progress(event.res_outputs_event.metadata)
        if event.res_op_failed_event is not None:
            _, kind, name = urn_parts(event.res_op_failed_event.metadata.urn)
            self.say(f"failed: {kind} {name}")
        if event.diagnostic_event is not None:
            self._diagnostic(event.diagnostic_event)
        if event.summary_event is not None:
            self.counts = {str(_value(op)): count for op, count in event.summary_event.resource_changes.items()}

    def digest(self) -> dict[str, Any]:
        """The document that `infra.review` reads."""
        return {"steps": self.steps, "diagnostics": self.diagnostics, "changeSummary": self.counts}

    def errors(self) -> list[str]:
        """What the engine called an error, each once."""
        found = [one["message"] for one in self.diagnostics if one["severity"] == "error"]
        return list(dict.fromkeys(found))

    def _progress(self, metadata: StepEventMetadata) -> None:
        done = _DONE.get(str(_value(metadata.op)))
        if done is not None and not metadata.type.startswith(("pulumi:", "gkr:")):
            _, kind, name = urn_parts(metadata.urn)
            self.say(f"{done}: {kind} {name}")

    def _diagnostic(self, event: DiagnosticEvent) -> None:
        if event.ephemeral or event.severity not in _SEVERE:
            return
        message = plain(f"{event.prefix or ''}{event.message}")
        self.diagnostics.append({"severity": event.severity, "message": message, "urn": event.urn or ""})


def step(metadata: StepEventMetadata) -> dict[str, Any]:
    """One step as `pulumi preview --json` writes it."""
    found: dict[str, Any] = {"op": str(_value(metadata.op)), "urn": metadata.urn}
    if metadata.old is not None:
        found["oldState"] = _state(metadata.old)
    if metadata.new is not None:
        found["newState"] = _state(metadata.new)
    if metadata.detailed_diff:
        found["detailedDiff"] = {
            path: {"kind": str(_value(one.diff_kind)), "inputDiff": one.input_diff}
            for path, one in metadata.detailed_diff.items()
        }
    if metadata.keys:
        found["replaceReasons"] = list(metadata.keys)
    return found


def plain(text: str) -> str:
    """Without the engine's marks for colors."""
    return _COLORS.sub("", text).strip()


def _state(state: StepEventStateMetadata) -> dict[str, Any]:
    return {
        "urn": state.urn,
        "type": state.type,
        "custom": bool(state.custom),
        "inputs": _hidden(dict(state.inputs or {})),
        "outputs": _hidden(dict(state.outputs or {})),
        "protect": bool(state.protect),
        "retainOnDelete": bool(state.retain_on_delete),
    }


def _hidden(value: Any) -> Any:
    """Secrets as a preview's JSON writes them: events put some of them, such as a Secret's whole data, in envelopes."""
    if isinstance(value, list):
        return [_hidden(one) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if fields.get(SIGNATURE) == _SECRET_SIGNATURE:
        return SECRET
    return {key: _hidden(one) for key, one in fields.items()}


def _value(one: Any) -> Any:
    """Of an enumeration, or what is no member of it."""
    return getattr(one, "value", one)
