"""Contributions on their way: parts of ranks, until the round that takes them is merged.

In memory only. A syncer that restarts asks for them again; learners keep them until they have their verdict. Memory
is taken only for ranges that fit the fragment and that no other part of the contribution covers, so no learner can take
more than two copies of the model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from training.sync.chunks import Upload, upload_key
from training.sync.codec import encoded_bytes
from training.sync.layout import Layout, count, find_range_problem
from training.sync.merge import measure_norm
from training.sync.messages import Contribution, PartHeader, SeedHeader
from training.sync.pieces import Part, Parts, Source
from training.sync.refusals import Refusal


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A whole contribution; empty if there is a problem. Elements count from the fragment's first."""

    delta: Source
    ema: Source
    """Averaged weights, as a displacement like `delta`; empty if they do not travel."""
    norm: float
    problem: str = ""


class Journey(NamedTuple):
    """A contribution's way here."""

    size: int
    """Bytes."""
    seconds: float
    """From the opening of its first part to the end of its last one."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one body."""

    header: PartHeader | SeedHeader
    key: str
    upload: Upload

    @classmethod
    def of(cls, header: PartHeader | SeedHeader, *, size: int) -> Slot:
        try:
            upload = Upload(size, sha256=header.sha256)
        except (MemoryError, OverflowError, ValueError) as error:
            hint = "give the syncer a machine with more memory, or look at the shapes that the learner registered"
            raise Refusal("too_large", f"the syncer has no room for a body of {size} bytes", hint=hint) from error
        return cls(header=header, key=upload_key(header), upload=upload)


@dataclass(kw_only=True)
class Stage:
    """One contribution of one learner."""

    key: tuple[int, int]
    """(generation, seq)."""
    slots: dict[int, Slot] = field(default_factory=dict[int, Slot])
    headers: dict[int, PartHeader] = field(default_factory=dict[int, PartHeader])
    received: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of each complete part; outlives the parts themselves, which assembling frees."""
    size: int = 0
    """Bytes that came."""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    """When the last part was whole."""
    assembled: Assembled | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Staging:
    """All contributions on their way, by learner and fragment. Thread-safe; the long work happens under a
    contribution's own lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[tuple[str, int], Stage] = {}
        self._seed: Slot | None = None

    def reserve(self, header: PartHeader, *, layout: Layout) -> Slot | None:
        """Room for a part, the same for the same header; none if exactly this part is here already."""
        _check(header, layout=layout)
        with self._lock:
            name, key = (header.learner, header.fragment), (header.generation, header.seq)
            stage = self._stages.get(name)
            if stage is None or stage.key < key:
                stage = self._stages[name] = Stage(key=key)
            if stage.key != key:
                raise Refusal(
                    "superseded",
                    f"contribution {stage.key[1]} of learner {header.learner!r} is newer than {header.seq}",
                )
            known = stage.received.get(header.rank)
            if known == header.sha256:
                return None
            if known:
                raise Refusal(
                    "conflict",
                    f"part of rank {header.rank} of contribution {header.seq} is here already with other content",
                )
            others = [one for rank, other in stage.headers.items() if rank != header.rank for one in other.ranges]
            problem = find_range_problem([*others, *header.ranges], total=layout.total)
            if problem:
                raise Refusal("overlap", f"rank {header.rank}: {problem}")
            slot = stage.slots.get(header.rank)
            if slot is None or slot.header != header:
                slot = stage.slots[header.rank] = Slot.of(header, size=header.bytes)
                stage.headers[header.rank] = header
            return slot

    def reserve_seed(self, header: SeedHeader, *, layout: Layout) -> Slot:
        """Room for the initial weights, the same for the same header."""
        with self._lock:
            if self._seed is None or self._seed.header != header:
                self._seed = Slot.of(header, size=4 * layout.total * (2 if header.has_ema else 1))
            return self._seed

    def find(self, key: str) -> Slot | None:
        """The room that was reserved under a key, while it waits for its body."""
        with self._lock:
            slots = [slot for stage in self._stages.values() for slot in stage.slots.values()]
            return next((one for one in (*slots, self._seed) if one is not None and one.key == key), None)

    def finish(self, slot: Slot) -> None:
        """The body is verified."""
        header = slot.header
        with self._lock:
            if isinstance(header, SeedHeader):
                self._seed = None if self._seed is slot else self._seed
                return
            stage = self._stages.get((header.learner, header.fragment))
            if stage is None or stage.slots.get(header.rank) is not slot or header.rank in stage.received:
                return
            stage.received[header.rank] = header.sha256
            stage.size += header.bytes
            stage.ended = time.monotonic()

    def holds(self, *, learner: str, generation: int, seq: int, rank: int, fragment: int = 0) -> bool:
        """Whether a part is here, complete."""
        with self._lock:
            stage = self._stages.get((learner, fragment))
            return stage is not None and stage.key == (generation, seq) and rank in stage.received

    def is_current(self, learner: str, *, generation: int, seq: int, fragment: int = 0) -> bool:
        """Whether this is the contribution that `take` would give."""
        with self._lock:
            stage = self._stages.get((learner, fragment))
            return stage is not None and stage.key == (generation, seq) and stage.assembled is not None

    def assemble(self, contribution: Contribution, *, layout: Layout) -> Assembled:
        """The whole contribution, looked at once. Raises `parts_missing` while named parts are not here."""
        with self._lock:
            stage = self._stages.get((contribution.learner, contribution.fragment))
            if stage is None or stage.key != (contribution.generation, contribution.seq):
                received: dict[int, str] = {}
            else:
                received = dict(stage.received)
        missing = [one.rank for one in contribution.parts if one.rank not in received]
        if missing or stage is None:
            raise Refusal("parts_missing", f"parts of ranks {missing} of contribution {contribution.seq} are not here")
        changed = [one.rank for one in contribution.parts if received[one.rank] != one.sha256]
        if changed:
            raise Refusal(
                "conflict",
                f"parts of ranks {changed} of contribution {contribution.seq} have other content than it names",
            )
        with stage.lock:
            if stage.assembled is None:
                parts = [(stage.headers[one.rank], stage.slots[one.rank].upload) for one in contribution.parts]
                stage.assembled = _assemble(parts, layout=layout, fragment=contribution.fragment)
                with self._lock:
                    stage.slots.clear()
            return stage.assembled

    def take(self, learner: str, *, fragment: int = 0) -> tuple[Assembled, Journey]:
        """The accepted contribution of a learner, and how it came."""
        with self._lock:
            stage = self._stages[learner, fragment]
        assert stage.assembled is not None, f"the contribution of {learner} was accepted without its data"
        return stage.assembled, Journey(stage.size, stage.ended - stage.began)

    def keep_only(self, wanted: Callable[[str, int, tuple[int, int]], bool], *, seed: bool) -> None:
        """Give the memory back of what nobody can commit any more: `wanted` is asked with learner, fragment and
        (generation, seq) of each contribution.
        """
        with self._lock:
            self._stages = {name: stage for name, stage in self._stages.items() if wanted(*name, stage.key)}
            self._seed = self._seed if seed else None

    def drop(self, learner: str, *, generation: int, seq: int, fragment: int = 0) -> None:
        """The contribution is answered."""
        with self._lock:
            stage = self._stages.get((learner, fragment))
            if stage is not None and stage.key <= (generation, seq):
                del self._stages[learner, fragment]


def _check(header: PartHeader, *, layout: Layout) -> None:
    """Everything that can be known before memory is taken."""
    if header.fingerprint != layout.fingerprint:
        raise Refusal(
            "layout",
            f"the part was cut from another layout ({header.fingerprint[:12]}, here {layout.fingerprint[:12]})",
        )
    if not 0 <= header.fragment < layout.fragments:
        raise Refusal("bad_request", f"there is no fragment {header.fragment} of {layout.fragments}")
    first, length = layout.fragment_range(header.fragment)
    problem = find_range_problem(header.ranges, total=length, first=first)
    if problem:
        raise Refusal("bad_request", problem)
    size = encoded_bytes(count(header.ranges), header.codec) * (2 if header.has_ema else 1)
    if header.bytes != size:
        text = f"the header announces {header.bytes} bytes; its ranges are {size} bytes in {header.codec}"
        raise Refusal("bad_request", text)


def _assemble(parts: list[tuple[PartHeader, Upload]], *, layout: Layout, fragment: int) -> Assembled:
    """Put together where it is read: no copy is made of what came."""
    start, length = layout.fragment_range(fragment)
    if len({(header.codec, header.has_ema) for header, _ in parts}) > 1:
        return _problem("its parts differ in codec, or only some of them have averaged weights")
    displacements, averages = list[Part](), list[Part]()
    for header, upload in parts:
        data, cut = upload.data, len(upload.data) // (2 if header.has_ema else 1)
        displacements.append(Part(data=data[:cut], ranges=header.ranges, codec=header.codec))
        if header.has_ema:
            averages.append(Part(data=data[cut:], ranges=header.ranges, codec=header.codec))
    try:
        delta = Parts(displacements, start=start, length=length)
        ema = Parts(averages, start=start, length=length) if averages else np.empty(0, np.float32)
    except ValueError as error:
        return _problem(f"{error}")
    norm = measure_norm(delta)
    for name, value in (("displacement", norm), ("EMA", measure_norm(ema))):
        if not np.isfinite(value):
            return _problem(f"its {name} has elements that are not finite")
    return Assembled(delta=delta, ema=ema, norm=norm)


def _problem(text: str) -> Assembled:
    nothing = np.empty(0, np.float32)
    return Assembled(delta=nothing, ema=nothing, norm=0.0, problem=text)
