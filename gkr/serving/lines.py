"""One look at a run's services as text; pure."""

from __future__ import annotations

from collections.abc import Sequence

from gkr.output import table
from gkr.serving.told import ReplicaNow
from gkr.watch.text import short_count, short_duration

MOST_RANKS = 16
"""Of one look: those with most unanswered requests."""
_REPLICA_HEADER = (
    "LEARNER", "REPLICA", "STATE", "REQUESTS", "ERRORS", "CLIENTS", "QUEUED", "BYTES", "CREDIT", "BATCH", "P50", "P99",
    "WEIGHTS", "RESTARTS", "HEARD",
)  # fmt: skip
_CLASS_HEADER = ("LEARNER", "REPLICA", "CLASS", "REQUESTS", "QUEUED", "P50", "P99")
_RANK_HEADER = ("RANK", "REPLICA", "UNANSWERED", "BYTES", "ANSWERED")


def lines(run: str, state: str, replicas: Sequence[ReplicaNow], *, now: float) -> list[str]:
    """For a person: what is wrong first, then every replica, its classes, and who waits most."""
    found = [f"run       {run} ({state})"]
    if not replicas:
        return [*found, "", "the run has no services"]
    found += [f"{_name(one)} of {one.learner}: {one.state} after {one.cause}" for one in replicas if _is_broken(one)]
    found += ["", table([_replica(one, now=now) for one in replicas], header=_REPLICA_HEADER)]
    classes = [row for one in replicas for row in _classes(one)]
    if classes:
        found += ["", table(classes, header=_CLASS_HEADER)]
    waiting = sorted((row for one in replicas for row in _ranks(one)), key=lambda row: (-int(row[0]), row[1:]))
    if waiting:
        found += ["", table([row[1:] for row in waiting[:MOST_RANKS]], header=_RANK_HEADER)]
    if len(waiting) > MOST_RANKS:
        found.append(f"{len(waiting) - MOST_RANKS} more ranks wait; -o json shows them")
    return found


def _is_broken(one: ReplicaNow) -> bool:
    return one.state in ("restarting", "given up")


def _name(one: ReplicaNow) -> str:
    return f"{one.service}-{one.replica}"


def _replica(one: ReplicaNow, *, now: float) -> list[str]:
    stats = one.stats
    if one.state == "shared":
        return [one.learner, one.service, f"shared: {one.cause}", *["-"] * 12]
    if stats is None:
        return [one.learner, _name(one), one.state, *["-"] * 10, f"{one.restarts}", "-"]
    state = one.state
    if stats.computing_seconds >= 1:
        state = f"{state}, one batch for {short_duration(stats.computing_seconds)}"
    credit = f"{stats.grant}" + (f" / {_size(stats.grant_bytes)}" if stats.grant_bytes else "")
    return [
        one.learner,
        _name(one),
        state,
        short_count(stats.requests),
        f"{stats.errors}",
        f"{stats.clients}",
        f"{stats.queued}",
        _size(stats.queued_bytes),
        credit if stats.grant else "-",
        f"{stats.batch_mean:.1f}",
        _milliseconds(stats.p50_ms, of=stats.requests),
        _milliseconds(stats.p99_ms, of=stats.requests),
        stats.weights[:12] or "-",
        f"{one.restarts}",
        f"{short_duration(now - one.seen)} ago",
    ]


def _classes(one: ReplicaNow) -> list[list[str]]:
    told = one.stats.by_priority if one.stats is not None else {}
    return [
        [
            one.learner, _name(one), name, short_count(of.requests), f"{of.queued}",
            _milliseconds(of.p50_ms, of=of.requests), _milliseconds(of.p99_ms, of=of.requests),
        ]
        for name, of in told.items()
    ]  # fmt: skip


def _ranks(one: ReplicaNow) -> list[list[str]]:
    """With the number to sort by in front."""
    if one.stats is None:
        return []
    grant = one.stats.grant
    return [
        [
            f"{of.outstanding}", name, _name(one), f"{of.outstanding} of {grant}", _size(of.outstanding_bytes),
            short_count(of.requests),
        ]
        for name, of in one.stats.by_rank.items()
        if of.outstanding
    ]  # fmt: skip


def _milliseconds(value: float, *, of: int) -> str:
    """A dash where no request has been measured."""
    if not of:
        return "-"
    return f"{value / 1000:.1f}s" if value >= 1000 else f"{value:.3g}ms"


def _size(value: int) -> str:
    """About, in binary units."""
    for size, unit in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value}"
