"""What travels between learner and syncer as JSON, and what both keep of it.

Fields are only ever appended, with defaults. Samples are counted, never steps: learners may have different batches.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from training.sync.layout import combine_fingerprints

VerdictKind = Literal["merged", "late", "invalid", "fenced"]
Codec = Literal["fp32", "bf16", "int8"]


class RegisterArgs(Struct, frozen=True, kw_only=True):
    """A process wants to speak for a learner."""

    learner: str
    shapes: dict[str, list[int]]
    fingerprint: str
    contract: str
    world_size: int
    step_seconds: float = 0.0
    buffers: dict[str, list[int]] = {}
    """Shapes of what is in no optimizer; it lies after all parameters in the flat vector."""


class FragmentPlace(Struct, frozen=True, kw_only=True):
    """Where a learner stands in one fragment."""

    version: int
    """Of the fragment; -1 before the weights were seeded."""
    last_seq: int
    """Sequence of the learner's last merged contribution to it; 0 if none was."""
    cursor: int
    """Position in the learner's sample order that this contribution reached."""
    merged_samples: int
    discarded_samples: int
    contribution_pending: bool
    """An earlier process's contribution waits in the open round of the fragment."""
    theta_sha256: str


class Registration(Struct, frozen=True, kw_only=True):
    """The learner's place in the run. Every earlier process of this learner is fenced from now on."""

    generation: int
    epoch: int
    version: int
    """Merges so far, over all fragments; -1 before the weights were seeded."""
    samples_total: int
    last_seq: int
    """Sequence of the learner's last merged contribution; 0 if none was. The highest over fragments."""
    cursor: int
    """Position in the learner's sample order that its last merged contribution reached. The lowest over fragments."""
    merged_samples: int
    """The lowest over fragments."""
    discarded_samples: int
    """The highest over fragments."""
    contribution_pending: bool
    """An earlier process's contribution waits in an open round: wait for the next version, then register again."""
    seed_needed: bool
    """This learner, and no other, has to send the initial weights."""
    final: bool
    theta_sha256: str = ""
    fragments: list[FragmentPlace] = []
    draining: bool = False
    """The target is reached: send what is pending once more, nothing is to be trained any more."""


class HeartbeatArgs(Struct, frozen=True, kw_only=True):
    learner: str
    generation: int
    step: int = 0
    pending: int = 0
    """Samples since the learner's anchor."""
    step_seconds: float = 0.0
    blocked_seconds: dict[str, float] = {}
    """Seconds the training loop has stood still in this attempt, by cause."""
    in_flight_steps: int = 0
    """Steps since the oldest snapshot that has no answer yet."""
    kept: int | None = None
    """Samples that are merged or pending, in the fragment that has the fewest; none: not known yet."""
    measures: dict[str, float] = {}
    """What else the learner measures, see `training.sync.metrics`."""


class HeartbeatReply(Struct, frozen=True, kw_only=True):
    epoch: int
    version: int
    final: bool
    draining: bool = False
    versions: list[int] = []
    """Of each fragment."""
    remaining: int | None = None
    """Samples of the run that are still to be trained by anybody; zero: stop, and send what is pending."""


class DrainedArgs(Struct, frozen=True, kw_only=True):
    """A learner of a run that is draining has nothing more to send."""

    learner: str
    generation: int


class LeaveArgs(Struct, frozen=True, kw_only=True):
    """A learner ends in an orderly way: it is not waited for any more."""

    learner: str
    generation: int
    discarded_samples: int = 0
    discarded: list[int] = []
    """Of each fragment, where they differ."""


class PartHeader(Struct, frozen=True, kw_only=True):
    """In front of one rank's part of a contribution: delta of all ranges, then EMA of all ranges, in the codec."""

    learner: str
    generation: int
    seq: int
    rank: int
    fingerprint: str
    ranges: list[tuple[int, int]]
    """Of elements of the whole vector, inside the fragment."""
    sha256: str
    """Of the two arrays, without this header."""
    fragment: int = 0
    codec: Codec = "fp32"
    has_ema: bool = True
    bytes: int = 0
    """Size of the body without this header."""


class PartReceipt(Struct, frozen=True, kw_only=True):
    rank: int
    sha256: str


class PartState(Struct, frozen=True, kw_only=True):
    state: str
    """`answered`: its sender may forget it; `held`: keep it; `missing`: send it again."""


class RangesArgs(Struct, frozen=True, kw_only=True):
    """Which elements of the weights are wanted: of the whole vector, inside the fragment."""

    ranges: list[tuple[int, int]]
    learner: str | None = None
    """Who asks."""


class SeedHeader(Struct, frozen=True, kw_only=True):
    """In front of the initial weights: theta, then EMA if `has_ema`."""

    learner: str
    generation: int
    fingerprint: str
    shapes: dict[str, list[int]]
    sha256: str
    has_ema: bool = False
    buffers: dict[str, list[int]] = {}


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
    fragment: int = 0
    codec: Codec = "fp32"
    last: bool = False
    """The learner's last one for this fragment, with all that is pending; only while the run is draining."""


class CommitArgs(Struct, frozen=True, kw_only=True):
    contribution: Contribution
    wait_seconds: float


class Verdict(Struct, frozen=True, kw_only=True):
    """The answer to one contribution. `kind`, `round` and `reason` never change for one (learner, generation, fragment,
    seq).
    """

    kind: VerdictKind
    version: int
    """Of the fragment, to adopt: the newest one, which contains the contribution if it was merged."""
    samples_total: int
    final: bool
    theta_sha256: str
    """Of the fragment at that version."""
    reason: str = ""
    round: int = 0
    """Version of the fragment that the merge with this contribution made; 0 if it was not merged."""
    round_members: list[str] = []
    fragment: int = 0
    draining: bool = False
    staleness: int = 0
    """Versions of the fragment between the contribution's base and its merge."""
    quarantined: bool = False
    """Nothing more of this process is taken."""


class MemberStatus(Struct, frozen=True, kw_only=True):
    learner: str
    generation: int
    state: str
    lease_age_seconds: float
    step: int
    pending_samples: int
    merged_samples: int
    """The lowest over fragments."""
    discarded_samples: int
    """The highest over fragments."""
    step_seconds: float = 0.0
    in_flight_steps: int = 0
    base_versions: list[int] = []
    """Of each fragment: base of the learner's last contribution here; -1 if none came yet."""
    staleness: list[int] = []
    """Of each fragment: versions since that base."""
    blocked_seconds: dict[str, float] = {}
    bytes_in: int = 0
    """Received from it in contributions by this syncer process."""
    bytes_out: int = 0
    """Weights that this syncer process sent to it."""
    transfer_rate: float = 0.0
    """Bytes per second at which its last merged contribution came."""
    measures: dict[str, float] = {}


class FragmentStatus(Struct, frozen=True, kw_only=True):
    """One fragment's round: who is waited for, why, and until when."""

    fragment: int
    version: int
    round: int
    """Version that the open round makes."""
    stage: str
    arrived: list[str]
    waiting_for: list[str]
    why: str
    """One sentence: what the round waits for."""
    until: float | None
    """Seconds since 1970 at which it may close without them."""
    staleness: dict[str, int] = {}
    """Of the contributions that have arrived."""
    bytes_in: int = 0
    """Of the last merge, as are all that follow."""
    outer_gradient_norm: float = 0.0
    cosine: float | None = None
    """Lowest between two displacements."""
    merge_seconds: float = 0.0
    durable_seconds: float = 0.0
    accumulated: float = 0.0
    """Rounds that are merged since the momentum moved last."""


class Status(Struct, frozen=True, kw_only=True):
    """Which round, who is waited for, and until when. `stage` to `until` are those of the first fragment."""

    run: str
    epoch: int
    version: int
    """Merges so far, over all fragments; -1 before the weights were seeded."""
    state: Literal["SEEDING", "SERVING", "DRAINING", "FINAL"]
    stage: str
    """Of the round: OPEN, SEALED, MERGED, DURABLE, or empty when there is none."""
    round: int
    arrived: list[str]
    waiting_for: list[str]
    until: float | None
    """Seconds since 1970 at which the round may close without them."""
    members: list[MemberStatus]
    samples_total: int
    """In the fragment that has the fewest."""
    target_samples: int
    model_sha256: str
    theta_sha256: str
    final: bool
    seed_from: str = ""
    alarm: str = ""
    """Why the syncer cannot go on by itself now, for example a full disk."""
    mode: str = "barrier"
    fragments: list[FragmentStatus] = []
    refusals: dict[str, int] = {}
    """Messages that this syncer process refused and verdicts other than merged, by reason."""


class ErrorReply(Struct, frozen=True, kw_only=True):
    """Body of every answer that is not a success."""

    reason: str
    """Stable word for programs."""
    message: str
    hint: str = ""


class Answered(Struct, frozen=True, kw_only=True):
    """The last answered contribution of a learner to a fragment; all that de-duplication needs, as one is in flight at
    a time.
    """

    generation: int
    seq: int
    digest: str
    kind: VerdictKind
    round: int
    reason: str = ""
    round_members: list[str] = []
    staleness: int = 0


class PlaceRecord(Struct, frozen=True, kw_only=True):
    """What is durable of a learner in one fragment."""

    merged_samples: int = 0
    discarded_samples: int = 0
    last_seq: int = 0
    cursor: int = 0
    answered: Answered | None = None
    base_version: int = -1
    """Of its last contribution."""


class MemberRecord(Struct, frozen=True, kw_only=True):
    """What is durable of a learner."""

    learner: str
    generation: int = 0
    places: list[PlaceRecord] = []
    """By fragment."""
    invalid_in_row: int = 0
    left: bool = False
    drained: list[int] = []
    """Fragments for which this generation has sent its last contribution."""

    @property
    def merged_samples(self) -> int:
        """In the fragment that has the fewest."""
        return min((one.merged_samples for one in self.places), default=0)

    @property
    def discarded_samples(self) -> int:
        """Of the fragment that lost most."""
        return max((one.discarded_samples for one in self.places), default=0)


class FragmentRecord(Struct, frozen=True, kw_only=True):
    """What is durable of a fragment besides its weights."""

    version: int = -1
    samples_total: int = 0
    round_seconds: float = 0.0
    """Running mean of the time between two merges."""
    quorum_seconds: float = 0.0
    """Running mean from the opening of a window to its quorum."""
    sync_seconds: float = 0.0
    """Running mean from a seal to the next open round."""
    norms: list[float] = []
    """Of the last accepted displacements."""
    theta_sha256: str = ""


class Ledger(Struct, frozen=True, kw_only=True):
    """Everything durable of a run besides the weights. In the state files, and newer in HEAD."""

    run: str
    contract: str
    fingerprint: str = ""
    fragments: list[FragmentRecord] = []
    members: list[MemberRecord] = []
    seed_sha256: str = ""
    model_sha256: str = ""
    draining: bool = False
    final: bool = False

    @property
    def version(self) -> int:
        """Merges so far, over all fragments; -1 before the weights were seeded."""
        if not self.fragments or self.fragments[0].version < 0:
            return -1
        return sum(one.version for one in self.fragments)

    @property
    def samples_total(self) -> int:
        """In the fragment that has the fewest."""
        return min((one.samples_total for one in self.fragments), default=0)

    @property
    def theta_sha256(self) -> str:
        """Of all fragments."""
        return combine_fingerprints([one.theta_sha256 for one in self.fragments])


def encode(message: Struct) -> bytes:
    """JSON bytes."""
    return msgspec.json.encode(message)
