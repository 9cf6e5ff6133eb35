"""What happened in a run: one JSON line each, only ever appended.

Every writer sends whole lines in one write to a file opened for appending, so that lines of several processes never
mix. Readers skip kinds they do not know. Times are seconds since 1970 as the writer saw them; durations are measured on
one process's monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from spec.base import Record


class _Event(Record):
    time: float
    """Seconds since 1970."""
    source: str
    """Writer: supervisor, syncer, driver/<learner>, rank/<learner>/<rank>."""


class RunStatus(_Event):
    """The run changed its state. The last one tells the run's fate."""

    kind: Literal["run_status"] = "run_status"
    status: Literal["preparing", "running", "succeeded", "failed", "cancelled"]
    reason: str = ""
    """One line: why it ended so."""
    exit_code: int | None = None


class Prepared(_Event):
    """A dataset is ready."""

    kind: Literal["prepared"] = "prepared"
    learner: str
    manifest: str
    samples: int
    seconds: float
    reused: bool
    """True if it was there already."""


class Check(Record):
    """One preflight check of one node."""

    id: str
    name: str
    verdict: Literal["PASS", "WARN", "FAIL", "UNKNOWN"]
    value: str
    threshold: str
    evidence: str = ""
    """What was seen: paths, system messages, who holds a port."""
    hint: str = ""
    """What mends it; empty when the verdict is PASS."""
    seconds: float = 0.0


class Preflight(_Event):
    """All checks of one node."""

    kind: Literal["preflight"] = "preflight"
    learner: str
    node: str
    checks: list[Check]
    seconds: float


class AttemptStarted(_Event):
    """A driver spawned all ranks of a learner."""

    kind: Literal["attempt_started"] = "attempt_started"
    learner: str
    attempt: int
    epoch: int
    world_size: int
    pids: dict[str, int] = {}
    """Process ids by `rank-0`, `agent-0`, `service-encoder-0`: local diagnosis and tests only."""


class AttemptEnded(_Event):
    """All ranks of an attempt are gone."""

    kind: Literal["attempt_ended"] = "attempt_ended"
    learner: str
    attempt: int
    cause: str
    """`finished` or the classified cause."""
    samples_run: int
    """Samples in steps that committed during this attempt, read from the progress page."""
    position: int = 0
    """Where the learner stood at this end; an attempt that never took up its state leaves it as it was."""


class Restored(_Event):
    """A learner took up its state at the start of an attempt."""

    kind: Literal["restored"] = "restored"
    learner: str
    attempt: int
    mode: Literal["fresh", "exact", "shared"]
    """`fresh`: step 0. `exact`: own checkpoint. `shared`: the syncer's weights with own optimizer state."""
    step: int
    position: int
    """Samples of the learner's order that count as consumed."""
    samples_lost: int
    """Samples of committed steps that the restart threw away."""
    merged: list[int] = []
    """The learner's samples that each fragment held at this time."""
    merged_until: list[int] = []
    """Position that its last contribution to each fragment had reached; empty: `position`."""
    checkpoint: str = ""
    skipped: list[str] = []
    """Checkpoints that did not verify, each with the reason."""


class Trained(_Event):
    """Which samples the committed steps of an attempt were made of, over all ranks of a learner."""

    kind: Literal["trained"] = "trained"
    learner: str
    attempt: int
    first: int
    """Position at which the first of these steps began."""
    last: int
    """Position that the last of them reached."""
    samples: int
    sums: str
    """Hash of the samples that does not depend on their order (`training.data.account`)."""


class Quarantined(_Event):
    """A sample that cannot be used, and the one that took its place."""

    kind: Literal["quarantined"] = "quarantined"
    learner: str
    position: int
    """In the learner's order."""
    dataset: int
    """Number of the source among those of the learner."""
    sample: int
    reason: str
    replacement: int


class StepMetrics(_Event):
    """Progress of a learner, by its rank 0."""

    kind: Literal["step"] = "step"
    learner: str
    attempt: int
    step: int
    """Inner steps committed so far, over all attempts that count."""
    position: int
    """Samples of the learner's order consumed so far."""
    round: int
    """Version of the shared weights the learner is based on."""
    loss: float
    """Mean over the steps since the last event."""
    gradient_norm: float
    learning_rate: float
    steps_per_second: float
    samples_per_second: float
    mfu: float | None = None
    """Model FLOPs used, as a share of the device's peak; none where the peak is unknown (CPU)."""
    loader_queue: int = 0
    """Batches ready when the step began."""
    cache: dict[str, int] = {}
    """What the copies of datasets on rank 0's node have come to so far in this attempt (`storage.cache_counts`); empty
    if all datasets are files there."""
    blocked_seconds: dict[str, float] = {}
    """Seconds the training loop has stood still so far in this attempt, by cause: snapshot, barrier, apply, max_ahead,
    data, encode.
    """
    waited_seconds: dict[str, float] = {}
    """Seconds that a rank has waited so far in this attempt for data and for services, on average over the ranks."""
    memory_bytes: int = 0


class Validation(_Event):
    """Loss of the shared weights on held-out samples with fixed noise, right after a learner applied them."""

    kind: Literal["validation"] = "validation"
    learner: str
    round: int
    loss: float


class CheckpointSaved(_Event):
    """A checkpoint was committed."""

    kind: Literal["checkpoint"] = "checkpoint"
    learner: str
    attempt: int
    step: int
    path: str
    bytes: int
    blocked_seconds: float
    """The training loop's part."""
    seconds: float
    """From snapshot to commit."""


class Applied(_Event):
    """A learner holds the shared weights of a version; its fingerprint proves that learners agree."""

    kind: Literal["applied"] = "applied"
    learner: str
    round: int
    """Version of the fragment."""
    fragment: int = 0
    theta_sha256: str
    """Of the fragment."""
    waited_seconds: float
    """From the end of its snapshot to the answer."""
    verdict: str


class SyncMember(Record):
    """A learner as the syncer sees it in one round."""

    learner: str
    generation: int
    state: str
    arrived_seconds: float | None = None
    """After the first arrival of the round; none if it did not contribute."""
    samples: int = 0
    staleness: int = 0
    """Versions between the base of its contribution and this merge."""
    norm: float = 0.0
    """Of its displacement: how far it went from its anchor."""
    loss: float | None = None
    """Of the inner step before its contribution."""


class SyncWaiting(_Event):
    """The open round, when it changes: who is waited for, and until when."""

    kind: Literal["sync_waiting"] = "sync_waiting"
    round: int
    """Version of the fragment that it will make."""
    fragment: int = 0
    arrived: list[str]
    waiting_for: list[str]
    deadline: float | None = None
    """Seconds since 1970 at which the round may close without them."""


class SyncMerged(_Event):
    """An outer round was merged, committed and published."""

    kind: Literal["sync_merged"] = "sync_merged"
    round: int
    """The version that this merge made, counted over all fragments."""
    fragment: int = 0
    fragment_version: int = -1
    """The version of the fragment that it made; -1: there is one fragment, and it is `round`."""
    epoch: int
    members: list[SyncMember]
    open_seconds: float
    """From the first arrival to the seal."""
    grace_seconds: float = 0.0
    """Decoupled: of these, what came after the quorum."""
    merge_seconds: float
    durable_seconds: float
    outer_gradient_norm: float
    cosine: float | None = None
    """Between the displacements, lowest pair."""
    mean_cosine: float | None = None
    """Between the displacements, mean over pairs."""
    momentum_cosine: float | None = None
    """Between the outer gradient and the outer momentum before it."""
    share: float = 1.0
    """Of a full round that this merge was."""
    samples_total: int
    """Samples in the merged model so far: in the fragment that has the fewest."""
    theta_sha256: str
    """Of all fragments together."""
    fragment_sha256: str = ""
    """Of the fragment; empty where there is one."""
    model_sha256: str | None = None
    """The published averaged model, if this round published one."""
    bytes_in: int = 0
    state_bytes: int = 0
    """Of the fragment's state as it was written."""
    final: bool = False
    """This merge ended the run. A decoupled run ends when all learners have said that they have nothing more to send,
    which is after its last merge: `sync_ledger` says it in both modes.
    """


class SyncFragmentLedger(Record):
    """The syncer's count of samples in one fragment, by learner."""

    merged: dict[str, int]
    discarded: dict[str, int]


class SyncLedger(_Event):
    """The syncer's count of samples by learner, from its committed state."""

    kind: Literal["sync_ledger"] = "sync_ledger"
    round: int
    merged: dict[str, int]
    """In the fragment that has the fewest."""
    discarded: dict[str, int]
    """In the fragment that lost most."""
    fragments: list[SyncFragmentLedger] = []
    """The same for each fragment."""
    final: bool = False
    """Nothing is merged any more: the counts are the run's, and `model_sha256` is its model."""
    model_sha256: str | None = None
    """The newest published model."""


class LearnerFinished(_Event):
    """Rank 0's own account at the end."""

    kind: Literal["learner_finished"] = "learner_finished"
    learner: str
    attempt: int
    step: int
    samples_pending: int
    samples_discarded: int
    theta_sha256: str
    round: int
    """Version that it holds, counted over all fragments."""
    blocked_seconds: dict[str, float]
    pending: list[int] = []
    """Samples pending in each fragment; empty: `samples_pending` in all."""
    discarded: list[int] = []
    """Samples discarded in each fragment; empty: `samples_discarded` in all."""
    position: int | None = None
    """Samples of the learner's order that were consumed; none: all steps had the plan's batch."""


class ServiceClassStats(Record):
    """Requests of one class at one replica."""

    requests: int = 0
    queued: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class ServiceRankStats(Record):
    """What one client has of one replica."""

    requests: int = 0
    """Answered since it connected."""
    outstanding: int = 0
    """Unanswered: queued or being computed; at most the replica's grant."""
    outstanding_bytes: int = 0


class ServiceStats(_Event):
    """What a replica has done so far and how long requests took lately."""

    kind: Literal["service"] = "service"
    learner: str
    service: str
    replica: int
    incarnation: int
    requests: int
    errors: int
    p50_ms: float
    p99_ms: float
    queued: int
    queued_by_rank: dict[str, int] = {}
    batch_mean: float = 0.0
    clients: int = 0
    """Connected now."""
    grant: int = 0
    """Requests that one client may have unanswered."""
    grant_bytes: int = 0
    """Bytes of them; 0: not counted."""
    queued_bytes: int = 0
    """Of all requests without an answer."""
    cancelled: int = 0
    duplicates: int = 0
    """Requests that arrived again and were not computed again."""
    violations: int = 0
    """Messages that are not of the protocol, or beyond a grant."""
    by_priority: dict[str, ServiceClassStats] = {}
    by_rank: dict[str, ServiceRankStats] = {}
    """The clients with most unanswered requests."""
    weights: str = ""
    """Digest of the weights that the last answer came from."""
    computing_seconds: float = 0.0
    """Age of the batch that was being computed."""


class ServiceAsked(_Event):
    """What one client of a run asked of a platform's service, of which only clients know whose requests they were."""

    kind: Literal["service_asked"] = "service_asked"
    learner: str
    service: str
    client: str
    attempt: int
    """Counters start again with each."""
    requests: int
    errors: int
    p50_ms: float
    p99_ms: float


class Samples(_Event):
    """Images drawn from the merged model; the pixels lie beside the events as uint8 [count, height, width, channel]."""

    kind: Literal["samples"] = "samples"
    round: int
    model_sha256: str
    path: str
    """Relative to the run's folder."""
    captions: list[str]
    real_path: str = ""
    """Held-out real images with the same labels, same layout."""


class Score(_Event):
    """An evaluation of the merged model."""

    kind: Literal["score"] = "score"
    round: int
    final: bool
    model_sha256: str
    samples: int
    classifier_accuracy: float
    classifier_accuracy_real: float
    """Of held-out real images, by the same classifier."""
    frechet_distance: float
    frechet_distance_real: float
    """Between two disjoint real splits of the same size."""
    frechet_samples: int = 0
    """Images on each side of both distances: at most half of the held-out split."""
    nearest_train_distance: float = 0.0
    """Median distance of a generated image to its nearest training image (L2, pixels in [0, 1])."""
    nearest_train_distance_real: float = 0.0
    """The same for held-out real images; copying would make the first far smaller than this."""


class Recovery(_Event):
    """Something died and the run went on."""

    kind: Literal["recovery"] = "recovery"
    learner: str
    what: str
    """`rank 1`, `agent node-0`, `loader worker 0 of rank 1`, `service encoder-0`, `driver`, `syncer`."""
    cause: str
    """Classified cause, for example `SIGKILL`."""
    action: str
    """What was done."""
    detected_seconds: float
    first_step_seconds: float | None = None
    """From the death to the learner's first new step; none where training never stopped."""
    lost_steps: int = 0


class Note(_Event):
    """A line for the person who watches."""

    kind: Literal["note"] = "note"
    level: Literal["info", "warning", "error"] = "info"
    text: str


Event = Annotated[
    RunStatus | Prepared | Preflight | AttemptStarted | AttemptEnded | Restored | Trained | Quarantined | StepMetrics
    | Validation | CheckpointSaved | Applied | SyncWaiting | SyncMerged | SyncLedger | LearnerFinished | ServiceStats
    | ServiceAsked | Samples | Score | Recovery | Note,
    Field(discriminator="kind"),
]  # fmt: skip

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def read_event(line: str | bytes) -> Event | None:
    """One event, or none for a torn line or a kind this version does not know."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError:
        return None


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """All events that can be read, in order."""
    for line in lines:
        event = read_event(line) if line.strip() else None
        if event is not None:
            yield event


def write_event(event: Any) -> str:
    """One line with its newline."""
    return json.dumps(event.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":")) + "\n"
