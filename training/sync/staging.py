"""Contributions on their way: parts of ranks, until the round that takes them is merged.

In memory only. A syncer that restarts asks for them again; learners keep them until they have their verdict. Memory
is taken only for ranges that fit the layout and that no other part of the contribution covers, so no learner can take
more than two copies of the model.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from training.sync.layout import Floats, Layout, count, find_gap, find_range_problem, scatter
from training.sync.merge import measure_norm
from training.sync.messages import Contribution, PartHeader
from training.sync.refusals import Refusal


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A whole contribution; arrays are empty if there is a problem."""

    delta: Floats
    ema: Floats
    norm: float
    problem: str = ""


@dataclass(kw_only=True)
class Slot:
    """Room for one part; `complete` only after the sender's digest was verified."""

    header: PartHeader
    delta: Floats
    ema: Floats
    complete: bool = False


@dataclass(kw_only=True)
class Stage:
    """One contribution of one learner."""

    key: tuple[int, int]
    """(generation, seq)."""
    slots: dict[int, Slot] = field(default_factory=dict[int, Slot])
    received: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of each complete part; outlives the parts themselves, which assembling frees."""
    size: int = 0
    assembled: Assembled | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Staging:
    """All contributions on their way. Thread-safe; the long work happens under a contribution's own lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, Stage] = {}

    def reserve(self, header: PartHeader, *, layout: Layout) -> Slot | None:
        """Room for a part; none if exactly this part is here already."""
        if header.fingerprint != layout.fingerprint:
            raise Refusal(
                "layout",
                f"the part was cut from another layout ({header.fingerprint[:12]}, here {layout.fingerprint[:12]})",
            )
        problem = find_range_problem(header.ranges, total=layout.total)
        if problem:
            raise Refusal("bad_request", problem)
        with self._lock:
            stage = self._stages.get(header.learner)
            key = (header.generation, header.seq)
            if stage is None or stage.key < key:
                stage = self._stages[header.learner] = Stage(key=key)
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
            others = [one for rank, slot in stage.slots.items() if rank != header.rank for one in slot.header.ranges]
            problem = find_range_problem([*others, *header.ranges], total=layout.total)
            if problem:
                raise Refusal("overlap", f"rank {header.rank}: {problem}")
            size = count(header.ranges)
            slot = Slot(header=header, delta=np.empty(size, np.float32), ema=np.empty(size, np.float32))
            stage.slots[header.rank] = slot
            return slot

    def finish(self, slot: Slot) -> None:
        """The part is verified."""
        header = slot.header
        with self._lock:
            stage = self._stages.get(header.learner)
            if stage is None or stage.slots.get(header.rank) is not slot:
                return
            slot.complete = True
            stage.received[header.rank] = header.sha256
            stage.size += slot.delta.nbytes + slot.ema.nbytes

    def release(self, slot: Slot) -> None:
        """The part did not come through: give its room back."""
        with self._lock:
            stage = self._stages.get(slot.header.learner)
            if stage is not None and stage.slots.get(slot.header.rank) is slot and not slot.complete:
                del stage.slots[slot.header.rank]

    def holds(self, *, learner: str, generation: int, seq: int, rank: int) -> bool:
        """Whether a part is here, complete."""
        with self._lock:
            stage = self._stages.get(learner)
            return stage is not None and stage.key == (generation, seq) and rank in stage.received

    def is_current(self, learner: str, *, generation: int, seq: int) -> bool:
        """Whether this is the contribution that `take` would give."""
        with self._lock:
            stage = self._stages.get(learner)
            return stage is not None and stage.key == (generation, seq) and stage.assembled is not None

    def assemble(self, contribution: Contribution, *, layout: Layout) -> Assembled:
        """The whole contribution, looked at once. Raises `parts_missing` while named parts are not here."""
        with self._lock:
            stage = self._stages.get(contribution.learner)
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
                stage.assembled = _assemble([stage.slots[one.rank] for one in contribution.parts], layout=layout)
                for slot in stage.slots.values():
                    slot.delta = slot.ema = np.empty(0, np.float32)
            return stage.assembled

    def take(self, learner: str) -> tuple[Assembled, int]:
        """The accepted contribution of a learner and its size in bytes."""
        with self._lock:
            stage = self._stages[learner]
        assert stage.assembled is not None, f"the contribution of {learner} was accepted without its data"
        return stage.assembled, stage.size

    def drop(self, learner: str, *, generation: int, seq: int) -> None:
        """The contribution is answered."""
        with self._lock:
            stage = self._stages.get(learner)
            if stage is not None and stage.key <= (generation, seq):
                del self._stages[learner]


def _assemble(slots: list[Slot], *, layout: Layout) -> Assembled:
    nothing = np.empty(0, np.float32)
    gap = find_gap([one for slot in slots for one in slot.header.ranges], total=layout.total)
    if gap:
        return Assembled(
            delta=nothing, ema=nothing, norm=0.0, problem=f"its parts do not cover the model exactly once: {gap}"
        )
    if len(slots) == 1 and slots[0].header.ranges == [(0, layout.total)]:
        delta, ema = slots[0].delta, slots[0].ema
    else:
        delta, ema = np.empty(layout.total, np.float32), np.empty(layout.total, np.float32)
        for slot in slots:
            scatter(delta, slot.header.ranges, slot.delta)
            scatter(ema, slot.header.ranges, slot.ema)
    norm = measure_norm(delta)
    for name, value in (("displacement", norm), ("EMA", measure_norm(ema))):
        if not np.isfinite(value):
            return Assembled(
                delta=nothing, ema=nothing, norm=0.0, problem=f"its {name} has elements that are not finite"
            )
    return Assembled(delta=delta, ema=ema, norm=norm)
