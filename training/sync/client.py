"""The learner's way to the syncer.

Rank 0 of a learner registers, beats, commits; every rank sends its own part and fetches its own ranges. Calls block,
with deadlines, and survive a syncer that dies and comes back on the same ports. Arrays that were handed over must not
change until the contribution has its verdict: they may have to be sent again. Where the environment names the run's
keys, everything goes through TLS. Imports no torch.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import math
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from spec.errors import UnreachableError
from spec.sync_keys import SyncKeys
from training.sync.carrier import Carrier, Parcel
from training.sync.codec import Codec, measure_error
from training.sync.codec import encode as encode_floats
from training.sync.keeper import Keeper
from training.sync.layout import Floats, Layout, Ranges, count, view_bytes
from training.sync.messages import (
    CommitArgs,
    Contribution,
    DrainedArgs,
    ErrorReply,
    HeartbeatArgs,
    HeartbeatReply,
    LeaveArgs,
    PartHeader,
    PartReceipt,
    RegisterArgs,
    Registration,
    SeedHeader,
    Status,
    Verdict,
    encode,
)
from training.sync.transport import Link, SyncRefusedError

_LOG = logging.getLogger(__name__)
_LEAVE_SECONDS = 60.0
"""Longest wait for a syncer to hear that a learner ends: enough for it to be restarted."""


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
        codec: Codec = "fp32",
        connections: int = 1,
        bytes_per_second: float | None = None,
        keys: SyncKeys | None = None,
    ) -> None:
        """Addresses are host:port; a call waits `slice_seconds` for news, parts are looked for each `check_seconds`.

        `connections` carry weights beside each other, at most `bytes_per_second` of this process in each direction.
        `keys`: default: those that the environment names.
        """
        self._learner, self._layout = learner, layout
        self._barrier_timeout, self._slice = barrier_timeout_seconds, slice_seconds
        self._heartbeat_seconds, self._pause = heartbeat_seconds, min(check_seconds, 1.0)
        self._closed = threading.Event()
        self._fenced = threading.Event()

        keys = keys or SyncKeys.read()

        def link() -> Link:
            return Link(control, run=run, timeout_seconds=call_timeout_seconds, closed=self._closed, keys=keys)

        self._control, self._beats, kept = link(), link(), link()
        self._commits = [link() for _ in range(layout.fragments)]  # each may wait long for its verdict
        self._links = [self._control, self._beats, kept, *self._commits]
        self._bulk = Carrier(
            bulk, run=run, learner=learner, connections=connections, bytes_per_second=bytes_per_second,
            patience_seconds=slice_seconds, keys=keys, closed=self._closed,
        )  # fmt: skip
        self._codec: Codec = codec
        self._keeper = Keeper(
            kept,
            carrier=self._bulk,
            check_seconds=check_seconds,
            send_seconds=barrier_timeout_seconds,
            closed=self._closed,
        )
        self._heard: HeartbeatReply | None = None
        self._told = 0
        self._compression_error = 0.0
        self._beat_now = threading.Event()
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
            buffers=self._layout.buffer_shapes(),
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

    def report(
        self,
        step: int,
        *,
        pending_samples: int,
        kept_samples: int,
        step_seconds: float,
        blocked_seconds: dict[str, float] | None = None,
        in_flight_steps: int = 0,
        measures: dict[str, float] | None = None,
    ) -> None:
        """What the next heartbeats say. `kept_samples`: merged or pending."""
        self._progress = msgspec.structs.replace(
            self._progress,
            step=step,
            pending=pending_samples,
            kept=kept_samples,
            step_seconds=step_seconds,
            blocked_seconds=blocked_seconds or {},
            in_flight_steps=in_flight_steps,
            # JSON has no word for what is not finite.
            measures={name: one for name, one in {**self.measures, **(measures or {})}.items() if math.isfinite(one)},
        )

    @property
    def measures(self) -> dict[str, float]:
        """Of this process: parts that were sent again, and what the codec cost the last displacement."""
        return {"resends": self._keeper.resends, "compression_error": self._compression_error}

    def beat_soon(self) -> None:
        """Say it now, not only when it is time."""
        self._beat_now.set()

    @property
    def told(self) -> int:
        """The kept samples of the newest heartbeat that was answered."""
        return self._told

    @property
    def heard(self) -> HeartbeatReply | None:
        """The newest answer to a heartbeat; none before the first."""
        return self._heard

    @property
    def fenced(self) -> bool:
        """A newer process speaks for this learner, or the syncer gave it up: this process must end."""
        return self._fenced.is_set()

    def put_seed(self, theta: Floats, *, generation: int, ema: Floats | None = None) -> None:
        """The initial weights, by the one learner whose registration said `seed_needed`."""
        body = [_checked(one, self._layout.total) for one in (theta, ema) if one is not None]
        header = SeedHeader(
            learner=self._learner,
            generation=generation,
            fingerprint=self._layout.fingerprint,
            shapes=self._layout.shapes(),
            buffers=self._layout.buffer_shapes(),
            sha256=_digest(*body),
            has_ema=ema is not None,
        )
        self._bulk.send(Parcel(path="seed", header=header, body=body), until=self._until(None))

    def commit(self, contribution: Contribution) -> Verdict:
        """The verdict; waits for the round, at most `barrier_timeout_seconds`."""
        until = self._until(None)
        body = [encode(CommitArgs(contribution=contribution, wait_seconds=self._slice))]
        status: Status | None = None
        while True:
            try:
                response = self._commits[contribution.fragment].ask(
                    "commit", body=body, until=until, patience_seconds=self._slice
                )
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

    def leave(self, generation: int, *, discarded: Sequence[int] = ()) -> bool:
        """An orderly end. `discarded`: samples given up over the whole run, by fragment.

        Whether the syncer answered: it ends when everybody has left, and the last answer may be lost with it. That is
        no failure of a learner that holds the final weights.
        """
        args = LeaveArgs(
            learner=self._learner,
            generation=generation,
            discarded_samples=max(discarded, default=0),
            discarded=list(discarded),
        )
        try:
            self._control.ask(
                "leave", body=[encode(args)], until=self._until(min(self._barrier_timeout, _LEAVE_SECONDS))
            )
        except UnreachableError as error:
            _LOG.warning("the syncer did not hear that learner %s leaves: %s", self._learner, error.message)
            return False
        return True

    def drained(self, generation: int) -> None:
        """While the run drains: this learner has nothing more to send."""
        args = DrainedArgs(learner=self._learner, generation=generation)
        self._control.ask("drained", body=[encode(args)], until=self._until(None))

    # --- every rank

    def put_part(
        self,
        delta: Floats,
        *,
        ema: Floats | None,
        ranges: Ranges,
        fragment: int = 0,
        generation: int,
        seq: int,
        rank: int,
    ) -> PartReceipt:
        """This rank's part of a contribution to a fragment: weights minus anchor of its ranges, and averaged weights
        likewise unless the syncer averages. Ranges are of the whole vector, inside the fragment.
        """
        size = count(ranges)
        found = [_checked(one, size) for one in (delta, ema) if one is not None]
        # fp32 goes as it lies there, without a copy.
        body = [encode_floats(np.frombuffer(one, "<f4"), self._codec).data for one in found]
        self._compression_error = measure_error(delta, body[0], self._codec)
        header = PartHeader(
            learner=self._learner,
            generation=generation,
            seq=seq,
            rank=rank,
            fingerprint=self._layout.fingerprint,
            ranges=list(ranges),
            sha256=_digest(*body),
            fragment=fragment,
            codec=self._codec,
            has_ema=ema is not None,
            bytes=sum(len(view) for view in body),
        )
        parcel = Parcel(path="part", header=header, body=body)
        self._bulk.send(parcel, until=self._until(None))
        self._keeper.keep(parcel)
        return PartReceipt(rank=rank, sha256=header.sha256)

    def fetch(self, version: int, *, fragment: int = 0, ranges: Ranges | None = None) -> Floats:
        """Shared weights of a fragment's version; default: all of its elements."""
        wanted = [self._layout.fragment_range(fragment)] if ranges is None else list(ranges)
        return self._bulk.fetch(version, fragment=fragment, ranges=wanted, until=self._until(None))

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
        self._beat_now.set()
        if self._beating is not None:
            self._beating.join(5)
        for link in self._links:
            link.close()
        self._bulk.close()

    # --- inside

    def _until(self, seconds: float | None) -> float:
        return time.monotonic() + (self._barrier_timeout if seconds is None else seconds)

    def _beat(self) -> None:
        while not self._closed.is_set():
            self._beat_now.clear()
            self._beat_once()
            self._beat_now.wait(self._heartbeat_seconds)

    def _beat_once(self) -> None:
        progress = self._progress
        try:
            response = self._beats.ask_once("heartbeat", method="POST", body=[encode(progress)])
            if response.status == 200:
                self._heard, self._told = response.read(HeartbeatReply), progress.kept or 0
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
