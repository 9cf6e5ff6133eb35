"""What a service is: methods with typed messages, and one function that computes a batch.

A service knows nothing of sockets, queues, ranks or Ray. The server forms batches and calls `compute` from one thread
at a time; the local client calls the same function without a socket. Results must not depend on batch mates: the same
call gives the same reply, within the method's stated tolerance, whoever shares its batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from numpy.typing import DTypeLike

from spec.errors import GkrError
from spec.services import ServiceKind


def _same_batch(_args: Any) -> Hashable:
    return ()


def _one_item(_args: Any) -> int:
    return 1


def no_room(_size: int) -> None:
    """Of a caller that sees nothing of this process."""


@dataclass(frozen=True)
class Method:
    """One method of a service: its messages, and what the batch former must know about a call."""

    name: str
    args: type[Struct]
    reply: type[Struct]
    batch_key: Callable[[Any], Hashable] = _same_batch
    """Calls are computed together only if their keys are equal (for example: the digest of the weights)."""
    cost: Callable[[Any], int] = _one_item
    """Items in a call, at least 1: a batch holds at most `max_batch` of them, and ranks take turns by them."""


class Call(Struct, frozen=True):
    """One request, decoded and checked."""

    args: Any
    """An instance of the method's `args`."""
    tensors: dict[str, np.ndarray] = {}
    """Views of the received bytes; must not be changed."""
    room: Callable[[int], np.ndarray | None] = no_room
    """Bytes that its caller can see, if there are that many."""

    def empty(self, *shape: int, dtype: DTypeLike) -> np.ndarray:
        """An array for a tensor of the reply, with anything in it. What is computed right into it reaches a caller on
        this machine without a copy; from then on it must not be changed."""
        wanted = np.dtype(dtype)
        room = self.room(math.prod(shape) * wanted.itemsize)
        return np.empty(shape, wanted) if room is None else room.view(wanted).reshape(shape)


class Reply(Struct, frozen=True):
    """One answer."""

    body: Any
    """An instance of the method's `reply`."""
    tensors: dict[str, np.ndarray] = {}
    weights: str = ""
    """Digest of the weights that computed it, for the replica's counters; empty if there are none."""


@dataclass(frozen=True)
class ServiceContext:
    """What a replica is told at its start."""

    kind: ServiceKind
    name: str
    cache_dir: Path
    """Node-local folder for what can be made again. Other replicas share it: files must appear by atomic rename."""
    manifest: str
    """URI of the dataset's manifest."""
    max_batch: int
    model: str = ""
    """URI or path of the folder of the weights it serves; empty: what the service ships with."""
    shape: tuple[int, ...] = ()
    """(height, width, channels) of the experiment's images; empty: of no experiment, or it has none."""


class Service(ABC):
    """Base of all services."""

    methods: ClassVar[tuple[Method, ...]]

    def __init__(self, context: ServiceContext) -> None:
        self.context = context

    def warm_up(self) -> None:  # noqa: B027 - a service without anything to load needs no canary
        """Load and run one real request through the real path. A replica is published only after this returned."""

    @abstractmethod
    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """Answer one batch: same method, same batch key, in order, one answer per call.

        A `GkrError` in place of a reply (or raised, for the whole batch) is a refusal and reaches the callers with its
        message and hint. Any other exception is a bug: the whole batch is answered with an internal error and the
        replica goes on.
        """
