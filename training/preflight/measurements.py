"""What the collectors measure. None stands for what the system does not tell, and never for zero."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One file system. None where the system does not tell."""

    path: str
    free_bytes: int | None
    total_bytes: int | None
    free_inodes: int | None
    total_inodes: int | None
    """0 where the file system makes inodes as needed."""
    probe_bytes: int = 0
    """Written, synced to the disk and read back."""
    probe_seconds: float = 0.0
    problem: str = ""
    """What went wrong while writing or reading back; empty if nothing did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of this machine or of the container, whichever is less."""

    total_bytes: int | None
    available_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The file system of shared memory (POSIX shm)."""

    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Limits of a process started here; infinity where there is none."""

    open_files: float | None
    processes: float | None
    """How many more processes and threads may be started."""
    locked_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clocks of this machine."""

    wall: float | None
    drift_ms: float | None
    """How far wall and monotonic clock moved apart in a short window."""
    store_offset_ms: float | None
    """Wall clock minus the time stamp that the checkpoint store gave a new file; none if no file could be made."""
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port that the plan wants."""

    port: int
    problem: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports and the loopback connection."""

    loopback_ms: float | None
    loopback_problem: str
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Write, read, list and delete where the checkpoints will be."""

    path: str
    """Or URI, if it is no folder of this machine."""
    seconds: float
    step: str = ""
    """Where it went wrong; empty if it did not."""
    problem: str = ""
    hint: str = ""
    """What the store says would mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The manifest and one of its shards."""

    uri: str
    found: str = ""
    """What was read and verified."""
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSteps:
    """Two optimizer steps of the real model."""

    losses: tuple[float, ...] = ()
    problem: str = ""
    hint: str = ""
