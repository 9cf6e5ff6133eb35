"""The learner's way to the syncer.

Rank 0 of a learner registers, beats, commits; every rank sends its own part and fetches its own ranges. Calls block,
with deadlines, and survive a syncer that dies and comes back on the same ports. Arrays that were handed over must not
change until the contribution has its verdict: they may have to be sent again. Imports no torch.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import threading
import time

import msgspec
import numpy as np

from spec.errors import UnreachableError
from training.sync.keeper import Keeper, pack, send
from training.sync.layout import Floats, Layout, Ranges, count, view_bytes
from training.sync.messages import (
    CommitArgs,
    Contribution,
    ErrorReply,
    HeartbeatArgs,
    HeartbeatReply,
    LeaveArgs,
    PartHeader,
    PartReceipt,
    RangesArgs,
    RegisterArgs,
    Registration,
    SeedHeader,
    Status,
    Verdict,
    encode,
)
from training.sync.transport import Link, SyncRefusedError

_LOG = logging.getLogger(__name__)


class SyncClient:
    """One process of one learner."""

    def __init__(
        self,
        control: str,
        *,
        bulk: str,
        run: str,
        learner: str,
        layout: Layout,
        call_timeout_seconds: float = 10.0,
        barrier_timeout_seconds: float = 600.0,
        heartbeat_seconds: float = 2.0,
        slice_seconds: float = 5.0,
        check_seconds: float = 2.0,
    ) -> None:
        """Addresses are host:port; a call waits `slice_seconds` for news, parts are looked for each `check_seconds`."""
        self._learner, self._layout = learner, layout
        self._barrier_timeout, self._slice = barrier_timeout_seconds, slice_seconds
        self._heartbeat_seconds, self._pause = heartbeat_seconds, min(check_seconds, 1.0)
        self._closed = threading.Event()
        self._fenced = threading.Event()

        def link(address: str) -> Link:
            return Link(address, run=run, timeout_seconds=call_timeout_seconds, closed=self._closed)

        self._control, self._bulk, self._beats = link(control), link(bulk), link(control)
        kept = link(control), link(bulk)
        self._links = [self._control, self._bulk, self._beats, *kept]
        self._keeper = Keeper(
            *kept, check_seconds=check_seconds, send_seconds=barrier_timeout_seconds, closed=self._closed
        )
        self._progress = HeartbeatArgs(learner=learner, generation=0)
        self._beating: threading.Thread | None = None

    # --- rank 0

    def register(
        self, contract: str, *, world_size: int, step_seconds: float = 0.0, timeout_seconds: float | None = None
    ) -> Registration:
        """Speak for the learner from now on; begins to beat. Raises `SyncRefusedError` with the reason."""
        args = RegisterArgs(
            learner=self._learner,
            shapes=self._layout.shapes(),
            fingerprint=self._layout.fingerprint,
            contract=contract,
            world_size=world_size,
            step_seconds=step_seconds,
        )
        found = self._control.ask("register", body=[encode(args)], until=self._until(timeout_seconds)).read(
            Registration
        )
        self._fenced.clear()
        self._progress = HeartbeatArgs(learner=self._learner, generation=found.generation, step_seconds=step_seconds)
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="sync-heartbeat", daemon=True)
            self._beating.start()
        return found

    def report(self, step: int, *, pending_samples: int, step_seconds: float) -> None:
        """What the next heartbeats say."""
        self._progress = msgspec.structs.replace(
            self._progress, step=step, pending=pending_samples, step_seconds=step_seconds
        )

    @property
    def fenced(self) -> bool:
        """A newer process speaks for this learner, or the syncer gave it up: this process must end."""
        return self._fenced.is_set()

    def put_seed(self, theta: Floats, *, generation: int, ema: Floats | None = None) -> None:
        """The initial weights, by the one learner whose registration said `seed_needed`."""
        arrays = [_checked(one, self._layout.total) for one in (theta, ema) if one is not None]
        header = SeedHeader(
            learner=self._learner,
            generation=generation,
            fingerprint=self._layout.fingerprint,
            shapes=self._layout.shapes(),
            sha256=_digest(*arrays),
            has_ema=ema is not None,
        )
        text = encode(header)
        body = [len(text).to_bytes(4, "little") + text, *arrays]
        self._bulk.ask("seed", method="PUT", body=body, until=self._until(None), patience_seconds=self._slice)

    def commit(self, contribution: Contribution) -> Verdict:
        """The verdict; waits for the round, at most `barrier_timeout_seconds`."""
        until = self._until(None)
        body = [encode(CommitArgs(contribution=contribution, wait_seconds=self._slice))]
        status: Status | None = None
        while True:
            try:
                response = self._control.ask("commit", body=body, until=until, patience_seconds=self._slice)
            except SyncRefusedError as error:
                if error.reason != "parts_missing":
                    raise
                _LOG.info("the syncer has lost parts of contribution %d; the ranks send them again", contribution.seq)
                self._closed.wait(self._pause / 2)
            else:
                if response.status == 200:
                    return response.read(Verdict)
                status = response.read(Status)
            if time.monotonic() > until or self._closed.is_set():
                raise self._give_up(f"contribution {contribution.seq} has no verdict", status)

    def leave(self, generation: int, *, discarded_samples: int = 0) -> None:
        """An orderly end."""
        args = LeaveArgs(learner=self._learner, generation=generation, discarded_samples=discarded_samples)
        self._control.ask("leave", body=[encode(args)], until=self._until(None))

    # --- every rank

    def put_part(
        self, delta: Floats, *, ema: Floats, ranges: Ranges, generation: int, seq: int, rank: int
    ) -> PartReceipt:
        """This rank's part of a contribution: weights minus anchor, and EMA weights, of its ranges."""
        size = count(ranges)
        arrays = _checked(delta, size), _checked(ema, size)
        header = PartHeader(
            learner=self._learner,
            generation=generation,
            seq=seq,
            rank=rank,
            fingerprint=self._layout.fingerprint,
            ranges=list(ranges),
            sha256=_digest(*arrays),
        )
        part = pack(header, *arrays)
        receipt = send(part, bulk=self._bulk, until=self._until(None))
        self._keeper.keep(part)
        return receipt

    def fetch(self, version: int, *, ranges: Ranges | None = None) -> Floats:
        """Shared weights of a version; default: all of them."""
        wanted = self._layout.whole if ranges is None else list(ranges)
        body = [encode(RangesArgs(ranges=wanted))]
        until = self._until(None)
        while True:
            response = self._bulk.ask(
                f"theta/{version}",
                body=body,
                until=until,
                patience_seconds=self._slice,
                expected_bytes=4 * count(wanted),
            )
            if hashlib.sha256(response.body).hexdigest() == response.headers.get("X-Gkr-Sha256"):
                return np.frombuffer(response.body, np.dtype("<f4"))
            if time.monotonic() > until:
                raise UnreachableError(
                    f"version {version} arrives damaged from {self._bulk.address}",
                    hint="check the network between the regions",
                )

    def wait_version(self, at_least: int, *, timeout_seconds: float | None = None) -> Status:
        """The status once the version is reached; for joiners, and for a restart whose earlier contribution waits."""
        until = self._until(timeout_seconds)
        while True:
            path = f"version?at_least={at_least}&wait={max(0.0, min(self._slice, until - time.monotonic())):.3f}"
            status = self._control.ask(path, method="GET", until=until, patience_seconds=self._slice).read(Status)
            if status.version >= at_least:
                return status
            if time.monotonic() > until or self._closed.is_set():
                raise self._give_up(f"version {at_least} does not come", status)

    def status(self, *, timeout_seconds: float | None = None) -> Status:
        """Which round, who is waited for, and until when."""
        return self._control.ask("status", method="GET", until=self._until(timeout_seconds)).read(Status)

    def close(self) -> None:
        """End threads and connections; calls that wait give up."""
        self._closed.set()
        if self._beating is not None:
            self._beating.join(5)
        for link in self._links:
            link.close()

    # --- inside

    def _until(self, seconds: float | None) -> float:
        return time.monotonic() + (self._barrier_timeout if seconds is None else seconds)

    def _beat(self) -> None:
        while not self._closed.is_set():
            self._beat_once()
            self._closed.wait(self._heartbeat_seconds)

    def _beat_once(self) -> None:
        progress = self._progress
        try:
            response = self._beats.ask_once("heartbeat", method="POST", body=[encode(progress)])
            if response.status == 200:
                response.read(HeartbeatReply)
            elif (
                response.read(ErrorReply).reason in {"fenced", "unregistered"}
                and progress.generation == self._progress.generation
            ):
                self._fenced.set()
        except (OSError, http.client.HTTPException, ValueError) as error:
            _LOG.debug("heartbeat got no answer: %s", error)

    def _give_up(self, what: str, status: Status | None) -> UnreachableError:
        if status is None:
            who = "the syncer did not say why"
        elif status.alarm:
            who = f"the syncer cannot go on: {status.alarm}"
        elif status.version < 0:
            who = f"learner {status.seed_from} has not sent the initial weights"
        else:
            here, missing = (", ".join(names) or "nobody" for names in (status.arrived, status.waiting_for))
            who = f"round {status.round} has {here} and waits for {missing}"
        return UnreachableError(
            f"{what} after {self._barrier_timeout:g} s: {who}",
            hint="bring the missing learner back, or raise sync.barrier_timeout",
        )


def _checked(array: Floats, size: int) -> memoryview:
    if array.shape != (size,):
        raise ValueError(f"expected {size} elements in one dimension, got shape {array.shape}")
    return view_bytes(np.ascontiguousarray(array, dtype="<f4"))


def _digest(*views: memoryview) -> str:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.hexdigest()
