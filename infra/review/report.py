"""The review of one stack: what blocks the change, and the comment that says so."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infra.facts import NEVER_UP
from infra.policy import Finding, Settings, check
from infra.review.capacity import Count, Place, gpus_by_place, pool_gpus
from infra.review.changes import Change, changes
from infra.review.losses import Loss, Weight, losses
from infra.review.preview import Diagnostic, Preview, Step
from spec.errors import EXIT_OK, EXIT_REFUSED

ALLOW_LOSS = "allow-loss"
"""Label of a change whose deletions and replacements a person has looked at."""
ALLOW_POLICY = "allow-policy"
"""Label of a change whose policy findings a person accepts."""

_PROTECTION = ("marked for protection", "because it is protected")
"""In the engine's messages."""
_NOT_UP = re.compile(rf"stack (?P<stack>[-.\w]+) has no output \w+: {re.escape(NEVER_UP)}")
"""What a program says that reads from a stack which is not up."""


@dataclass(frozen=True)
class Block:
    """One reason why the change may not land."""

    reason: str
    label: str = ""
    """The label that lifts it; empty: none does."""


@dataclass(frozen=True)
class Restart:
    """An update that drains and makes anew every node of a pool."""

    step: Step
    fields: tuple[Change, ...]
    gpus: int
    """GPUs of the pool."""


@dataclass(frozen=True)
class Review:
    """Everything the comment says."""

    preview: Preview
    losses: tuple[Loss, ...]
    restarts: tuple[Restart, ...]
    ignored: tuple[tuple[Step, Change], ...]
    """Changes that the provider would accept and not carry out."""
    gpus: dict[Place, Count]
    findings: tuple[Finding, ...]
    errors: tuple[Diagnostic, ...]
    waits: str
    """The stack that must be up before this one can be previewed; empty: it was."""
    blocks: tuple[Block, ...]
    labels: tuple[str, ...]

    @property
    def stack(self) -> str:
        return self.preview.stack

    @property
    def exit_code(self) -> int:
        """0, or 6 if something blocks the change."""
        return EXIT_REFUSED if self.blocks else EXIT_OK

    @property
    def counts(self) -> dict[str, int]:
        """Resources of a cloud or cluster by kind of change."""
        found: dict[str, int] = {}
        for step in self.preview.steps:
            if step.custom:
                found[step.kind] = found.get(step.kind, 0) + 1
        return found

    def concerns(self) -> list[Loss]:
        """Losses that need a person's yes."""
        return [one for one in self.losses if one.weight is not Weight.NONE]


def review(
    preview: Preview, *, settings: Settings, labels: Collection[str] = (), more: Sequence[Finding] = ()
) -> Review:
    """Look at a preview; `labels` are those of the change, `more` what else was found about it."""
    lost, restarts = losses(preview), _restarts(preview)
    findings = [*more, *check(preview.resources(), settings=settings)]
    errors = _errors(preview)
    waits = _waits(errors, stack=preview.stack)
    if waits and not settings.applies:
        errors = []  # whoever applies it has the stack below up by then, and looks again
    blocks = _blocks(lost, restarts, findings=findings, errors=errors, labels=labels)
    return Review(
        preview, tuple(lost), tuple(restarts), tuple(_ignored(preview)), gpus_by_place(preview),
        tuple(findings), tuple(errors), waits, tuple(blocks),
        tuple(sorted(set(labels) & {ALLOW_LOSS, ALLOW_POLICY})),
    )  # fmt: skip


def _blocks(
    lost: Sequence[Loss],
    restarts: Sequence[Restart],
    *,
    findings: Sequence[Finding],
    errors: Sequence[Diagnostic],
    labels: Collection[str],
) -> list[Block]:
    found: list[Block] = []
    still = [one for one in lost if one.weight is Weight.PROTECTED and not _unprotects(one.step)]
    if still:
        names = ", ".join(one.step.name for one in still)
        found.append(Block(f"protected and still to be deleted or replaced: {names}. The engine refuses this whatever"
                           " the labels say; take the protection off in a change of its own first"))  # fmt: skip
    heavy = [one for one in lost if one.weight is not Weight.NONE]
    if heavy and ALLOW_LOSS not in labels:
        found.append(Block(f"{_many(len(heavy), 'deletion or replacement', 'deletions or replacements')} of what is"
                           " protected, carries GPUs or holds data", ALLOW_LOSS))  # fmt: skip
    drained = [one for one in restarts if one.gpus]
    if drained and ALLOW_LOSS not in labels:
        gpus = sum(one.gpus for one in drained)
        found.append(Block(f"every node of {_many(len(drained), 'pool', 'pools')} with {gpus} GPUs is made anew, and"
                           " runs there go back to their last checkpoint", ALLOW_LOSS))  # fmt: skip
    hopeless = [one for one in findings if one.severity == "refuse" and one.final]
    if hopeless:
        found.append(Block(f"{_many(len(hopeless), 'policy finding', 'policy findings')} about what could not work;"
                           f" {hopeless[0].remedy}"))  # fmt: skip
    refused = [one for one in findings if one.severity == "refuse" and not one.final]
    if refused and ALLOW_POLICY not in labels:
        found.append(Block(_many(len(refused), "policy finding", "policy findings"), ALLOW_POLICY))
    if errors:
        found.append(Block(f"the preview failed: {_many(len(errors), 'error', 'errors')}"))
    return found


def _errors(preview: Preview) -> list[Diagnostic]:
    """What the engine could not do, less its refusals to touch what is protected, which are said with the losses."""
    errors = [one for one in preview.diagnostics if one.severity == "error"]
    rest = [one for one in errors if not any(part in one.message for part in _PROTECTION)]
    return [one for one in rest if not _is_last_word(one)] if len(rest) < len(errors) else rest


def _is_last_word(one: Diagnostic) -> bool:
    """What the engine says after errors that it has named."""
    return one.message.removeprefix("error: ").strip() == "preview failed"


def _waits(errors: Sequence[Diagnostic], *, stack: str) -> str:
    """The stack below that is not up, if that is all that is wrong."""
    named = [_NOT_UP.search(one.message) for one in errors if not _is_last_word(one)]
    found = {match["stack"] if match else "" for match in named}
    below = {f"{stack.partition('.')[0]}.global", stack.removesuffix(".platform")} - {stack}
    return next(iter(found)) if len(found) == 1 and found <= below else ""


def _unprotects(step: Step) -> bool:
    """The engine lets one change take the protection off and replace; a deletion looks at the old state only."""
    return step.kind == "replace" and step.new is not None and not step.new.protect


def _restarts(preview: Preview) -> list[Restart]:
    found: list[Restart] = []
    for step in preview.steps:
        if step.kind == "update":
            fields = tuple(one for one in changes(step) if one.effect == "recreates nodes")
            if fields:
                found.append(Restart(step, fields, pool_gpus(step)))
    return found


def _ignored(preview: Preview) -> list[tuple[Step, Change]]:
    return [
        (step, one)
        for step in preview.steps
        if step.kind == "update"
        for one in changes(step)
        if one.effect == "not applied"
    ]


def _many(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
