"""Steady load on an evaluation service, as a run's own command: `python -m tests.builders.service_load`.

Clients send numbered pictures to be counted once (`accumulate`, an effect) and the same pictures to be scored
(`score`, none), at a fixed pace whatever the replicas do, until the object `stop` lies in the run's bucket. Then the
total is asked for, and one line says what came of it: `LOAD {...}`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import urllib.request
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from services.client import ServiceClient
from services.prepare import digits
from services.prepare.__main__ import prepare
from services.service import Reply
from services.wire.messages import AccumulateArgs, AccumulateReply, ScoreArgs, ScoreReply, TotalArgs, TotalReply
from spec.errors import GkrError
from spec.plan import Plan
from spec.services import Directory
from storage import open_bucket

CLIENTS = 3
PAUSE_SECONDS = 0.1
"""Between two pictures of one client, each sent in two requests."""
IMAGES = 8
"""Per request."""
LOOK_SECONDS = 2.0
LONGEST_SECONDS = 400.0
DEADLINE_SECONDS = 60.0
SERVICE = "judge"
STOP = "stop"
_SHAPE = (digits.SHAPE.height, digits.SHAPE.width, digits.SHAPE.channels)


@dataclass
class Told:
    """What the clients saw, together."""

    sent: int = 0
    answered: int = 0
    applied: int = 0
    repeated: int = 0
    """Counted by a replica whose answer was lost: the answer to the second sending says so."""
    counted: int = 0
    """Distinct numbered requests with an effect."""
    errors: list[str] = field(default_factory=list[str])
    scores: set[str] = field(default_factory=set[str])
    ended: list[float] = field(default_factory=list[float])
    slowest_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, future: Future[Reply], *, sent_at: float) -> None:
        """One answer, of either kind."""
        now = time.monotonic()
        with self.lock:
            self.slowest_seconds = max(self.slowest_seconds, now - sent_at)
            self.ended.append(now)
            error = future.exception()
            if error is not None:
                self.errors.append(f"{type(error).__name__}: {error}")
                return
            self.answered += 1
            body = future.result().body
            if isinstance(body, AccumulateReply):
                self.applied += body.applied
                self.repeated += not body.applied
            else:
                self.scores.add(repr(body))

    def document(self) -> dict[str, Any]:
        """For the test."""
        times = sorted(self.ended)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return {
            "sent": self.sent, "answered": self.answered, "counted": self.counted, "applied": self.applied,
            "repeated": self.repeated, "errors": self.errors[:5], "scores": len(self.scores),
            "longest_gap_seconds": max(gaps, default=0.0), "slowest_seconds": self.slowest_seconds,
            "seconds": times[-1] - times[0] if times else 0.0,
        }  # fmt: skip


class Load:
    """All clients of the run."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._run, self._directory = plan.run, directory
        self._bucket = open_bucket(plan.home.run_uri)
        self._folder = f"{plan.home.run_uri}/evaluations"
        self._manifest = f"{plan.home.run_uri}/data/digits/manifest.json"
        prepare(self._manifest, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=60)
        real = digits.load().test[:IMAGES]
        self._images = np.stack([np.frombuffer(one.pixels, np.uint8).reshape(_SHAPE) for one in real])
        self._labels = [one.label for one in real]
        self._stop = threading.Event()
        self.told = Told()

    def run(self) -> dict[str, Any]:
        """Until told to stop; what came of it."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + LONGEST_SECONDS
        while not self._stop.wait(LOOK_SECONDS):
            if self._bucket.exists(STOP) or time.monotonic() > until:
                self._stop.set()
        for thread in threads:
            thread.join(2 * DEADLINE_SECONDS)
        return {**self.told.document(), **self._total(), "replicas": self._replicas()}

    def _client(self, name: str) -> ServiceClient:
        return ServiceClient(self._directory, service=SERVICE, identity=name)

    def _ask(self, number: int) -> None:
        """Numbered from 0, none left out: what is missing in the end was lost."""
        waiting: list[Future[Reply]] = []
        with closing(self._client(f"load-{number}")) as client:
            sequence = 0
            while not self._stop.wait(PAUSE_SECONDS):
                counts = AccumulateArgs(
                    manifest=self._manifest, labels=self._labels, run=self._run, shard=number, sequence=sequence,
                    folder=self._folder,
                )  # fmt: skip
                plain = ScoreArgs(manifest=self._manifest, labels=self._labels)
                tensors = {"images": self._images}
                for method, args, reply in (("accumulate", counts, AccumulateReply), ("score", plain, ScoreReply)):
                    sent_at = time.monotonic()
                    future = client.submit(
                        method, args, reply=reply, tensors=tensors, deadline_seconds=DEADLINE_SECONDS
                    )
                    future.add_done_callback(lambda done, sent_at=sent_at: self.told.take(done, sent_at=sent_at))
                    waiting.append(future)
                sequence += 1
            for future in waiting:
                future.exception(2 * DEADLINE_SECONDS)
        with self.told.lock:
            self.told.sent += len(waiting)
            self.told.counted += sequence

    def _total(self) -> dict[str, Any]:
        args = TotalArgs(manifest=self._manifest, run=self._run, folder=self._folder, parts=self.told.counted)
        try:
            with closing(self._client("load-total")) as client:
                found: TotalReply = client.call("total", args, reply=TotalReply, deadline_seconds=120).body
        except GkrError as error:
            return {"total": str(error)}
        return {"parts": found.parts, "samples": found.samples, "images_per_part": IMAGES}

    def _replicas(self) -> list[dict[str, Any]]:
        """What is published of each, and what its own metrics say that it computed."""
        directory = Directory.read_json(self._directory.read_bytes())
        return [
            {
                "sealed": one.sealed, "shared": one.shared, "metrics": one.metrics,
                "computed": _computed(one.metrics) if one.metrics else None,
            }
            for one in directory.replicas
        ]  # fmt: skip


def _computed(url: str) -> float:
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [one for family in families for one in family.samples]
    return sum(one.value for one in samples if one.name == "gkr_service_requests_total")


def main() -> None:
    """In a pod of the run."""
    plan = Plan.read_json(Path(os.environ["GKR_PLAN"]).read_bytes())
    found = Load(plan, Path(os.environ["GKR_SERVICES"])).run()
    sys.stdout.write(f"LOAD {json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
