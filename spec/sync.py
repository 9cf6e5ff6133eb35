"""How learners of one experiment become one model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from spec.base import Document
from spec.units import BitRate, Seconds


class SyncConfig(Document):
    """DiLoCo between the learners: many inner steps, then one outer step on the merged displacement."""

    mode: Literal["barrier", "decoupled"] = "barrier"
    """`barrier`: learners wait for the merged weights. `decoupled`: they go on training meanwhile."""
    adopt: Literal["rebase", "overwrite"] = "rebase"
    """Decoupled: what becomes of the steps made while waiting: kept on top of the merged weights, or dropped."""
    inner_steps: int = Field(default=100, ge=1)
    """Inner steps of each learner per outer round (H)."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the outer Nesterov optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer optimizer; below 100 rounds 0.5 to 0.7 works better than 0.9."""
    weighting: Literal["samples", "uniform"] = "samples"
    """Weight of a contribution: its samples (capped at one normal round) or equal."""
    quorum: int | None = Field(default=None, ge=1)
    """Contributions that suffice. Barrier: at the deadline; default half of the active learners, rounded up. Decoupled:
    to merge after the grace; default 1."""
    grace_share: float = Field(default=0.5, ge=0, lt=1)
    """Decoupled: share of the slack of half a round that a merge waits for more contributions."""
    round_deadline: Seconds = 120.0
    """Shortest time a round waits for a missing learner; grows to three times the average round."""
    barrier_timeout: Seconds = 600.0
    """A learner that has waited this long for merged weights ends with a clear reason."""
    lease: Seconds = 20.0
    """A learner whose heartbeat is older is not waited for."""
    heartbeat: Seconds = 2.0
    """Interval of a learner's heartbeats."""
    max_ahead: int = Field(default=4, ge=1)
    """Decoupled: rounds that a learner trains on without an answer before it stands still."""
    fragments: int = Field(default=1, ge=1, le=64)
    """Equally large parts of the model that are synchronised in turn, each every `inner_steps`."""
    codec: Literal["fp32", "bf16", "int8"] = "fp32"
    """Wire format of a contribution: exact float32, half or a quarter of its bytes. Merged weights come back exact."""
    ema: Literal["learners", "syncer"] = "learners"
    """Averaged weights that are published: the mean of the learners' own (they travel with each contribution), or an
    average over the merged weights that the syncer keeps."""
    bulk_connections: int = Field(default=4, ge=1, le=16)
    """Connections over which one rank sends and fetches weights."""
    bulk_rate: BitRate | None = None
    """Most bits per second that a learner sends, and that it fetches; default: no limit."""
    keep_states: int = Field(default=3, ge=2)
    """Committed states of the syncer that are kept, of each fragment."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.fragments > self.inner_steps:
            raise ValueError(
                f"fragments {self.fragments} is more than inner_steps {self.inner_steps}; each fragment needs a step of"
                " its own"
            )
        return self
