"""What the syncer tells whoever asks: which round of which fragment, who is waited for, why, and until when."""

from __future__ import annotations

from typing import Literal

from training.sync.core import Core
from training.sync.members import Round, State
from training.sync.messages import FragmentStatus, Ledger, MemberStatus, Status


def describe_status(core: Core) -> Status:
    """The status now. Its caller holds the lock."""
    state, ledger = core.state, core.state.ledger
    fragments = [_describe_fragment(core, fragment) for fragment in range(state.rules.fragments)]
    first = fragments[0]
    return Status(
        run=state.rules.run,
        epoch=state.epoch,
        version=ledger.version,
        state=_name_state(ledger),
        stage=first.stage,
        round=first.round,
        arrived=first.arrived,
        waiting_for=first.waiting_for,
        until=first.until,
        members=_describe_members(core),
        samples_total=ledger.samples_total,
        target_samples=state.rules.target_samples,
        model_sha256=ledger.model_sha256,
        theta_sha256=ledger.theta_sha256,
        final=ledger.final,
        seed_from=state.rules.home if ledger.version < 0 else "",
        alarm=core.alarm,
        mode=state.rules.mode,
        fragments=fragments,
        refusals={kind: count for kind, count in sorted(core.verdicts.items()) if kind != "merged"},
    )


def _name_state(ledger: Ledger) -> Literal["SEEDING", "SERVING", "DRAINING", "FINAL"]:
    if ledger.final:
        return "FINAL"
    if ledger.draining:
        return "DRAINING"
    return "SERVING" if ledger.version >= 0 else "SEEDING"


def _describe_members(core: Core) -> list[MemberStatus]:
    versions, now = core.state.versions, core.clock()
    found: list[MemberStatus] = []
    for name, one in sorted(core.state.members.items()):
        bases = [place.base_version for place in one.record.places]
        found.append(
            MemberStatus(
                learner=name,
                generation=one.generation,
                state=one.state,
                lease_age_seconds=round(now - one.heard, 3),
                step=one.step,
                pending_samples=one.pending,
                merged_samples=one.record.merged_samples,
                discarded_samples=one.record.discarded_samples,
                step_seconds=one.step_seconds,
                in_flight_steps=one.in_flight_steps,
                base_versions=bases,
                staleness=[version - max(base, 0) for version, base in zip(versions, bases, strict=True)],
                blocked_seconds=dict(one.blocked_seconds),
                bytes_in=core.received[name],
                bytes_out=core.sent[name],
                transfer_rate=core.rates.get(name, 0.0),
                measures=dict(one.measures),
            )
        )
    return found


def _describe_fragment(core: Core, fragment: int) -> FragmentStatus:
    state, current, last = core.state, core.state.round(fragment), core.merges.get(fragment)
    version = state.versions[fragment]
    return FragmentStatus(
        fragment=fragment,
        version=version,
        round=current.number if current else version,
        stage=current.stage if current else "",
        arrived=sorted(current.arrivals) if current else [],
        waiting_for=state.waiting_for(fragment),
        why=_explain(state, current),
        until=core.until(fragment),
        staleness={name: current.staleness(name) for name in sorted(current.arrivals)} if current else {},
        bytes_in=last.bytes_in if last else 0,
        outer_gradient_norm=last.outer_gradient_norm if last else 0.0,
        cosine=last.cosine if last else None,
        merge_seconds=last.merge_seconds if last else 0.0,
        durable_seconds=last.durable_seconds if last else 0.0,
        accumulated=core.arrays[fragment].outer.rounds_accumulated if core.arrays else 0.0,
    )


def _explain(state: State, current: Round | None) -> str:
    """One sentence: what the round waits for."""
    if current is None:
        return "the run is final" if state.ledger.final else f"{state.rules.home} has not sent the initial weights"
    if state.finishing:
        return "the final model is being published"
    if current.stage != "OPEN":
        return "the contributions are being merged and made durable"
    missing = ", ".join(state.waiting_for(current.fragment))
    if not current.arrivals:
        if state.ledger.draining:
            return "the run drains: last contributions are on their way"
        return "no learner has contributed yet"
    if current.quorum_at is not None:
        return f"enough have contributed; it waits for {missing} until its grace is over"
    if current.only_last:
        return f"the run drains: {missing} may contribute once more until its deadline"
    if len(current.arrivals) < state.quorum:
        return f"{len(current.arrivals)} of {state.quorum} needed contributions are here; it waits for {missing}"
    return f"it waits for {missing} until its deadline"
