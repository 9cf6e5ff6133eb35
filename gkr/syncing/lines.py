"""One look at a run's sync as text; pure."""

from __future__ import annotations

from collections.abc import Sequence

from gkr.output import table
from gkr.syncing.asking import SyncNow
from gkr.watch.text import percent, short_count, short_duration
from spec.sync_status import FragmentStatus, MemberStatus, SyncStatus

MOST_FRAGMENTS = 12
"""With more fragments, only those with an open round are shown."""


def lines(look: SyncNow, *, now: float) -> list[str]:
    """For a person: what waits for whom first, then every fragment and every learner."""
    status = look.status
    found = [*_head(look, now=now), "", *_waits(status, now=now)]
    shown, hidden = _chosen(status.fragments)
    if shown:
        found += ["", table([_fragment(one, now=now) for one in shown], header=_FRAGMENT_HEADER)]
    if hidden:
        found.append(f"{hidden} more fragments have no open round; -o json shows all")
    if status.members:
        found += ["", table([_member(one) for one in status.members], header=_MEMBER_HEADER)]
    if status.refusals:
        told = ", ".join(f"{reason} {count}" for reason, count in sorted(status.refusals.items()))
        found += ["", f"refused: {told}"]
    return found


def _head(look: SyncNow, *, now: float) -> list[str]:
    status = look.status
    merged = f"{short_count(status.samples_total)} of {short_count(status.target_samples)} samples merged"
    share = percent(status.samples_total, status.target_samples)
    found = [
        f"run       {look.run} ({look.run_state})",
        f"sync      {status.mode}, {status.state.lower()}, version {status.version}, epoch {status.epoch}",
        f"progress  {merged}{f' ({share})' if share else ''}",
        f"source    {_source(look, now=now)}",
    ]
    if status.alarm:
        found.append(f"ALARM     {status.alarm}")
    return found


def _source(look: SyncNow, *, now: float) -> str:
    if look.source == "syncer":
        return "the syncer, asked now"
    if not look.seen:
        return f"no event yet{f'; {look.trouble}' if look.trouble else ''}"
    if look.over:
        return f"events; the last is {short_duration(now - look.seen)} old"
    return f"events, as of {short_duration(now - look.seen)} ago, because {look.trouble}"


def _waits(status: SyncStatus, *, now: float) -> list[str]:
    """What nobody has to work out from a table."""
    if status.state == "ENDED":
        return ["no round is open: the run ended before its last merge"]
    if status.seed_from:
        return [f"waits for learner {status.seed_from} to send the initial weights"]
    if status.final:
        return [f"the last merge is published: weights {status.theta_sha256[:12]}"]
    found: list[str] = []
    for one in status.fragments:
        if not one.stage or (one.stage == "OPEN" and not one.arrived and status.state == "SERVING"):
            continue  # nobody is kept waiting yet
        which = f"fragment {one.fragment}, " if len(status.fragments) > 1 else ""
        why = one.why or (f"waits for {', '.join(one.waiting_for)}" if one.waiting_for else one.stage.lower())
        found.append(f"{which}round {one.round}: {why}{_until(one.until, now=now)}")
    return found or ["no contribution waits: learners train"]


def _until(until: float | None, *, now: float) -> str:
    if until is None:
        return ""
    return f", at most {short_duration(until - now)} more" if until > now else ", the deadline has passed"


def _chosen(fragments: Sequence[FragmentStatus]) -> tuple[list[FragmentStatus], int]:
    if len(fragments) <= MOST_FRAGMENTS:
        return list(fragments), 0
    shown = [one for one in fragments if one.stage]
    return shown, len(fragments) - len(shown)


_FRAGMENT_HEADER = (
    "FRAGMENT", "VERSION", "ROUND", "STAGE", "ARRIVED", "WAITS FOR", "CLOSES IN", "OUTER NORM", "COSINE", "MERGED IN",
    "BYTES",
)  # fmt: skip
_MEMBER_HEADER = (
    "LEARNER", "STATE", "GEN", "STEP", "S/STEP", "IN FLIGHT", "PENDING", "MERGED", "DISCARDED", "BASE", "STALE",
    "BYTES", "HEARD", "BLOCKED",
)  # fmt: skip


def _fragment(one: FragmentStatus, *, now: float) -> list[str]:
    known = one.version > 0
    arrived = [f"{name}{f' (stale {age})' if (age := one.staleness.get(name)) else ''}" for name in one.arrived]
    return [
        f"{one.fragment}",
        f"{one.version}",
        f"{one.round}" if one.stage else "-",
        one.stage.lower() or "-",
        ", ".join(arrived) or "-",
        ", ".join(one.waiting_for) or "-",
        "-" if one.until is None else short_duration(max(0.0, one.until - now)),
        f"{one.outer_gradient_norm:.3g}" if known else "-",
        "-" if one.cosine is None else f"{one.cosine:.2f}",
        f"{one.merge_seconds + one.durable_seconds:.2f}s" if known else "-",
        short_count(one.bytes_in) if known else "-",
    ]


def _member(one: MemberStatus) -> list[str]:
    blocked = [f"{cause} {short_duration(seconds)}" for cause, seconds in one.blocked_seconds.items() if seconds >= 1]
    return [
        one.learner,
        one.state.lower() or "-",
        f"{one.generation}" if one.generation else "-",
        f"{one.step}",
        f"{one.step_seconds:.3g}" if one.step_seconds else "-",
        f"{one.in_flight_steps}",
        short_count(one.pending_samples),
        short_count(one.merged_samples),
        short_count(one.discarded_samples),
        _span(one.base_versions),
        _span(one.staleness),
        short_count(one.bytes_in),
        "-" if one.lease_age_seconds is None else f"{short_duration(one.lease_age_seconds)} ago",
        ", ".join(blocked) or "-",
    ]


def _span(values: Sequence[int]) -> str:
    """`7`, or `6..7` over fragments that differ."""
    known = [one for one in values if one >= 0]
    if not known:
        return "-"
    return f"{known[0]}" if min(known) == max(known) else f"{min(known)}..{max(known)}"
