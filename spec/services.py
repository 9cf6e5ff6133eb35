"""What the auxiliary services are told, and where they are found."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Document, Record
from spec.machines import GpuText
from spec.units import ByteSize, Cores

ServiceKind = Literal["encode", "sample", "evaluate", "prepare"]
METRICS_PORT = "GKR_METRICS_PORT"
"""Environment variable of a replica: where its metrics are served; without it, wherever there is room."""


class ServiceResources(Document):
    """What one replica holds."""

    cpu: Cores | None = None
    """Cores; default: 1."""
    memory: ByteSize | None = None
    """Memory; default: 1Gi."""
    gpu: GpuText | None = None
    """GPU type and count, such as H200:1; default: none."""


class ServiceConfig(Document):
    """One service of an experiment."""

    kind: ServiceKind
    """What it does: encode captions, sample images, evaluate images, prepare datasets."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Workers per cluster that hosts it."""
    resources: ServiceResources = ServiceResources()
    """Of one replica."""
    shared: bool = False
    """Use the platform's long-lived service instead of a private one."""
    learner: str | None = None
    """The learner whose cluster hosts it. Default: every learner's for `encode`, the first learner's for the others."""
    queue_depth: int = Field(default=8, ge=1, le=1024)
    """Requests one rank may have outstanding at one replica; the bounded queue per rank."""
    queue_bytes: ByteSize | None = Field(default=None, ge=1)
    """Bytes of requests that one rank may have outstanding at one replica, beyond one request of any size. Default: so
    much that all ranks together stay within half of a replica's memory, at most 64Mi."""
    max_delay_ms: int = Field(default=0, ge=0, le=10_000)
    """How long requests that no step waits for may wait for others to be computed with."""
    max_batch: int = Field(default=64, ge=1)
    """Most items computed together."""
    model: str | None = None
    """Folder of the weights it serves, for `encode` (a text encoder of transformers, an autoencoder of diffusers) and
    `evaluate` (a CLIP model, for the CLIP score): a URI, or a path in the replica's image. {bucket} stands for the
    bucket of the learner's own region. Default: what the service ships with."""


class Replica(Record):
    """One running replica as its host published it."""

    service: str
    """Name that clients of this directory know it by."""
    kind: ServiceKind
    index: int
    endpoint: str
    incarnation: int
    """Grows with each start, so that a client can tell a restarted replica from the one it knew."""
    pid: int = 0
    sealed: bool = False
    """It hears only those who have the token: the run's, or of a shared one the platform's."""
    shared: bool = False
    """It is the platform's."""
    answers_to: str = ""
    """Name that it knows itself by; empty: the same."""
    metrics: str = ""
    """URL of its metrics; empty: not known here."""


class Directory(Record):
    """Where the services of one learner answer now. Written by the driver, handed to each node by its agent."""

    version: int = 1
    epoch: int
    """Grows with each change; a reader keeps the highest."""
    replicas: list[Replica] = []
