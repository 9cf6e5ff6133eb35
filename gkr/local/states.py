"""What the supervisor knows, what it hears and what it does, as values.

`gkr.local.fate` decides over them; nothing here acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spec.events import Event

SYNCER = "run"
"""The learner name under which logs and recoveries of the syncer stand; spec refuses a learner of that name."""


@dataclass(frozen=True)
class Limits:
    """Every deadline and budget of the supervisor."""

    serve_seconds: float = 60.0
    """A syncer that does not publish its endpoints within this is killed and counts as failed."""
    grace_seconds: float = 30.0
    """From SIGTERM to SIGKILL."""
    kill_seconds: float = 10.0
    """From SIGKILL until a process counts as unkillable (stuck in the kernel) and the run ends without it."""
    stall_seconds: float = 1800.0
    """A driver whose learner says nothing for so long is killed and counts as failed."""
    restarts: int = 3
    """Restarts of one process without progress in between."""
    backoff_seconds: float = 2.0
    """Delay before the second restart without progress; doubles with each further one. The first restart is at once."""
    run_seconds: float = 604_800.0
    """From start to end of the run."""


@dataclass(frozen=True)
class Endpoints:
    """Where the syncer answers, each as host:port."""

    control: str
    bulk: str


@dataclass(frozen=True)
class Fate:
    """How the run ends."""

    status: Literal["succeeded", "failed", "cancelled"]
    reason: str
    exit_code: int


@dataclass(frozen=True)
class PendingRecovery:
    """A restart whose outcome is not known yet."""

    cause: str
    action: str
    died_at: float
    detected_seconds: float
    after_attempt: int = 0
    """The last attempt whose ranks ran before the death; only steps of a later one are new."""
    lost_samples: int = 0


@dataclass(frozen=True)
class Process:
    """A driver or the syncer: one logical process over all its restarts."""

    attempt: int
    """Number of the latest start, never below an attempt that a driver made itself."""
    spawned: int = 0
    """The last attempt whose ranks a driver started; a driver that dies early makes none."""
    running: bool = False
    finished: bool = False
    told: bool = False
    """SIGTERM was sent."""
    killed_for: str = ""
    """Why we sent SIGKILL, if we did: the exit then has this cause."""
    start_at: float | None = None
    """A restart is due at this time."""
    failures: int = 0
    """Restarts since the last progress."""
    best: int = 0
    """Highest inner step (driver) or version (syncer) seen; only more than this is progress."""
    heard_at: float = 0.0
    serve_deadline: float | None = None
    last_error: str = ""
    pending: PendingRecovery | None = None


@dataclass(frozen=True)
class State:
    """All of it. Keys of `processes` are learner names, and SYNCER."""

    processes: Mapping[str, Process]
    batch: int = 1
    endpoints: Endpoints | None = None
    status: Literal["new", "preparing", "running", "stopping", "ended"] = "new"
    fate: Fate | None = None
    run_deadline: float | None = None
    stop_deadline: float | None = None
    killing: bool = False
    limits: Limits = field(default_factory=Limits)

    @property
    def drivers(self) -> dict[str, Process]:
        return {name: process for name, process in self.processes.items() if name != SYNCER}

    @property
    def syncer(self) -> Process | None:
        return self.processes.get(SYNCER)


# What the supervisor hears. `now` is its monotonic clock.


@dataclass(frozen=True)
class Begin:
    now: float


@dataclass(frozen=True)
class Serving:
    """The running syncer published its endpoints."""

    now: float
    endpoints: Endpoints


@dataclass(frozen=True)
class Exited:
    """A child is gone. `code` is negative for a signal; `last_line` is the last it wrote to its log."""

    now: float
    name: str
    code: int
    detected_seconds: float
    last_line: str = ""


@dataclass(frozen=True)
class Heard:
    """A line of events.jsonl."""

    now: float
    event: Event


@dataclass(frozen=True)
class CancelAsked:
    now: float
    hard: bool


@dataclass(frozen=True)
class Broken:
    """The supervisor itself cannot go on, for example because the disk is full."""

    now: float
    reason: str


@dataclass(frozen=True)
class Tick:
    now: float


Input = Begin | Serving | Exited | Heard | CancelAsked | Broken | Tick


# What it does about it.


@dataclass(frozen=True)
class StartSyncer:
    attempt: int
    endpoints: Endpoints | None
    """The former ones, which a restart must serve again."""


@dataclass(frozen=True)
class StartDriver:
    learner: str
    attempt: int
    endpoints: Endpoints | None


@dataclass(frozen=True)
class Terminate:
    name: str


@dataclass(frozen=True)
class Kill:
    name: str


@dataclass(frozen=True)
class Emit:
    """Append an event; the shell fills in time."""

    event: Event


@dataclass(frozen=True)
class Finish:
    fate: Fate


Effect = StartSyncer | StartDriver | Terminate | Kill | Emit | Finish
