"""The syncer in Prometheus' text form: `GET /v1/<run>/metrics` of the control port.

Two sources, neither of them new: the status call's answer as gauges and counters, and histograms over the merges of
this process, fed by its events. Reading never changes anything. What only a learner knows comes with its heartbeats, so
one place to scrape shows all of a run's sync. The ledger's balance is not here: what ran is known by the learners'
progress pages, so it is in the run's summary.
"""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spec.events import SyncMerged
from training.sync.messages import MemberStatus, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "gkr_sync_"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


class SyncMetrics:
    """Metrics of one syncer process."""

    def __init__(self, *, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._clock, self._started, self._busy = wall, clock, clock(), 0.0
        self._merges: dict[int, SyncMerged] = {}
        self._merged = 0
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(_PREFIX + name, text, registry=self._registry, buckets=tuple(buckets))

        self._collecting = histogram("quorum_wait_seconds", "From a round's first arrival to its seal", _SECONDS)
        self._grace = histogram("grace_seconds", "From a window's quorum to its seal", _SECONDS)
        self.publishing = histogram("publish_seconds", "From a durable merge to its answers", _SECONDS)
        self._merging = histogram("merge_seconds", "Merging the contributions of a round", _SECONDS)
        self._committing = histogram("durable_seconds", "Writing a merge durably", _SECONDS)
        self._participants = histogram("participants", "Contributions in a merge", _COUNTS)
        self._staleness = histogram("staleness_versions", "Versions between a contribution's base and merge", _COUNTS)

    @contextmanager
    def working(self) -> Generator[None]:
        """The syncer's worker is busy for the time of this block."""
        started = self._clock()
        try:
            yield
        finally:
            self._busy += self._clock() - started

    def observe(self, event: Any) -> None:
        """Take note of a merge; other events tell nothing here."""
        if not isinstance(event, SyncMerged):
            return
        self._merges[event.fragment] = event
        self._collecting.observe(event.open_seconds)
        self._grace.observe(event.grace_seconds)
        self._merging.observe(event.merge_seconds)
        self._committing.observe(event.durable_seconds)
        arrived = [one for one in event.members if one.arrived_seconds is not None]
        self._participants.observe(len(arrived))
        self._merged += len(arrived)
        for one in arrived:
            self._staleness.observe(one.staleness)

    def render(self, status: Status, *, verdicts: Mapping[str, int]) -> bytes:
        """All metrics now. `verdicts`: answers other than merged so far, by kind."""
        verdicts = {**verdicts, "merged": self._merged}
        registry = CollectorRegistry(auto_describe=False)
        busy = self._busy / max(self._clock() - self._started, 1e-9)
        duty = _gauge("duty_cycle", "Share of this process's time in which its worker was busy", (), {(): busy})
        families = [duty, *_whole(status, verdicts), *self._by_fragment(status), *_by_learner(status)]
        registry.register(_Families(families))
        return generate_latest(self._registry) + generate_latest(registry)

    def _by_fragment(self, status: Status) -> Iterator[Metric]:
        merges, now = self._merges, self._wall()
        versions = {(f"{one.fragment}",): one.version for one in status.fragments}
        yield _gauge("version", "Version of a fragment", ("fragment",), versions)
        since = {(f"{one.fragment}",): one.accumulated for one in status.fragments}
        yield _gauge("accumulated_rounds", "Merged since the momentum moved last", ("fragment",), since)
        told: dict[str, tuple[str, Callable[[SyncMerged], float | None]]] = {
            "outer_gradient_norm": ("Of the last merge", lambda one: one.outer_gradient_norm),
            "pairwise_cosine_min": ("Lowest between displacements of the last merge", lambda one: one.cosine),
            "pairwise_cosine_mean": ("Mean between displacements of the last merge", lambda one: one.mean_cosine),
            "momentum_cosine": ("Between outer gradient and momentum before it", lambda one: one.momentum_cosine),
            "round_share": ("Of a full round that the last merge was", lambda one: one.share),
            "state_bytes": ("Of the state as it was written last", lambda one: one.state_bytes),
            "last_merge_age_seconds": ("Since the last merge", lambda one: now - one.time),
        }
        for name, (text, value) in told.items():
            found = {(f"{key}",): known for key, one in sorted(merges.items()) if (known := value(one)) is not None}
            yield _gauge(name, text, ("fragment",), found)
        arrived = [(key, one) for key, merge in sorted(merges.items()) for one in merge.members if one.loss is not None]
        norms = {(one.learner, f"{key}"): one.norm for key, one in arrived}
        yield _gauge("displacement_norm", "Of a learner's part of the last merge", ("learner", "fragment"), norms)
        losses = {(one.learner, f"{key}"): one.loss or 0.0 for key, one in arrived}
        yield _gauge("inner_loss", "Of a learner before it contributed", ("learner", "fragment"), losses)


class _Families:
    """Prepared metrics as a collector."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _whole(status: Status, verdicts: Mapping[str, int]) -> Iterator[Metric]:
    yield _gauge("epoch", "Fencing number of this syncer", (), {(): status.epoch})
    yield _counter("merges", "Merges over all fragments", (), {(): max(0, status.version)})
    yield _gauge("state", "1 for the state the run's sync is in", ("state",), {(status.state,): 1})
    yield _gauge("alarm", "1 while a person has to mend something", (), {(): float(bool(status.alarm))})
    yield _counter("samples_merged", "In the fragment that has the fewest", (), {(): status.samples_total})
    yield _gauge("samples_target", "Samples that end the run", (), {(): status.target_samples})
    answered = {(kind,): count for kind, count in verdicts.items()}
    yield _counter("contributions", "Answers to contributions", ("verdict",), answered)
    refused = {(reason,): count for reason, count in status.refusals.items() if reason not in verdicts}
    yield _counter("refused_messages", "Messages refused before they counted as contributions", ("reason",), refused)
    states = Count(one.state for one in status.members)
    yield _gauge("members", "Learners by state", ("state",), {(state,): count for state, count in states.items()})


_OF_LEARNER: tuple[tuple[str, str, Callable[[MemberStatus], float]], ...] = (
    ("lease_age_seconds", "Since a learner's last sign of life", lambda one: one.lease_age_seconds),
    ("generation", "Process of a learner that may contribute", lambda one: one.generation),
    ("step", "Inner step of a learner", lambda one: one.step),
    ("step_time_seconds", "Of an inner step", lambda one: one.step_seconds),
    ("inflight_steps", "Steps since the oldest unanswered contribution", lambda one: one.in_flight_steps),
    ("samples_pending", "Run, not merged yet", lambda one: one.pending_samples),
    ("transfer_rate", "Bytes per second at which its last merged contribution came", lambda one: one.transfer_rate),
)
_MEASURED: tuple[tuple[str, str, str], ...] = (
    ("goodput", "goodput", "Time of merged steps as a share of this attempt's time"),
    ("correction_norm", "apply_correction_norm", "How far the last answer moved a learner's weights"),
    ("compression_error", "compression_relative_error", "Of rank 0's last displacement, in the run's codec"),
)
"""Names in a heartbeat, and here."""
_COUNTED_OF_LEARNER: tuple[tuple[str, str, Callable[[MemberStatus], float]], ...] = (
    ("learner_samples_merged", "In the fragment that has the fewest", lambda one: one.merged_samples),
    ("learner_samples_discarded", "In the fragment that lost most", lambda one: one.discarded_samples),
    ("bytes_in", "Received from a learner by this process", lambda one: one.bytes_in),
    ("bytes_out", "Weights sent to a learner by this process", lambda one: one.bytes_out),
    ("resends", "Parts that rank 0 had to send again", lambda one: one.measures.get("resends", 0)),
)


def _by_learner(status: Status) -> Iterator[Metric]:
    members = status.members
    for make, table in ((_gauge, _OF_LEARNER), (_counter, _COUNTED_OF_LEARNER)):
        for name, text, value in table:
            yield make(name, text, ("learner",), {(one.learner,): value(one) for one in members})
    for key, name, text in _MEASURED:
        found = {(one.learner,): one.measures[key] for one in members if key in one.measures}
        yield _gauge(name, text, ("learner",), found)
    labels = ("learner", "fragment")
    bases = {(one.learner, f"{at}"): base for one in members for at, base in enumerate(one.base_versions)}
    yield _gauge("base_version", "Of a learner's last contribution; -1: none", labels, bases)
    stale = {(one.learner, f"{at}"): age for one in members for at, age in enumerate(one.staleness)}
    yield _gauge("learner_staleness_versions", "Versions since that base", labels, stale)
    blocked = {(one.learner, cause): seconds for one in members for cause, seconds in one.blocked_seconds.items()}
    yield _counter("train_blocked_seconds", "Training stood still, in this attempt", ("learner", "cause"), blocked)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    return _filled(GaugeMetricFamily(_PREFIX + name, text, labels=labels), values)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    return _filled(CounterMetricFamily(_PREFIX + name, text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float]) -> Metric:
    for key, value in values.items():
        family.add_metric(key, value)
    return family
