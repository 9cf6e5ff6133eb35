"""A worse measurement never improves a verdict, and what is not known is never a PASS."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.preflight import verdicts as v
from training.preflight.measurements import (
    Clock,
    Dataset,
    Disk,
    Memory,
    Port,
    Ports,
    ResourceLimits,
    SharedMemory,
    Store,
    TwoSteps,
)

GIB = v.GIB
ORDER = {"PASS": 0, "WARN": 1, "UNKNOWN": 2, "FAIL": 3}
DISK = Disk(
    path="/data",
    free_bytes=300 * GIB,
    total_bytes=1000 * GIB,
    free_inodes=10**7,
    total_inodes=10**8,
    probe_bytes=2**24,
    probe_seconds=0.1,
)
CLOCK = Clock(wall=1_800_000_000.0, drift_ms=0.1, store_offset_ms=0.0, source="tsc")
PORTS = Ports(loopback_ms=0.2, loopback_problem="", ports=(Port(port=7000), Port(port=7001)))
sizes = st.one_of(st.integers(0, 64 * GIB), st.integers(0, 4000 * GIB))
reals = st.floats(0, 1e6, allow_nan=False)


def never_better(worse: v.Judgement, better: v.Judgement) -> None:
    assert ORDER[worse.verdict] >= ORDER[better.verdict], (worse, better)


@pytest.mark.parametrize(
    ("judged", "want"),
    [
        (v.judge_disk(DISK, needed_bytes=GIB), "PASS"),
        (v.judge_disk(replace(DISK, free_bytes=30 * GIB), needed_bytes=GIB), "PASS"),  # 3 %, but ample
        (v.judge_disk(replace(DISK, free_bytes=15 * GIB, total_bytes=100 * GIB), needed_bytes=GIB), "WARN"),
        (v.judge_disk(replace(DISK, free_bytes=5 * GIB, total_bytes=100 * GIB), needed_bytes=GIB), "FAIL"),
        (v.judge_disk(replace(DISK, free_bytes=GIB - 1), needed_bytes=GIB), "FAIL"),
        (v.judge_disk(DISK, needed_bytes=301 * GIB), "FAIL"),
        (v.judge_disk(replace(DISK, free_inodes=100), needed_bytes=GIB), "FAIL"),
        (v.judge_disk(replace(DISK, free_inodes=0, total_inodes=0), needed_bytes=GIB), "PASS"),  # btrfs counts none
        (v.judge_disk(replace(DISK, problem="No space left on device"), needed_bytes=GIB), "FAIL"),
        (v.judge_disk(replace(DISK, free_bytes=None), needed_bytes=GIB), "UNKNOWN"),
        (v.judge_disk(replace(DISK, free_bytes=None, problem="x"), needed_bytes=GIB), "FAIL"),
        (v.judge_memory(Memory(total_bytes=100, available_bytes=100), needed_bytes=100), "PASS"),
        (v.judge_memory(Memory(total_bytes=97, available_bytes=96), needed_bytes=100), "PASS"),
        (v.judge_memory(Memory(total_bytes=96, available_bytes=96), needed_bytes=100), "WARN"),
        (v.judge_memory(Memory(total_bytes=94, available_bytes=94), needed_bytes=100), "FAIL"),
        (v.judge_memory(Memory(total_bytes=200, available_bytes=60), needed_bytes=100), "WARN"),
        (v.judge_memory(Memory(total_bytes=200, available_bytes=40), needed_bytes=100), "FAIL"),
        (v.judge_memory(Memory(total_bytes=200, available_bytes=None), needed_bytes=100), "UNKNOWN"),
        (v.judge_memory(Memory(total_bytes=None, available_bytes=200), needed_bytes=100), "UNKNOWN"),
        (v.judge_shared_memory(SharedMemory(free_bytes=100, total_bytes=100), needed_bytes=100), "PASS"),
        (v.judge_shared_memory(SharedMemory(free_bytes=99, total_bytes=100), needed_bytes=100), "FAIL"),
        (v.judge_shared_memory(SharedMemory(free_bytes=None, total_bytes=None), needed_bytes=0), "UNKNOWN"),
        (v.judge_limits(ResourceLimits(open_files=4096, processes=math.inf, locked_bytes=0)), "PASS"),
        (v.judge_limits(ResourceLimits(open_files=1024, processes=math.inf, locked_bytes=0)), "WARN"),
        (v.judge_limits(ResourceLimits(open_files=256, processes=math.inf, locked_bytes=0)), "FAIL"),
        (v.judge_limits(ResourceLimits(open_files=9000, processes=100, locked_bytes=0)), "FAIL"),
        (v.judge_limits(ResourceLimits(open_files=9000, processes=None, locked_bytes=None)), "UNKNOWN"),
        (v.judge_clock(CLOCK), "PASS"),
        (v.judge_clock(replace(CLOCK, drift_ms=-51)), "WARN"),
        (v.judge_clock(replace(CLOCK, drift_ms=501)), "FAIL"),
        (v.judge_clock(replace(CLOCK, wall=0.0)), "FAIL"),
        (v.judge_clock(replace(CLOCK, store_offset_ms=60_000)), "FAIL"),
        (v.judge_clock(replace(CLOCK, source="hpet")), "WARN"),
        (v.judge_clock(replace(CLOCK, source=None)), "UNKNOWN"),
        (v.judge_clock(replace(CLOCK, drift_ms=math.nan)), "UNKNOWN"),
        (v.judge_ports(PORTS), "PASS"),
        (v.judge_ports(replace(PORTS, ports=())), "PASS"),
        (v.judge_ports(replace(PORTS, loopback_ms=20.0)), "WARN"),
        (v.judge_ports(replace(PORTS, loopback_ms=None)), "UNKNOWN"),
        (v.judge_ports(replace(PORTS, loopback_ms=None, loopback_problem="refused")), "FAIL"),
        (v.judge_ports(replace(PORTS, ports=(Port(port=1, problem="in use"),))), "FAIL"),
        (v.judge_store(Store(path="/c", seconds=0.1)), "PASS"),
        (v.judge_store(Store(path="/c", seconds=3.0)), "WARN"),
        (v.judge_store(Store(path="/c", seconds=0.1, step="write", problem="denied")), "FAIL"),
        (v.judge_dataset(Dataset(uri="file:///m", found="digits")), "PASS"),
        (v.judge_dataset(Dataset(uri="file:///m")), "UNKNOWN"),
        (v.judge_dataset(Dataset(uri="file:///m", problem="corrupt")), "FAIL"),
        (v.judge_two_steps(TwoSteps(losses=(2.0, 1.9))), "PASS"),
        (v.judge_two_steps(TwoSteps(losses=(2.0, math.nan))), "FAIL"),
        (v.judge_two_steps(TwoSteps(losses=(2.0, math.inf))), "FAIL"),
        (v.judge_two_steps(TwoSteps(losses=(2.0,))), "FAIL"),
        (v.judge_two_steps(TwoSteps()), "UNKNOWN"),
        (v.judge_two_steps(TwoSteps(losses=(2.0, 1.9), problem="shape")), "FAIL"),
    ],
)
def test_verdicts_by_measurement(judged: v.Judgement, want: str) -> None:
    assert judged.verdict == want
    assert judged.value
    assert judged.threshold
    assert want == "PASS" or judged.hint or judged.evidence


@given(better=sizes, worse=sizes, total=sizes, needed=sizes, inodes=st.integers(0, 10**7))
def test_less_disk_is_never_better(better: int, worse: int, total: int, needed: int, inodes: int) -> None:
    better, worse = max(better, worse), min(better, worse)
    disk = replace(DISK, free_bytes=better, total_bytes=total, free_inodes=inodes)
    judged = v.judge_disk(disk, needed_bytes=needed)
    never_better(v.judge_disk(replace(disk, free_bytes=worse), needed_bytes=needed), judged)
    never_better(v.judge_disk(replace(disk, free_inodes=inodes // 2), needed_bytes=needed), judged)
    never_better(v.judge_disk(disk, needed_bytes=2 * needed), judged)
    never_better(v.judge_disk(replace(disk, problem="torn"), needed_bytes=needed), judged)


@given(total=sizes, available=sizes, needed=sizes, loss=sizes)
def test_less_memory_is_never_better(total: int, available: int, needed: int, loss: int) -> None:
    judged = v.judge_memory(Memory(total_bytes=total, available_bytes=available), needed_bytes=needed)
    less = Memory(total_bytes=max(0, total - loss), available_bytes=available)
    never_better(v.judge_memory(less, needed_bytes=needed), judged)
    less = Memory(total_bytes=total, available_bytes=max(0, available - loss))
    never_better(v.judge_memory(less, needed_bytes=needed), judged)
    shared = v.judge_shared_memory(SharedMemory(free_bytes=available, total_bytes=total), needed_bytes=needed)
    smaller = SharedMemory(free_bytes=max(0, available - loss), total_bytes=total)
    never_better(v.judge_shared_memory(smaller, needed_bytes=needed), shared)


@given(files=reals, processes=reals, loss=reals)
def test_lower_limits_are_never_better(files: float, processes: float, loss: float) -> None:
    judged = v.judge_limits(ResourceLimits(open_files=files, processes=processes, locked_bytes=0))
    fewer = ResourceLimits(open_files=files - loss, processes=processes, locked_bytes=0)
    never_better(v.judge_limits(fewer), judged)
    fewer = ResourceLimits(open_files=files, processes=processes - loss, locked_bytes=0)
    never_better(v.judge_limits(fewer), judged)


@given(drift=reals, offset=reals, more=reals, sign=st.sampled_from([-1, 1]))
def test_a_worse_clock_is_never_better(drift: float, offset: float, more: float, sign: int) -> None:
    clock = replace(CLOCK, drift_ms=sign * drift, store_offset_ms=sign * offset)
    judged = v.judge_clock(clock)
    never_better(v.judge_clock(replace(clock, drift_ms=sign * (drift + more))), judged)
    never_better(v.judge_clock(replace(clock, store_offset_ms=sign * (offset + more))), judged)
    never_better(v.judge_clock(replace(clock, source="hpet")), judged)
    never_better(v.judge_clock(replace(clock, wall=1.0)), judged)


@given(milliseconds=reals, seconds=reals, more=reals)
def test_slower_is_never_better(milliseconds: float, seconds: float, more: float) -> None:
    slower = replace(PORTS, loopback_ms=milliseconds + more)
    never_better(v.judge_ports(slower), v.judge_ports(replace(PORTS, loopback_ms=milliseconds)))
    store = Store(path="/c", seconds=seconds)
    never_better(v.judge_store(replace(store, seconds=seconds + more)), v.judge_store(store))


@pytest.mark.parametrize(
    ("measured", "judge"),
    [
        (DISK, partial(v.judge_disk, needed_bytes=GIB)),
        (Memory(total_bytes=100, available_bytes=100), partial(v.judge_memory, needed_bytes=50)),
        (ResourceLimits(open_files=1e6, processes=1e6, locked_bytes=1), v.judge_limits),
        (CLOCK, v.judge_clock),
        (PORTS, v.judge_ports),
    ],
)
def test_a_field_that_the_system_does_not_tell_is_never_a_pass(measured: Any, judge: Any) -> None:
    said_by_others = {
        "path",
        "problem",
        "probe_bytes",
        "probe_seconds",
        "loopback_problem",
        "ports",
        "locked_bytes",
        "store_offset_ms",
    }
    for name in measured.__dataclass_fields__:
        if name not in said_by_others:
            assert judge(replace(measured, **{name: None})).verdict == "UNKNOWN", name


def test_the_worst_decides_and_nothing_is_unknown() -> None:
    assert v.worst() == "UNKNOWN"
    assert v.worst("PASS", "WARN", "UNKNOWN") == "UNKNOWN"
    assert v.worst("UNKNOWN", "FAIL", "PASS") == "FAIL"
    assert v.worst("PASS", "WARN") == "WARN"


def test_a_taken_port_says_who_holds_it_and_what_to_do() -> None:
    judged = v.judge_ports(replace(PORTS, ports=(Port(port=7001, problem="in use", holder="python (pid 12)"),)))
    assert judged.evidence == "port 7001: in use, held by python (pid 12)"
    assert judged.hint == "end python (pid 12), or choose another port than 7001"
