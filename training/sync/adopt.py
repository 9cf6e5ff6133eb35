"""What a learner does with a verdict, and where it takes up its work after a restart (cross-region.md 8.6, design
section 5). Pure.

Every rank keeps the same `LearnerSyncState` and its own ranges of the anchor; the decisions depend on the state only,
so all ranks decide alike. Weights never come from a checkpoint when the syncer has merged something that the
checkpoint does not know: it would count twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from spec.errors import GkrError, RefusedError
from training.sync.layout import Floats
from training.sync.members import MISTAKES
from training.sync.messages import Registration, Verdict

Action = Literal["assign", "carry"]
Mode = Literal["exact", "shared", "fresh", "wait"]


class QuarantinedError(GkrError):
    """The learner's contributions are invalid again and again."""


@dataclass(frozen=True, kw_only=True)
class LearnerSyncState:
    """What a learner's checkpoint holds besides weights, anchor and optimizer."""

    seq: int = 0
    """Last sequence number used."""
    merged_seq: int = 0
    """Sequence of the last merged contribution."""
    base_version: int = -1
    """Version that the anchor is."""
    pending_steps: int = 0
    pending_samples: int = 0
    """Since the anchor, in no merge yet."""
    discarded_samples: int = 0
    """Given up, over the whole run."""
    cursor: int = 0
    """Samples of the learner's order that count as consumed."""
    invalid_in_row: int = 0

    def ran(self, samples: int) -> LearnerSyncState:
        """After one committed inner step."""
        return replace(
            self,
            pending_steps=self.pending_steps + 1,
            pending_samples=self.pending_samples + samples,
            cursor=self.cursor + samples,
        )

    def snapshot(self) -> LearnerSyncState:
        """At the boundary where a contribution is made: its number is `seq`."""
        return replace(self, seq=self.seq + 1)

    def to_dict(self) -> dict[str, int]:
        """For the checkpoint's JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LearnerSyncState:
        """From the checkpoint's JSON; fields of newer versions are ignored."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: int(value) for name, value in values.items() if name in known})


def decide(state: LearnerSyncState, *, verdict: Verdict, pending_limit: int) -> tuple[LearnerSyncState, Action]:
    """The learner's new state and what becomes of its weights.

    `pending_limit`: samples above which a late learner gives its progress up, twice a normal round.
    """
    if verdict.kind == "fenced":
        raise RefusedError(
            f"this process may not go on: {verdict.reason}",
            hint="a newer process of this learner has taken over, or will",
        )
    if verdict.kind == "merged":
        merged = replace(
            state,
            merged_seq=state.seq,
            base_version=verdict.version,
            pending_steps=0,
            pending_samples=0,
            invalid_in_row=0,
        )
        return merged, "assign"
    if verdict.kind == "late":
        return catch_up(state, version=verdict.version, pending_limit=pending_limit, final=verdict.final)
    mistakes = state.invalid_in_row + 1
    if mistakes >= MISTAKES:
        raise QuarantinedError(
            f"{mistakes} contributions in a row were invalid, the last because {verdict.reason}",
            hint="look for diverging loss or failing hardware in this learner before it joins again",
        )
    return replace(_discard(state), base_version=verdict.version, invalid_in_row=mistakes), "assign"


def catch_up(
    state: LearnerSyncState, *, version: int, pending_limit: int, final: bool = False
) -> tuple[LearnerSyncState, Action]:
    """Take up a newer version without having contributed to it: keep the progress, unless it has grown too old."""
    newer = replace(state, base_version=version)
    if (
        final
    ):  # nothing can be contributed any more: hold exactly the final weights, and say truthfully what stayed pending
        return newer, "assign"
    if state.pending_samples > pending_limit:
        return _discard(newer), "assign"
    return newer, "carry"


def apply_action(theta: Floats, *, action: Action, anchor: Floats, shared: Floats) -> tuple[Floats, Floats]:
    """The new (weights, anchor) of these ranges. Assigning instead of adding keeps all learners bit-equal."""
    return (shared.copy() if action == "assign" else rebase(theta, onto=shared, base=anchor)), shared


def rebase(theta: Floats, *, onto: Floats, base: Floats) -> Floats:
    """Progress since `base`, moved onto other weights; a no-op where both are equal."""
    return np.add(theta, onto - base, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """How a learner takes up its work."""

    mode: Mode
    """`exact`: everything from the checkpoint. `shared`: weights from the syncer, optimizer from the checkpoint,
    samples from `state.cursor`. `fresh`: weights from the syncer (or the seed), nothing else. `wait`: until the version
    advances, then register again."""
    state: LearnerSyncState
    catch_up: bool = False
    """Exact, but the syncer has gone on: fetch its version and apply `catch_up` before the first step."""


def restart(state: LearnerSyncState | None, *, registration: Registration) -> Restart:
    """Where to go on; `state` is that of the newest checkpoint that verified, if there is one."""
    found = registration
    shared = LearnerSyncState(
        seq=max(found.last_seq, state.seq if state else 0),
        merged_seq=found.last_seq,
        base_version=found.version,
        discarded_samples=found.discarded_samples,
        cursor=found.cursor,
    )
    if found.contribution_pending:
        return Restart(mode="wait", state=shared)
    if state is None:
        return Restart(mode="shared" if found.last_seq else "fresh", state=shared)
    if state.base_version > found.version or state.merged_seq > found.last_seq:
        raise RefusedError(
            f"the checkpoint is based on version {state.base_version} and contribution {state.merged_seq}, "
            f"the syncer only has version {found.version} and contribution {found.last_seq}",
            hint="the syncer's store was lost or belongs to another run; restore it, or start a new run",
        )
    if state.merged_seq < found.last_seq:
        return Restart(mode="shared", state=shared)
    if state.base_version < 0:
        return Restart(mode="fresh", state=shared)
    exact = replace(state, discarded_samples=max(state.discarded_samples, found.discarded_samples))
    return Restart(mode="exact", state=exact, catch_up=state.base_version < found.version)


def _discard(state: LearnerSyncState) -> LearnerSyncState:
    return replace(
        state,
        discarded_samples=state.discarded_samples + state.pending_samples,
        pending_steps=0,
        pending_samples=0,
    )
