"""What can happen to the syncer, and what it then has to do: the words of `training.sync.machine`.

Times are seconds on the clock that the shell injects; they are only ever compared with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from training.sync.messages import Answered


@dataclass(frozen=True, kw_only=True)
class Register:
    now: float
    learner: str


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    now: float
    learner: str
    generation: int
    step: int = 0
    pending: int = 0
    kept: int | None = None
    step_seconds: float = 0.0
    in_flight_steps: int = 0
    blocked_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    measures: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class Leave:
    now: float
    learner: str
    generation: int
    discarded: tuple[int, ...] = ()
    """Samples by fragment; one number counts for all."""


@dataclass(frozen=True, kw_only=True)
class Drained:
    """A learner of a run that is draining has nothing more to send."""

    now: float
    learner: str
    generation: int


@dataclass(frozen=True, kw_only=True)
class Seeded:
    """Version 0 is about to be committed."""

    now: float
    seed_sha256: str
    theta_sha256: tuple[str, ...]
    """By fragment."""
    fingerprint: str
    model_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Contributed:
    """All parts of a contribution are here and were looked at: `problem` says what is wrong with its data."""

    now: float
    learner: str
    generation: int
    seq: int
    digest: str
    base_version: int
    samples: int
    cursor: int
    norm: float
    fragment: int = 0
    steps: int = 0
    discarded_samples: int = 0
    loss: float = 0.0
    last: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Tick:
    now: float


@dataclass(frozen=True, kw_only=True)
class MergeDone:
    """The fragment's next weights are computed."""

    now: float
    fragment: int = 0


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The fragment's next weights are in a state file; HEAD names it together with the ledger that this event makes."""

    now: float
    theta_sha256: str
    model_sha256: str
    """Empty if this merge publishes no model."""
    fragment: int = 0


@dataclass(frozen=True, kw_only=True)
class Published:
    """The fragment's next weights are being served: its next round opens."""

    now: float
    fragment: int = 0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run has drained and its model is in a file: HEAD says that it is final."""

    now: float
    model_sha256: str


Event = (
    Register | Heartbeat | Leave | Drained | Seeded | Contributed | Tick | MergeDone | Committed | Published | Finished
)


@dataclass(frozen=True, kw_only=True)
class SaveLedger:
    """The new state must be in HEAD before anybody hears of it."""


@dataclass(frozen=True, kw_only=True)
class StartMerge:
    """The round is sealed."""

    fragment: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The run has drained: publish its model, then say `Finished`."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The contribution has its verdict. `fenced` is never recorded."""

    answered: Answered


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The contribution waits for its round, or has to be offered again."""


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """The message cannot be right; nothing changed."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Announce:
    """Who is waited for in a fragment has changed."""

    fragment: int


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A line for the person who watches."""

    level: Literal["info", "warning", "error"]
    text: str


Effect = SaveLedger | StartMerge | Finish | Answer | Wait | Refuse | Announce | Remark
