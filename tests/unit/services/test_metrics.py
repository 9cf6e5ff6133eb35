"""Metrics of a real replica, read over HTTP by Prometheus' own parser."""

from __future__ import annotations

import urllib.request
from contextlib import closing
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from services.client import ServiceClient
from services.directory import write_directory
from services.metrics import ReplicaMetrics, serve_metrics
from services.server import Server
from services.stats import ServerStats
from spec.errors import RefusedError
from spec.events import ServiceClassStats, ServiceRankStats
from spec.services import Directory, Replica
from tests.builders.echo import Echo, EchoArgs, EchoReply, context

Key = tuple[str, tuple[tuple[str, str], ...]]


def scraped(url: str) -> dict[Key, float]:
    """Every sample by name and labels; one that came twice fails."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "service"}
            assert sample.labels["service"] == "echo"
            key = sample.name, tuple(sorted(labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_a_replica_tells_what_it_did(tmp_path: Path) -> None:
    with Server(Echo(context(tmp_path)), queue_depth=8) as server:
        url = serve_metrics(
            ReplicaMetrics("echo", stats=lambda: server.stats(timeout_seconds=10)), address="127.0.0.1", port=0
        )
        assert scraped(url)["gkr_service_clients", ()] == 0
        replica = Replica(service="echo", kind="encode", index=0, endpoint=server.endpoint, incarnation=1)
        write_directory(tmp_path / "services.json", directory=Directory(epoch=1, replicas=[replica]))
        with closing(ServiceClient(tmp_path / "services.json", service="echo", identity="rank-0")) as client:
            for text in ("a", "b", "refuse"):
                try:
                    client.call("echo", EchoArgs(text=text), reply=EchoReply, deadline_seconds=20)
                except RefusedError:
                    assert text == "refuse"
            found = scraped(url)
    want: dict[Key, float] = {
        ("gkr_service_requests_total", (("class", "blocking"),)): 3,
        ("gkr_service_errors_total", ()): 1,
        ("gkr_service_clients", ()): 1,
        ("gkr_service_grant_requests", ()): 8,
        ("gkr_service_rank_queued_bucket", (("le", "0"),)): 1,
        ("gkr_service_rank_queued_bucket", (("le", "+Inf"),)): 1,
    }
    assert {key: found.get(key) for key in want} == want
    assert found["gkr_service_latency_seconds", (("class", "blocking"), ("quantile", "0.99"))] > 0


def test_series_do_not_grow_with_ranks() -> None:
    def told(ranks: int) -> ServerStats:
        return ServerStats(
            queued_by_rank={f"east/rank-{one}": one % 8 for one in range(ranks - 1)},
            clients=ranks,
            by_priority={"blocking": ServiceClassStats(requests=5)},
            by_rank={f"east/rank-{one}": ServiceRankStats(requests=1) for one in range(min(ranks, 64))},
            weights="ab" * 32,
        )

    few, many = (
        [sample for metric in ReplicaMetrics("echo", stats=lambda n=n: told(n)).collect() for sample in metric.samples]
        for n in (2, 4096)
    )
    assert len(few) == len(many)
    over_ranks = {s.labels["le"]: s.value for s in many if s.name == "gkr_service_rank_queued_bucket"}
    assert over_ranks["0"] == 512 + 1, "a rank that has nothing queued counts"
    assert over_ranks["4"] == 5 * 512 + 1
    assert over_ranks["+Inf"] == 4096
