"""The outcome of a run, folded from its events by one pure function used everywhere."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Record


class Ledger(Record):
    """Samples of one learner. run = merged + pending + discarded + lost, or something is wrong."""

    run: int = 0
    merged: int = 0
    pending: int = 0
    discarded: int = 0
    lost: int = 0

    @property
    def imbalance(self) -> int:
        return self.run - self.merged - self.pending - self.discarded - self.lost


class Blocked(Record):
    """Seconds the training loop stood still, by cause."""

    snapshot: float = 0.0
    barrier: float = 0.0
    apply: float = 0.0
    max_ahead: float = 0.0


class Waited(Record):
    """Share of the time for which a rank stood still, on average over the ranks, behind each attempt's first round."""

    data: float = 0.0
    """Until its loader had the next batch."""
    services: float = 0.0
    """Until the encoding service had answered."""


class Copies(Record):
    """What happened to copies of datasets on the node of a learner's rank 0, by all its processes, while it trained."""

    hits: int = 0
    """Copies that were there when they were asked for."""
    fetched_bytes: int = 0
    range_bytes: int = 0
    """Read where the dataset is, without a copy."""
    damaged: int = 0
    """Copies that were removed because their bytes had changed."""


class LearnerSummary(Record):
    name: str
    cluster: str
    region: str
    steps: int = 0
    samples: int = 0
    steps_per_second: float = 0.0
    final_loss: float | None = None
    restarts: int = 0
    ledger: Ledger = Ledger()
    blocked_seconds: Blocked = Blocked()
    waited: Waited = Waited()
    copies: Copies | None = None
    """None if all datasets are files of the node."""


class SyncSummary(Record):
    mode: str = "barrier"
    rounds: int = 0
    version: int = 0
    theta_sha256: str = ""
    learners_agree: bool = False
    """True if every learner applied the last version and reported the syncer's fingerprint for each version it applied.
    """
    ledger_imbalance: int = 0


class EvaluationSummary(Record):
    classifier_accuracy: float
    classifier_accuracy_real: float
    frechet_distance: float
    frechet_distance_real: float
    samples: int
    nearest_train_distance: float = 0.0
    nearest_train_distance_real: float = 0.0


class PreflightSummary(Record):
    passed: int = 0
    warned: int = 0
    failed: int = 0
    unknown: int = 0
    seconds: float = 0.0


class ServiceSummary(Record):
    requests: int = 0
    errors: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class RecoverySummary(Record):
    learner: str
    what: str = ""
    cause: str
    action: str = ""
    detected_seconds: float
    first_step_seconds: float | None = None
    lost_steps: int = 0


class Summary(Record):
    version: Literal[1] = 1
    experiment: str
    run: str
    status: Literal["preparing", "running", "succeeded", "failed", "cancelled"]
    reason: str = ""
    wall_seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict[str, str])
    learners: list[LearnerSummary] = []
    sync: SyncSummary | None = None
    evaluation: EvaluationSummary | None = None
    preflight: PreflightSummary = PreflightSummary()
    services: dict[str, ServiceSummary] = Field(default_factory=dict[str, ServiceSummary])
    recoveries: list[RecoverySummary] = []
