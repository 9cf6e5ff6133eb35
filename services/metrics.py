"""What a replica counts, in Prometheus' text form: `GET /metrics` on a port of its own.

The same counters that `gkr services` shows, read when somebody asks. Labels are the service and the class of a request,
never a rank: with 4,096 ranks each label of theirs would be 4,096 series for each replica. How unevenly ranks wait is a
histogram over them; which ones wait is told by `gkr services`. A replica whose loop does not turn does not answer, so a
monitor sees it as down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeHistogramMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.stats import ServerStats

_PREFIX = "gkr_service_"
_RANK_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Of the histogram over ranks; the last is the deepest queue that a file may ask for."""

_COUNTED: tuple[tuple[str, str, Callable[[ServerStats], float]], ...] = (
    ("errors", "Requests answered with an error, and messages refused", lambda one: one.errors),
    ("cancelled", "Requests that their callers took back", lambda one: one.cancelled),
    ("duplicates", "Requests that arrived again and were not computed again", lambda one: one.duplicates),
    ("violations", "Messages that are not of the protocol, or beyond a grant", lambda one: one.violations),
    ("banned", "Connections that are not listened to any more", lambda one: one.banned),
    ("batches", "Batches computed", lambda one: one.batches),
)
_MEASURED: tuple[tuple[str, str, Callable[[ServerStats], float]], ...] = (
    ("clients", "Clients connected", lambda one: one.clients),
    ("unanswered_bytes", "Bytes of requests without an answer", lambda one: one.queued_bytes),
    ("grant_requests", "Requests that one client may have unanswered", lambda one: one.grant),
    ("grant_bytes", "Bytes of them; 0: not counted", lambda one: one.grant_bytes),
    ("batch_items", "Mean items of a batch since the start", lambda one: one.batch_mean),
    ("computing_seconds", "Age of the batch that is being computed", lambda one: one.computing_seconds),
)


class ReplicaMetrics(Collector):
    """Metrics of one replica. `stats` raises if the replica does not turn; nothing is told then."""

    def __init__(self, service: str, *, stats: Callable[[], ServerStats]) -> None:
        self._service, self._stats = service, stats

    def collect(self) -> Iterable[Metric]:
        """All of them, of one moment."""
        told = self._stats()
        for name, text, value in _COUNTED:
            yield self._filled(CounterMetricFamily(_PREFIX + name, text, labels=("service",)), {(): value(told)})
        for name, text, value in _MEASURED:
            yield self._filled(GaugeMetricFamily(_PREFIX + name, text, labels=("service",)), {(): value(told)})
        yield from self._by_class(told)
        yield self._over_ranks(told.queued_by_rank, clients=told.clients)
        weights = GaugeMetricFamily(
            _PREFIX + "weights", "1 for the version of the last answer", labels=("service", "weights")
        )
        yield self._filled(weights, {(told.weights,): 1} if told.weights else {})

    def _by_class(self, told: ServerStats) -> Iterator[Metric]:
        classes, labels = told.by_priority, ("service", "class")
        requests = CounterMetricFamily(_PREFIX + "requests", "Requests computed", labels=labels)
        yield self._filled(requests, {(name,): one.requests for name, one in classes.items()})
        queued = GaugeMetricFamily(_PREFIX + "queued", "Requests that wait for their turn", labels=labels)
        yield self._filled(queued, {(name,): one.queued for name, one in classes.items()})
        latency = GaugeMetricFamily(
            _PREFIX + "latency_seconds", "From arrival to answer, of the last 2048", labels=(*labels, "quantile")
        )
        shares = {(name, "0.5"): one.p50_ms / 1000 for name, one in classes.items()}
        shares |= {(name, "0.99"): one.p99_ms / 1000 for name, one in classes.items()}
        yield self._filled(latency, shares)

    def _over_ranks(self, queued: Mapping[str, int], *, clients: int) -> Metric:
        """Those that are connected and have nothing queued count as 0."""
        counts = [*queued.values(), *[0] * (clients - len(queued))]
        buckets = [(f"{bound}", float(sum(one <= bound for one in counts))) for bound in _RANK_BOUNDS]
        family = GaugeHistogramMetricFamily(
            _PREFIX + "rank_queued", "Ranks by the requests that each has waiting", labels=("service",)
        )
        family.add_metric((self._service,), [*buckets, ("+Inf", float(len(counts)))], gsum_value=float(sum(counts)))
        return family

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        for key, value in values.items():
            family.add_metric((self._service, *key), value)
        return family


def serve_metrics(metrics: ReplicaMetrics, *, address: str, port: int) -> str:
    """Serve them until the process ends; the URL. Port 0: one that is free. Raises OSError if the port is taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    server, _ = start_http_server(port, addr=address, registry=registry)
    return f"http://{address}:{server.server_port}/metrics"
