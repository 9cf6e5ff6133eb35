"""Measurements to verdicts: pure, with every threshold in one table.

Rules: a worse measurement never improves a verdict; what could not be measured is UNKNOWN, never PASS; a FAIL
outweighs an UNKNOWN, an UNKNOWN outweighs a WARN. Every judgement says the value, the threshold and what mends it.
Thresholds are those of a node of a long run; where a laptop would be refused without need, the threshold says why it
does not ask for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from training.preflight.measurements import (
    Clock,
    Dataset,
    Disk,
    Memory,
    Ports,
    ResourceLimits,
    SharedMemory,
    Store,
    TwoSteps,
)

Verdict = Literal["PASS", "WARN", "FAIL", "UNKNOWN"]
GIB = 2**30
MIB = 2**20

_WEIGHT: dict[Verdict, int] = {"PASS": 0, "WARN": 1, "UNKNOWN": 2, "FAIL": 3}

DISK_SHARE = (0.20, 0.10)
"""Free share of blocks and of inodes: PASS from, FAIL below."""
DISK_AMPLE = 20 * GIB
"""Free bytes (or ten times the need, if more) from which the share no longer matters: 8 % of a large disk is plenty."""
INODES_AMPLE = 1_000_000
MEMORY_SHARE = (0.97, 0.95)
"""Total memory over what the plan gives this node: PASS from, FAIL below (kernels keep a few percent)."""
MEMORY_FREE_SHARE = (0.95, 0.50)
"""Available memory over the same: below the first others hold it (WARN), below the second the job would not fit."""
OPEN_FILES = (4096, 1024)
PROCESSES = (4096, 512)
CLOCK_MS = (50.0, 500.0)
CLOCK_EARLIEST = 1_767_225_600.0
CLOCK_LATEST = 4_102_444_800.0
CLOCK_SOURCES = frozenset(
    {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen", "mach_absolute_time"}
)
LOOPBACK_MS = (10.0, 1000.0)
"""Connect to ourselves. Load alone reaches the first; the second means that the network stack is not well."""
STORE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict with its grounds."""

    verdict: Verdict
    value: str
    threshold: str
    evidence: str = ""
    hint: str = ""


def worst(*verdicts: Verdict) -> Verdict:
    """The verdict that decides; UNKNOWN of nothing."""
    decides: Verdict = verdicts[0] if verdicts else "UNKNOWN"
    for one in verdicts[1:]:
        decides = one if _WEIGHT[one] > _WEIGHT[decides] else decides
    return decides


def at_least(value: float | None, *, passes: float, fails_below: float) -> Verdict:
    """PASS from `passes`, FAIL below `fails_below`, WARN between."""
    if value is None or math.isnan(value):
        return "UNKNOWN"
    if value >= passes:
        return "PASS"
    return "WARN" if value >= fails_below else "FAIL"


def at_most(value: float | None, *, passes: float, fails_above: float) -> Verdict:
    """PASS up to `passes`, FAIL above `fails_above`, WARN between."""
    if value is None or math.isnan(value):
        return "UNKNOWN"
    return at_least(-value, passes=-passes, fails_below=-fails_above)


def judge_disk(disk: Disk, *, needed_bytes: int) -> Judgement:
    """H1."""
    ample = max(DISK_AMPLE, 10 * needed_bytes)
    enough = at_least(disk.free_bytes, passes=needed_bytes, fails_below=needed_bytes)
    share = _free_share(disk.free_bytes, total=disk.total_bytes, ample=ample)
    inodes: Verdict = (
        "PASS" if disk.total_inodes == 0 else _free_share(disk.free_inodes, total=disk.total_inodes, ample=INODES_AMPLE)
    )
    probe: Verdict = "FAIL" if disk.problem else "PASS"
    probed = (
        f"{_size(disk.probe_bytes)} written, synced and read back in {disk.probe_seconds:.2f} s"
        if disk.probe_bytes
        else ""
    )
    return Judgement(
        verdict=worst(enough, share, inodes, probe),
        value=f"{_size(disk.free_bytes)} of {_size(disk.total_bytes)} free, {_count(disk.free_inodes)} inodes",
        threshold=f">= {_size(needed_bytes)}, and >= {DISK_SHARE[0]:.0%} or {_size(ample)}; bytes read back equal",
        evidence=f"{disk.path}: {disk.problem or probed}",
        hint=f"free space on the disk of {disk.path}, or choose another folder",
    )


def judge_memory(memory: Memory, *, needed_bytes: int) -> Judgement:
    """H3, memory."""
    passes, fails = (share * needed_bytes for share in MEMORY_SHARE)
    total = at_least(memory.total_bytes, passes=passes, fails_below=fails)
    passes, fails = (share * needed_bytes for share in MEMORY_FREE_SHARE)
    free = at_least(memory.available_bytes, passes=passes, fails_below=fails)
    return Judgement(
        verdict=worst(total, free),
        value=f"{_size(memory.available_bytes)} available of {_size(memory.total_bytes)}",
        threshold=f"{_size(needed_bytes)} for this node, total at most {1 - MEMORY_SHARE[0]:.0%} below",
        hint="end other programs on this machine, or ask for less memory (groups[].resources.memory)",
    )


def judge_shared_memory(shm: SharedMemory, *, needed_bytes: int) -> Judgement:
    """H3, shared memory."""
    return Judgement(
        verdict=at_least(shm.free_bytes, passes=needed_bytes, fails_below=needed_bytes),
        value=f"{_size(shm.free_bytes)} of {_size(shm.total_bytes)} free",
        threshold=f">= {_size(needed_bytes)}",
        evidence="" if shm.total_bytes is not None else "this system has no such file system",
        hint="ask for less (groups[].resources.shm), or give the container more (an emptyDir in memory, --shm-size)",
    )


def judge_limits(limits: ResourceLimits) -> Judgement:
    """H3, limits of processes."""
    files = at_least(limits.open_files, passes=OPEN_FILES[0], fails_below=OPEN_FILES[1])
    processes = at_least(limits.processes, passes=PROCESSES[0], fails_below=PROCESSES[1])
    return Judgement(
        verdict=worst(files, processes),
        value=f"{_count(limits.open_files)} open files, {_count(limits.processes)} more processes",
        threshold=f">= {OPEN_FILES[0]} and >= {PROCESSES[0]} (at least {OPEN_FILES[1]} and {PROCESSES[1]})",
        evidence=f"locked memory {_size(limits.locked_bytes)}",
        hint=f"first ulimit -n {OPEN_FILES[0]}; ulimit -u {PROCESSES[0]}; in a container raise its pids limit",
    )


def judge_clock(clock: Clock) -> Judgement:
    """H4. A slow clock source costs time and not correctness, so it is a WARN; a clock that lies is a FAIL."""
    sane: Verdict = (
        "UNKNOWN" if clock.wall is None else "PASS" if CLOCK_EARLIEST <= clock.wall <= CLOCK_LATEST else "FAIL"
    )
    drift = at_most(_magnitude(clock.drift_ms), passes=CLOCK_MS[0], fails_above=CLOCK_MS[1])
    offset: Verdict = "PASS"  # the store's own check tells when no file could be made there
    if clock.store_offset_ms is not None:
        offset = at_most(abs(clock.store_offset_ms), passes=CLOCK_MS[1], fails_above=10 * CLOCK_MS[1])
    source: Verdict = "UNKNOWN" if not clock.source else "PASS" if clock.source in CLOCK_SOURCES else "WARN"
    return Judgement(
        verdict=worst(sane, drift, offset, source),
        value=f"drift {_ms(clock.drift_ms)}, store {_ms(clock.store_offset_ms)}, source {clock.source or 'not told'}",
        threshold=f"drift <= {CLOCK_MS[0]:.0f} ms, store <= {CLOCK_MS[1]:.0f} ms, a fast source, a date from 2026",
        evidence="" if clock.wall is None else f"seconds since 1970: {clock.wall:.3f}",
        hint="let chrony or the hypervisor keep the time; a source such as hpet makes every time stamp slow",
    )


def judge_ports(ports: Ports) -> Judgement:
    """N5."""
    taken = [one for one in ports.ports if one.problem]
    loopback: Verdict = "FAIL"
    if not ports.loopback_problem:
        loopback = at_most(ports.loopback_ms, passes=LOOPBACK_MS[0], fails_above=LOOPBACK_MS[1])
    said = [f"port {one.port}: {one.problem}{f', held by {one.holder}' if one.holder else ''}" for one in taken]
    if ports.loopback_problem:
        said.insert(0, f"loopback: {ports.loopback_problem}")
    hint = "check that the loopback interface is up"
    if taken:
        hint = f"end {taken[0].holder or 'the program that holds it'}, or choose another port than {taken[0].port}"
    return Judgement(
        verdict=worst(loopback, "FAIL" if taken else "PASS"),
        value=f"{len(ports.ports) - len(taken)} of {len(ports.ports)} wanted free, loopback {_ms(ports.loopback_ms)}",
        threshold=f"all free, loopback <= {LOOPBACK_MS[0]:.0f} ms",
        evidence="; ".join(said),
        hint=hint,
    )


def judge_store(store: Store) -> Judgement:
    """S1."""
    verdict = "FAIL" if store.problem else at_most(store.seconds, passes=STORE_SECONDS, fails_above=math.inf)
    return Judgement(
        verdict=verdict,
        value=f"{store.step} failed"
        if store.problem
        else f"written, read, listed and deleted in {store.seconds:.2f} s",
        threshold=f"all of it, within {STORE_SECONDS:.0f} s",
        evidence=f"{store.path}: {store.problem}" if store.problem else store.path,
        hint=f"give this user write access and space there, or choose another place; {store.hint}".rstrip("; "),
    )


def judge_dataset(dataset: Dataset) -> Judgement:
    """S3."""
    verdict: Verdict = "FAIL" if dataset.problem else "PASS" if dataset.found else "UNKNOWN"
    return Judgement(
        verdict=verdict,
        value="not usable" if dataset.problem else dataset.found or "not told",
        threshold="manifest readable, shard equals its digest",
        evidence=dataset.problem or dataset.uri,
        hint=dataset.hint,
    )


def judge_two_steps(steps: TwoSteps) -> Judgement:
    """M1."""
    finite = len(steps.losses) == 2 and all(math.isfinite(loss) for loss in steps.losses)
    verdict: Verdict = "FAIL"
    if not steps.problem:
        verdict = "PASS" if finite else "FAIL" if steps.losses else "UNKNOWN"
    return Judgement(
        verdict=verdict,
        value="failed" if steps.problem else f"loss {', '.join(f'{loss:.4g}' for loss in steps.losses) or 'not told'}",
        threshold="two finite losses",
        evidence=steps.problem,
        hint=steps.hint or "lower train.learning_rate or use dtype float32, and look at the data for broken samples",
    )


def _free_share(free: int | None, *, total: int | None, ample: int) -> Verdict:
    if free is None or not total:
        return "UNKNOWN"
    return "PASS" if free >= ample else at_least(free / total, passes=DISK_SHARE[0], fails_below=DISK_SHARE[1])


def _magnitude(value: float | None) -> float | None:
    return None if value is None else abs(value)


def _size(value: float | None) -> str:
    if value is None:
        return "unknown"
    if math.isinf(value):
        return "unlimited"
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def _count(value: float | None) -> str:
    if value is None:
        return "unknown"
    return "unlimited" if math.isinf(value) else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} ms"
