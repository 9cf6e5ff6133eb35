"""The real server in decoupled mode, over sockets: windows of two fragments, a SIGKILL, the drain, the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.plan import Plan
from spec.sync import SyncConfig
from tests.builders.sync_world import LAYOUT, ROUND_SAMPLES, Server, ema_of, make_plan, seed_weights, together, train
from tests.unit.training.sync.conftest import Serve
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout, combine_fingerprints, fingerprint_weights
from training.sync.messages import Contribution, Registration, Verdict
from training.sync.transport import SyncRefusedError

FRAGMENTS = 2
WINDOWS = 2
"""Of each learner and fragment before the target is reached."""


def plan_of(folder: Path, **changes: Any) -> Plan:
    config = {"mode": "decoupled", "fragments": FRAGMENTS, "round_deadline": "20s", "outer_momentum": 0.5, **changes}
    return make_plan(folder, target=WINDOWS * 2 * ROUND_SAMPLES, config=SyncConfig.model_validate(config))


@dataclass
class Decoupled:
    """A learner that takes merged weights as they are and sends one fragment at a time."""

    server: Server
    name: str
    layout: Layout = field(default_factory=lambda: Layout.from_shapes(LAYOUT.shapes(), fragments=FRAGMENTS))
    shared: dict[int, Floats] = field(default_factory=dict[int, Floats])
    versions: dict[int, int] = field(default_factory=dict[int, int])
    seq: int = 0

    def __post_init__(self) -> None:
        self.client = SyncClient(
            self.server.control,
            bulk=self.server.bulk,
            run=self.server.plan.run,
            learner=self.name,
            layout=self.layout,
            call_timeout_seconds=5,
            barrier_timeout_seconds=30,
            heartbeat_seconds=0.1,
            slice_seconds=0.5,
            check_seconds=0.1,
        )

    def join(self) -> Registration:
        found = self.client.register(contract_hash(self.server.plan), world_size=1)
        if found.seed_needed:
            self.client.put_seed(seed_weights(), generation=found.generation)
        self.client.wait_version(0)
        self.generation = found.generation
        for fragment in range(FRAGMENTS):
            self.adopt(fragment, max(0, found.fragments[fragment].version))
        return found

    def adopt(self, fragment: int, version: int) -> None:
        self.versions[fragment] = version
        self.shared[fragment] = self.client.fetch(version, fragment=fragment).copy()

    def send(self, fragment: int, **more: Any) -> Verdict:
        """Train a round, contribute, adopt."""
        self.seq += 1
        base = self.shared[fragment]
        theta = train(base, learner=self.name, cursor=self.seq)
        receipt = self.client.put_part(
            theta - base,
            ema=None if self.server.plan.syncer.config.ema == "syncer" else ema_of(theta) - base,  # type: ignore[union-attr]
            ranges=[self.layout.fragment_range(fragment)],
            fragment=fragment,
            generation=self.generation,
            seq=self.seq,
            rank=0,
        )
        values: dict[str, Any] = {"steps": 4, "samples": ROUND_SAMPLES, "cursor": self.seq * ROUND_SAMPLES, **more}
        verdict = self.client.commit(
            Contribution(
                learner=self.name,
                generation=self.generation,
                fragment=fragment,
                seq=self.seq,
                base_version=self.versions[fragment],
                parts=[receipt],
                fingerprint=self.layout.fingerprint,
                **values,
            )
        )
        self.adopt(fragment, verdict.version)
        assert fingerprint_weights(self.shared[fragment]) == verdict.theta_sha256
        return verdict


def processor_seconds(pid: int) -> float:
    """What a process has used so far; unlike time on the wall it does not depend on what else this machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def pair(serve: Serve, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Server, Decoupled, Decoupled]]:
    server = serve(plan_of(tmp_path, **getattr(request, "param", {})))
    east, west = Decoupled(server, "east"), Decoupled(server, "west")
    east.join()
    west.join()
    yield server, east, west
    for one in (east, west):
        one.client.close()


@pytest.mark.parametrize("pair", [{}, {"ema": "syncer"}], indirect=True, ids=["learners' averages", "syncer's average"])
def test_a_decoupled_run_from_windows_to_its_end_with_a_kill_on_the_way(
    pair: tuple[Server, Decoupled, Decoupled], serve: Serve
) -> None:
    server, east, west = pair
    before = west.shared[0]
    assert [east.send(0).round, west.send(0).staleness] == [1, 1], "west did not know of east's"
    assert not np.array_equal(before, west.shared[0])
    status = east.client.status()
    assert (status.mode, status.version, [one.version for one in status.fragments]) == ("decoupled", 2, [2, 0])
    assert [one.why for one in status.fragments] == ["no learner has contributed yet"] * 2

    server.kill()
    server = serve(again=server)
    assert east.client.status().version == 2
    assert processor_seconds(server.process.pid) < 20, "of its own, from SIGKILL to serving again"

    for fragment in (1, 1, 0):
        for one in (east, west):
            assert one.send(fragment).kind == "merged"
    assert east.client.status().state == "DRAINING"

    def end(one: Decoupled) -> list[Verdict]:
        return [one.send(fragment, samples=9, last=True) for fragment in range(FRAGMENTS)]

    last = together(lambda: end(east), lambda: end(west))
    assert {verdict.kind for verdicts in last for verdict in verdicts} == {"merged"}  # type: ignore[attr-defined]
    status = east.client.wait_version(status.version + 8)
    deadline = time.monotonic() + 20
    while not status.final and time.monotonic() < deadline:
        status = east.client.status()
    assert (status.state, status.samples_total) == ("FINAL", 2 * (WINDOWS * ROUND_SAMPLES + 9))
    for one in (east, west):
        prints = [fingerprint_weights(one.shared[fragment]) for fragment in range(FRAGMENTS)]
        assert combine_fingerprints(prints) == status.theta_sha256
    assert (server.folder / "sync/models" / f"{status.model_sha256}.safetensors").exists()
    counts = server.ledger().fragments
    assert [one.merged for one in counts] == [{"east": 89, "west": 89}] * 2
    assert (server.ledger().final, server.ledger().model_sha256) == (True, status.model_sha256)
    assert [one.round for one in server.merges()] == list(range(1, 11))
    late = east.send(0)
    assert (late.kind, late.reason, late.final) == ("late", "the run is final", True)


def test_nobody_drains_a_run_that_goes_on_and_refusals_are_counted(pair: tuple[Server, Decoupled, Decoupled]) -> None:
    _, east, west = pair
    with pytest.raises(SyncRefusedError, match="is not draining"):
        east.client.drained(east.generation)
    west.versions[0] = 7
    invalid = west.send(0)
    assert (invalid.kind, "based on version 7" in invalid.reason) == ("invalid", True)
    refusals = east.client.status().refusals
    assert (refusals["invalid"], refusals["not_draining"]) == (1, 1)
