"""How long to wait and how often to try again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Document
from spec.units import Seconds

Cause = Literal["preemption", "node-failure", "rank-death", "collective-timeout", "service-failure"]


class TimeoutConfig(Document):
    """Longest waits; each ends with a reason."""

    queue: Seconds = 86_400.0
    """Until the cluster admits all learners."""
    start: Seconds = 1_800.0
    """From admission to the first step."""
    run: Seconds = 604_800.0
    """From start to end."""
    grace: Seconds = 60.0
    """From the request to stop to the kill."""


class RetryConfig(Document):
    """When a learner that stopped is started again; a user's own error never is."""

    max: int = Field(default=3, ge=0)
    """Most restarts of one learner without a new checkpoint between them."""
    on: list[Cause] = ["preemption", "node-failure", "rank-death", "collective-timeout", "service-failure"]
    """Causes that are retried."""
