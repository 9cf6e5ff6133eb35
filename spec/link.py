"""The link between a learner and the syncer, as the local backend simulates it.

On clusters links are what they are; there a link in the file is refused.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spec.base import Document
from spec.units import BitRate, Percent, Seconds


class PartitionConfig(Document):
    """A time in which the learner cannot reach the syncer."""

    after: Seconds
    """From the moment the learner's driver was first started."""
    lasts: Seconds
    """How long all connections are cut and new ones refused."""


class LinkConfig(Document):
    """What a link does to the bytes between a learner and the syncer, alike in both directions."""

    delay: Seconds = 0.0
    """One way; a round trip takes twice as long."""
    rate: BitRate | None = None
    """Bits per second of each direction, shared by all connections; default: what this machine gives."""
    loss: Annotated[Percent, Field(lt=1)] = 0.0
    """Share of packets that are lost and sent again, each after the retransmission's wait."""
    partitions: list[PartitionConfig] = []
    """Times in which the link is down."""
