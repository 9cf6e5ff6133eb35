"""Runs the checks of a node: collectors side by side, each with a deadline, then the pure verdicts.

A collector that hangs or raises gives UNKNOWN; nothing it does can hold the result back. Its thread is a daemon and
is left behind, since a thread in a system call that does not return cannot be ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from spec.errors import GkrError, PreflightError
from spec.events import Check
from storage import file_path, open_bucket
from storage.cache import Cache
from storage.datasets import default_cache
from training.preflight import collect
from training.preflight import verdicts as v
from training.preflight.measurements import TwoSteps
from training.preflight.request import PreflightRequest
from training.preflight.two_steps_job import answer, ask

_UNKNOWN_HINT = "run the check again; if it stays so, look at this node's disk, network and log by hand"


@dataclass(frozen=True, slots=True)
class Probe:
    """One check: how to measure and how to judge."""

    id: str
    name: str
    collect: Callable[[], Any]
    judge: Callable[[Any], v.Judgement]


class Forker(Protocol):
    """What is needed of `training.node.Node`."""

    @property
    def folder(self) -> Path: ...

    def run_once(
        self, job: str, *, call: str, environment: dict[str, str], log: Path, deadline_seconds: float
    ) -> int | None: ...


def host_probes(request: PreflightRequest) -> list[Probe]:
    """The checks of the host."""
    free = partial(v.judge_disk, needed_bytes=request.disk_bytes)
    enough = partial(v.judge_memory, needed_bytes=request.memory_bytes)
    shared = partial(v.judge_shared_memory, needed_bytes=request.shm_bytes)
    store, folder = open_bucket(request.checkpoints), file_path(request.checkpoints)
    disk = partial(collect.disk, probe_bytes=request.probe_bytes)
    probes = [Probe("H1", "disk", partial(disk, folder), free)] if folder is not None else []
    if request.scratch is not None:
        enough_scratch = partial(v.judge_disk, needed_bytes=v.MIB)
        probes.append(Probe("H1.scratch", "disk of the node", partial(disk, request.scratch), enough_scratch))
    probes += [
        Probe("H3.memory", "memory", collect.memory, enough),
        Probe("H3.shm", "shared memory", collect.shared_memory, shared),
        Probe("H3.limits", "limits", collect.limits, v.judge_limits),
        Probe("H4", "clock", partial(collect.clock, store), v.judge_clock),
        Probe("N5", "ports", partial(collect.ports, request.ports, host=request.host), v.judge_ports),
        Probe("S1", "checkpoint folder", partial(collect.store, store), v.judge_store),
    ]
    if request.manifest:
        probes.append(
            Probe("S3", "dataset", partial(collect.dataset, request.manifest, pick=request.node), v.judge_dataset)
        )
    return probes


def run_host_checks(request: PreflightRequest) -> list[Check]:
    """All checks of the host, in a fixed order, within the request's deadline."""
    return Running(host_probes(request), deadline_seconds=request.deadline_seconds).finish()


def check_node(request: PreflightRequest, *, node: Forker, log: Path) -> list[Check]:
    """All checks of a node, the two steps of the real model included, which run in a process that the node forks."""
    if request.data_cache_limit is not None:  # they are the first that copy anything
        Cache(default_cache(), limit_bytes=request.data_cache_limit)
    running = Running(host_probes(replace(request, scratch=node.folder)), deadline_seconds=request.deadline_seconds)
    if request.train is None:
        return running.finish()
    two_steps = run_two_steps(request, fork=partial(_forked, request, node=node, log=log))
    return [*running.finish(), two_steps]


def run_two_steps(request: PreflightRequest, *, fork: Callable[[], TwoSteps | None]) -> Check:
    """M1. `fork` runs the two steps in a child and returns what became of them, or none if they did not end in time."""
    started = time.monotonic()
    try:
        measured = fork()
    except Exception as error:  # noqa: BLE001 - the boundary of a check: whatever broke, the verdict is UNKNOWN
        judged = _unknown(error)
    else:
        judged = v.judge_two_steps(measured) if measured else _late(request.two_steps_deadline_seconds)
    return _check("M1", "two steps of the model", judged, seconds=time.monotonic() - started)


def refusal(checks: Sequence[Check], *, node: str) -> PreflightError | None:
    """One error that names every failed check of a node with its remedy; none if nothing failed."""
    failed = [check for check in checks if check.verdict == "FAIL"]
    if not failed:
        return None
    said = "; ".join(f"{one.name}: {one.value} (needs {one.threshold}) {one.evidence}".rstrip() for one in failed)
    return PreflightError(
        f"preflight failed: {said}", where=node, hint="; ".join(one.hint for one in failed if one.hint)
    )


class Running:
    """Probes under way, one daemon thread each."""

    def __init__(self, probes: Sequence[Probe], *, deadline_seconds: float) -> None:
        self._probes, self._deadline_seconds = list(probes), deadline_seconds
        self._started = time.monotonic()
        self._results: queue.SimpleQueue[tuple[int, Check]] = queue.SimpleQueue()
        for number, probe in enumerate(self._probes):
            threading.Thread(target=self._run, args=(number, probe), name=f"preflight-{probe.id}", daemon=True).start()

    def finish(self) -> list[Check]:
        """One check per probe, in their order; what is not there by the deadline is UNKNOWN."""
        found: dict[int, Check] = {}
        end = self._started + self._deadline_seconds
        while len(found) < len(self._probes):
            try:
                number, check = self._results.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            found[number] = check
        late = _late(self._deadline_seconds)
        return [
            found.get(number) or _check(probe.id, probe.name, late, seconds=self._deadline_seconds)
            for number, probe in enumerate(self._probes)
        ]

    def _run(self, number: int, probe: Probe) -> None:
        started = time.monotonic()
        try:
            judged = probe.judge(probe.collect())
        except Exception as error:  # noqa: BLE001 - the boundary of a check: whatever broke, the verdict is UNKNOWN
            judged = _unknown(error)
        self._results.put((number, _check(probe.id, probe.name, judged, seconds=time.monotonic() - started)))


def _forked(request: PreflightRequest, *, node: Forker, log: Path) -> TwoSteps | None:
    assert request.train is not None
    environment = ask(node.folder, train=request.train, manifest=request.manifest)
    code = node.run_once(
        "two-steps",
        call="two_steps",
        environment=environment,
        log=log,
        deadline_seconds=request.two_steps_deadline_seconds,
    )
    return None if code is None else answer(node.folder, code=code, log=log)


def _unknown(error: Exception) -> v.Judgement:
    evidence, hint = f"{type(error).__name__}: {error}", _UNKNOWN_HINT
    if isinstance(error, GkrError):
        evidence, hint = error.message, error.hint or hint
    return v.Judgement(verdict="UNKNOWN", value="not measured", threshold="a measurement", evidence=evidence, hint=hint)


def _late(seconds: float) -> v.Judgement:
    return v.Judgement(
        verdict="UNKNOWN",
        value="no answer",
        threshold=f"an answer within {seconds:g} s",
        evidence="the check hangs",
        hint=_UNKNOWN_HINT,
    )


def _check(identity: str, name: str, judged: v.Judgement, *, seconds: float) -> Check:
    return Check(
        id=identity,
        name=name,
        verdict=judged.verdict,
        value=judged.value,
        threshold=judged.threshold,
        evidence=judged.evidence,
        hint="" if judged.verdict == "PASS" else judged.hint,
        seconds=round(seconds, 4),
    )
