"""What `why` is told and what it answers; no I/O, no Kubernetes client.

Facts are the objects as the cluster gave them; a verdict is the first thing that blocks, with at most three lines of
evidence and one action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from gkr.cluster.capacity import Node
from gkr.cluster.explain_objects import Object
from spec.events import Event

MOST_EVIDENCE = 3

Remedy = Literal["wait", "change", "admin", "none"]
"""Who has to do something: nobody, the researcher, an administrator; `none` when nothing blocks or all is over."""


class Level(IntEnum):
    """How far a learner got: the first level that blocks is the answer."""

    CREATED = 1
    QUEUED = 2
    QUOTA = 3
    CHECKS = 4
    PLACED = 5
    STARTED = 6
    RUNNING = 7


@dataclass(frozen=True)
class Facts:
    """Everything that an explanation of one learner (or of the syncer) may use, at one moment."""

    learner: str
    cluster: str
    namespace: str
    job: str
    """Name of its RayJob; empty for the syncer, which is a plain Job."""
    queue: str
    now: float
    rayjob: Object | None = None
    raycluster: Object | None = None
    workload: Object | None = None
    local_queues: Sequence[Object] = ()
    """Of the namespace."""
    cluster_queue: Object | None = None
    flavors: Sequence[Object] = ()
    """ResourceFlavors of the cluster."""
    workloads: Sequence[Object] = ()
    """All that share the ClusterQueue, this one's too."""
    pending: Sequence[Object] = ()
    """Kueue's own order of who waits in the ClusterQueue, first one first; empty where it is not served."""
    priorities: Mapping[str, int] = field(default_factory=dict[str, int])
    """Workload priority classes."""
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    """Kubernetes' events about the job and its pods."""
    nodes: Sequence[Node] = ()
    happened: Sequence[Event] = ()
    """The run's own events of this learner."""
    expected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Pods of each group according to the plan; head and services too."""


@dataclass(frozen=True)
class Verdict:
    """The answer."""

    level: Level
    text: str
    """One sentence: what blocks."""
    remedy: Remedy
    evidence: tuple[str, ...] = ()
    action: str = ""
    """One sentence: what to do."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        """An answer fits one screen."""
        assert len(self.evidence) <= MOST_EVIDENCE, self.evidence
