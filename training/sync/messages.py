"""What travels between learner and syncer as JSON, and what both keep of it.

Fields are only ever appended, with defaults. Samples are counted, never steps: learners may have different batches.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

VerdictKind = Literal["merged", "late", "invalid", "fenced"]


class RegisterArgs(Struct, frozen=True, kw_only=True):
    """A process wants to speak for a learner."""

    learner: str
    shapes: dict[str, list[int]]
    fingerprint: str
    contract: str
    world_size: int
    step_seconds: float = 0.0


class Registration(Struct, frozen=True, kw_only=True):
    """The learner's place in the run. Every earlier process of this learner is fenced from now on."""

    generation: int
    epoch: int
    version: int
    """Of the shared weights; -1 before they were seeded."""
    samples_total: int
    last_seq: int
    """Sequence of the learner's last merged contribution; 0 if none was."""
    cursor: int
    """Position in the learner's sample order that its last merged contribution reached."""
    merged_samples: int
    discarded_samples: int
    contribution_pending: bool
    """An earlier process's contribution waits in the open round: wait for the next version, then register again."""
    seed_needed: bool
    """This learner, and no other, has to send the initial weights."""
    final: bool
    theta_sha256: str = ""


class HeartbeatArgs(Struct, frozen=True, kw_only=True):
    learner: str
    generation: int
    step: int = 0
    pending: int = 0
    """Samples since the learner's anchor."""
    step_seconds: float = 0.0


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    epoch: int
    version: int
    final: bool


class LeaveArgs(Struct, frozen=True, kw_only=True):
    """A learner ends in an orderly way: it is not waited for any more."""

    learner: str
    generation: int
    discarded_samples: int = 0


class PartHeader(Struct, frozen=True, kw_only=True):
    """In front of one rank's part of a contribution: delta of all ranges, then EMA of all ranges, float32."""

    learner: str
    generation: int
    seq: int
    rank: int
    fingerprint: str
    ranges: list[tuple[int, int]]
    sha256: str
    """Of the two arrays, without this header."""
    fragment: Literal[0] = 0
    codec: Literal["fp32"] = "fp32"


class PartReceipt(Struct, frozen=True, kw_only=True):
    rank: int
    sha256: str


class PartState(Struct, frozen=True, kw_only=True):
    state: str
    """`answered`: its sender may forget it; `held`: keep it; `missing`: send it again."""


class RangesArgs(Struct, frozen=True, kw_only=True):
    """Which elements of the weights are wanted."""

    ranges: list[tuple[int, int]]


class SeedHeader(Struct, frozen=True, kw_only=True):
    """In front of the initial weights: theta, then EMA if `has_ema`."""

    learner: str
    generation: int
    fingerprint: str
    shapes: dict[str, list[int]]
    sha256: str
    has_ema: bool = False


class Contribution(Struct, frozen=True, kw_only=True):
    """What rank 0 commits after all ranks uploaded their parts."""

    learner: str
    generation: int
    seq: int
    base_version: int
    steps: int
    samples: int
    """Samples since the anchor."""
    cursor: int
    parts: list[PartReceipt]
    fingerprint: str
    epoch: int = 0
    """The syncer's epoch as the learner last saw it; only for the logs."""
    discarded_samples: int = 0
    """All samples this learner has booked as discarded so far."""
    inner_loss: float = 0.0
    fragment: Literal[0] = 0
    codec: Literal["fp32"] = "fp32"


class CommitArgs(Struct, frozen=True, kw_only=True):
    contribution: Contribution
    wait_seconds: float


class Verdict(Struct, frozen=True, kw_only=True):
    """The answer to one contribution. `kind`, `round` and `reason` never change for one (learner, generation, seq)."""

    kind: VerdictKind
    version: int
    """Version to adopt: the newest one, which contains the contribution if it was merged."""
    samples_total: int
    final: bool
    theta_sha256: str
    reason: str = ""
    round: int = 0
    """Version that the merge with this contribution made; 0 if it was not merged."""
    round_members: list[str] = []


class MemberStatus(Struct, frozen=True, kw_only=True):
    learner: str
    generation: int
    state: str
    lease_age_seconds: float
    step: int
    pending_samples: int
    merged_samples: int
    discarded_samples: int


class Status(Struct, frozen=True, kw_only=True):
    """Which round, who is waited for, and until when."""

    run: str
    epoch: int
    version: int
    state: Literal["SEEDING", "SERVING", "FINAL"]
    stage: str
    """Of the round: OPEN, SEALED, MERGED, DURABLE, or empty when there is none."""
    round: int
    arrived: list[str]
    waiting_for: list[str]
    until: float | None
    """Seconds since 1970 at which the round may close without them."""
    members: list[MemberStatus]
    samples_total: int
    target_samples: int
    model_sha256: str
    theta_sha256: str
    final: bool
    seed_from: str = ""
    alarm: str = ""
    """Why the syncer cannot go on by itself now, for example a full disk."""


class ErrorReply(Struct, frozen=True, kw_only=True):
    """Body of every answer that is not a success."""

    reason: str
    """Stable word for programs."""
    message: str
    hint: str = ""


class Answered(Struct, frozen=True, kw_only=True):
    """The last answered contribution of a learner; all that de-duplication needs, as one is in flight at a time."""

    generation: int
    seq: int
    digest: str
    kind: VerdictKind
    round: int
    reason: str = ""
    round_members: list[str] = []


class MemberRecord(Struct, frozen=True, kw_only=True):
    """What is durable of a learner."""

    learner: str
    generation: int = 0
    merged_samples: int = 0
    discarded_samples: int = 0
    last_seq: int = 0
    cursor: int = 0
    answered: Answered | None = None
    invalid_in_row: int = 0
    left: bool = False


class Ledger(Struct, frozen=True, kw_only=True):
    """Everything durable of a run besides the weights. In the state file, and newer in HEAD."""

    run: str
    contract: str
    fingerprint: str = ""
    version: int = -1
    samples_total: int = 0
    final: bool = False
    round_seconds: float = 0.0
    """Running mean of the time between two merges."""
    norms: list[float] = []
    """Of the last accepted displacements."""
    members: list[MemberRecord] = []
    seed_sha256: str = ""
    theta_sha256: str = ""
    model_sha256: str = ""


def encode(message: Struct) -> bytes:
    """JSON bytes."""
    return msgspec.json.encode(message)
