"""How learners of one experiment become one model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Document
from spec.units import Seconds


class SyncConfig(Document):
    """DiLoCo between the learners: many inner steps, then one outer step on the merged displacement."""

    mode: Literal["barrier", "decoupled"] = "barrier"
    """`barrier`: learners wait for the merged weights. `decoupled`: they go on training meanwhile."""
    inner_steps: int = Field(default=100, ge=1)
    """Inner steps of each learner per outer round (H)."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the outer Nesterov optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer optimizer; below 100 rounds 0.5 to 0.7 works better than 0.9."""
    weighting: Literal["samples", "uniform"] = "samples"
    """Weight of a contribution: its samples (capped at one normal round) or equal."""
    quorum: int | None = Field(default=None, ge=1)
    """Contributions that suffice at the deadline; default: half of the active learners, rounded up."""
    round_deadline: Seconds = 120.0
    """Shortest time a round waits for a missing learner; grows to three times the average round."""
    barrier_timeout: Seconds = 600.0
    """A learner that has waited this long for merged weights ends with a clear reason."""
    lease: Seconds = 20.0
    """A learner whose heartbeat is older is not waited for."""
    heartbeat: Seconds = 2.0
    """Interval of a learner's heartbeats."""
    fragments: Literal[1] = 1
    """Parts of the model that are synchronised in turn. Only the whole model so far."""
    codec: Literal["fp32"] = "fp32"
    """Wire format of a contribution. Only exact float32 so far."""
    keep_states: int = Field(default=3, ge=2)
    """Committed states of the syncer that are kept."""
