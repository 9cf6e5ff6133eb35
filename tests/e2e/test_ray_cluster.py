"""A learner on a Ray cluster whose nodes share nothing but a bucket: it loses a trainer, the head and a service.

Slow because it trains for real in pretended pods, each of which is lost once and comes back with an empty folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gkr.sync_keys import write_keys
from spec.events import AttemptStarted, Event, LearnerFinished, Recovery, Restored, StepMetrics, read_events
from spec.facts import ClusterFacts, MachinePool, SyncerPorts
from spec.fold import fold
from spec.plan import Plan
from spec.resolve import resolve_located
from spec.sync_keys import ENVIRONMENT
from storage import open_bucket
from tests.builders.experiments import GIB, RUN, load
from tests.builders.local_runs import REPOSITORY
from tests.builders.ray_cluster import RayCluster
from training.processes import free_port

MINUTE = 60.0
EXPERIMENT = """\
version: 1
name: small
image: trainer
learners:
  - name: east
    cluster: bed
    groups:
      - {name: trainer, nodes: 2, ranks: 1, resources: {cpu: 1, memory: 1Gi, shm: 64Mi}}
train: {recipe: digits, samples: 9600, batch: 32, checkpoint: {every_steps: 10}, warmup_samples: 640}
data: {manifest: "{bucket}/data/digits/manifest.json", source: sklearn-digits}
sync: {mode: barrier, inner_steps: 10}
services:
  encoder: {kind: encode}
"""
COMMAND = """\
version: 1
name: command
image: trainer
learners:
  - name: east
    cluster: bed
    groups:
      - {name: trainer, nodes: 2, resources: {cpu: 1, memory: 1Gi, shm: 64Mi}}
run: |
  echo "node $GKR_NODE_RANK of $GKR_NODES in $GKR_GROUP, attempt $GKR_ATTEMPT, $MINE"
  if [ "$GKR_ATTEMPT" = 1 ] && [ "$GKR_NODE_RANK" = 1 ]; then kill -KILL $$; fi
  exec python - <<'END'
  import os, socket
  address = (os.environ["GKR_MASTER_ADDR"], int(os.environ["GKR_MASTER_PORT"]))
  if os.environ["GKR_NODE_RANK"] == "0":
      with socket.create_server(address) as server:
          server.settimeout(60)
          print("heard", server.accept()[0].recv(9).decode())
  else:
      import time
      for _ in range(600):
          try:
              socket.create_connection(address, 5).sendall(b"node one!")
              break
          except OSError:
              time.sleep(0.1)
  END
env: {MINE: 'a: "b" $c'}
"""


class World:
    """One learner's cluster, its syncer if it has one, and what the bucket knows."""

    def __init__(self, root: Path, text: str) -> None:
        self.root = root
        control, bulk = free_port("0.0.0.0"), free_port("0.0.0.0")
        facts = ClusterFacts(
            name="bed", region="bed", backend="kubernetes", queues=["research"], namespaces=["gkr-0"],
            bucket=(root / "bucket").as_uri(), syncer=SyncerPorts(control_port=control, bulk_port=bulk),
            pools=[MachinePool(name="cpu", machine="local-cpu", nodes=8, cpu=4, memory=16 * GIB)],
        )  # fmt: skip
        plan = resolve_located(load(text), [facts], run=RUN, env={})
        addresses = {"syncer_control": f"127.0.0.1:{control}", "syncer_bulk": f"127.0.0.1:{bulk}"}
        self.plan: Plan = plan.model_copy(update={"learners": [plan.home.model_copy(update=addresses)]})
        self.bucket = open_bucket(self.plan.home.run_uri)
        self.keys = root / "keys"
        write_keys(self.keys, plan=self.plan)
        self.cluster = RayCluster(
            self.plan, self.plan.home, root / "east", port=free_port("0.0.0.0"), first_address=20, keys=self.keys
        )
        self._syncer: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.cluster.start()
        if self.plan.syncer is None:
            return
        command = [sys.executable, "-m", "training.sync.server", "--plan", str(self.cluster.plan_path)]
        command += ["--endpoints", str(self.root / "syncer.json")]
        with (self.root / "syncer.txt").open("wb") as log:
            self._syncer = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY),
                    "GKR_RUN_DIR": str(self.root / "syncer"),
                    ENVIRONMENT: str(self.keys / "run"),
                },
            )

    def close(self) -> None:
        self.cluster.close()
        if self._syncer is not None:
            self._syncer.terminate()
            self._syncer.wait(timeout=20)

    def events(self) -> list[Event]:
        texts = [self.bucket.get(entry.key).data.decode() for entry in self.bucket.list("events")]
        return list(read_events("".join(texts).splitlines()))

    def until(self, holds: Callable[[list[Event]], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds(self.events()):
            code = self.cluster.tick()
            assert code is None, f"the driver ended with {code}: {self._last_words()}"
            assert time.monotonic() < deadline, self.events()[-20:]
            time.sleep(0.25)

    def until_ended(self, *, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.cluster.tick()) is None:
            assert time.monotonic() < deadline, self.events()[-20:]
            time.sleep(0.25)
        return code

    def until_logged(self, key: str, text: str) -> None:
        """The pods copy their logs every few seconds."""
        deadline = time.monotonic() + MINUTE
        while not (self.bucket.exists(key) and self.bucket.get(key).data.decode() == text):
            assert time.monotonic() < deadline, self.bucket.get(key).data
            time.sleep(0.25)

    def _last_words(self) -> str:
        return (self.cluster.folder / f"driver-{self.cluster.drivers}.txt").read_text()[-2000:]


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path, request.param)
    try:
        made.start()
        yield made
    finally:
        made.close()


def reached(step: int) -> Callable[[list[Event]], bool]:
    return lambda events: any(isinstance(event, StepMetrics) and event.step >= step for event in events)


@pytest.mark.loopback
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [EXPERIMENT], indirect=True)
def test_a_learner_survives_the_loss_of_every_kind_of_pod(world: World) -> None:
    world.until(reached(30), seconds=4 * MINUTE)
    world.cluster.delete("trainer-1")
    world.until(reached(60), seconds=4 * MINUTE)
    world.cluster.delete("head")
    world.until(reached(90), seconds=4 * MINUTE)
    world.cluster.delete("svc-encoder-0")
    assert world.until_ended(seconds=4 * MINUTE) == 0

    events = world.events()
    summary = fold(events, world.plan)
    east = summary.learners[0]
    assert (east.steps, east.ledger.merged, east.ledger.imbalance) == (300, 9600, 0)
    assert summary.sync is not None
    assert summary.sync.learners_agree
    starts = [event for event in events if isinstance(event, AttemptStarted)]
    assert [start.attempt for start in starts] == sorted({start.attempt for start in starts})
    assert [start.epoch for start in starts] == sorted({start.epoch for start in starts})
    restored = [event.mode for event in events if isinstance(event, Restored)]
    assert restored[0] == "fresh"
    assert {*restored[1:]} <= {"exact", "shared"}
    what = {event.what for event in events if isinstance(event, Recovery)}
    assert what >= {"driver", "service encoder-0"}
    assert any(one.startswith(("agent trainer-", "rank ")) for one in what)
    assert any(isinstance(event, LearnerFinished) for event in events)
    logs = {entry.key for entry in world.bucket.list("logs")}
    last = starts[-1].attempt
    assert {f"logs/east/{last}/rank-0.log", f"logs/east/{last}/rank-1.log", "logs/east/1/driver-0.log"} <= logs


@pytest.mark.loopback
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [COMMAND], indirect=True)
def test_a_command_runs_once_per_node_and_again_after_a_signal(world: World) -> None:
    """Node 1 is killed in the first attempt; in the second the two nodes meet at the promised address."""
    assert world.until_ended(seconds=5 * MINUTE) == 0
    first = 'node {} of 2 in trainer, attempt {}, a: "b" $c\n'
    world.until_logged("logs/east/1/rank-1.log", first.format(1, 1))
    world.until_logged("logs/east/2/rank-0.log", first.format(0, 2) + "heard node one!\n")
    world.until_logged("logs/east/2/rank-1.log", first.format(1, 2))
    recoveries = [event for event in world.events() if isinstance(event, Recovery)]
    assert [(one.what, one.cause, one.action) for one in recoveries] == [("rank 1", "SIGKILL", "all ranks restarted")]
