"""A process's way to the syncer's bulk port: large bodies over several connections, and what a cut leaves to do.

Promises that a chunk that arrived is not sent or fetched again because another did not; that sending the same body
twice, or from two threads, is harmless; and that all of it together keeps to the rate it was given in each direction.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import Empty, LifoQueue
from typing import Any, TypeVar

import numpy as np

from spec.errors import UnreachableError
from spec.sync_keys import SyncKeys
from training.sync.chunks import CHUNK_BYTES, CRC_HEADER, Pace, UploadState, chunk, crc_of
from training.sync.layout import Floats, Ranges, count, view_bytes
from training.sync.messages import PartHeader, RangesArgs, SeedHeader, encode
from training.sync.transport import Link, Response, SyncRefusedError

_SILENCE_SECONDS = 30.0
"""Longest silence in the middle of a transfer: a piece of a body over a slow link that many share."""
_ELEMENTS = CHUNK_BYTES // 4
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """The exact bytes of one body and its header."""

    path: str
    """`part` or `seed`."""
    header: PartHeader | SeedHeader
    body: Sequence[memoryview]

    @property
    def size(self) -> int:
        return sum(len(view) for view in self.body)


class Carrier:
    """Thread-safe. Connections are made when they are needed first."""

    def __init__(
        self,
        address: str,
        *,
        run: str,
        learner: str,
        connections: int,
        bytes_per_second: float | None,
        patience_seconds: float,
        keys: SyncKeys | None,
        closed: threading.Event,
    ) -> None:
        pace_out, pace_in = Pace(bytes_per_second), Pace(bytes_per_second)
        self.address, self._learner, self._patience = address, learner, patience_seconds
        self._links = [
            Link(
                address, run=run, timeout_seconds=_SILENCE_SECONDS, closed=closed, keys=keys,
                pace_out=pace_out, pace_in=pace_in,
            )
            for _ in range(connections)
        ]  # fmt: skip
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="sync-bulk")
        self._idle: LifoQueue[Link] = LifoQueue()
        for link in self._links:
            self._idle.put(link)

    def send(self, parcel: Parcel, *, until: float) -> None:
        """Bring a body over, as often as it takes; it is verified then."""
        if parcel.size <= CHUNK_BYTES:
            text = encode(parcel.header)
            body = [len(text).to_bytes(4, "little") + text, *parcel.body]
            self._ask(parcel.path, method="PUT", body=body, until=until, patience_seconds=self._patience)
            return
        crcs: dict[int, str] = {}

        def put(key: str, index: int) -> None:
            views = chunk(parcel.body, index)
            crc = crcs.setdefault(index, crc_of(views))
            self._ask(f"chunks/{key}/{index}", method="PUT", body=views, headers={CRC_HEADER: crc}, until=until)

        while True:
            # The syncer hashes what it has not hashed yet before it answers.
            patience = self._patience + parcel.size / 100e6
            state = self._ask(parcel.path, body=[encode(parcel.header)], until=until, patience_seconds=patience).read(
                UploadState
            )
            if not state.missing:
                return
            if time.monotonic() > until:
                raise UnreachableError(
                    f"a body of {parcel.size} bytes did not get to {self.address} in time: {len(state.missing)} chunks "
                    "are missing",
                    hint="check the link between the regions and sync.bulk_rate",
                )
            try:
                self._each(lambda index, key=state.key: put(key, index), state.missing)
            except SyncRefusedError as error:
                if error.reason != "unknown_upload":  # the syncer was restarted, or the body is answered: ask it
                    raise

    def fetch(self, version: int, *, fragment: int, ranges: Ranges, until: float) -> Floats:
        """Elements of the fragment's weights, one range after the other."""
        found = np.empty(count(ranges), np.float32)

        def get(piece: tuple[int, Ranges]) -> None:
            start, wanted = piece
            into = view_bytes(found[start : start + count(wanted)])
            self._get(f"theta/{fragment}/{version}", wanted, into=into, until=until)

        self._each(get, _cut(ranges))
        return found

    def close(self) -> None:
        """End connections; calls that wait give up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for link in self._links:
            link.close()

    def _get(self, path: str, ranges: Ranges, *, into: memoryview, until: float) -> None:
        body = [encode(RangesArgs(ranges=list(ranges), learner=self._learner))]
        while True:
            response = self._ask(path, body=body, until=until, patience_seconds=self._patience, into=into)
            if hashlib.sha256(into).hexdigest() == response.headers.get("X-Gkr-Sha256"):
                return
            if time.monotonic() > until:
                raise UnreachableError(
                    f"{path} arrives damaged from {self.address}", hint="check the network between the regions"
                )

    def _ask(self, path: str, *, until: float, **request: Any) -> Response:
        """`Link.ask` on a connection that is free."""
        try:
            link = self._idle.get(timeout=max(_SILENCE_SECONDS, until - time.monotonic()))
        except Empty:
            raise UnreachableError(
                f"all {len(self._links)} connections to the syncer at {self.address} are busy, {path} has to give up",
                hint="see the syncer's log, and whether the link to it is up; sync.bulk_connections sets how many",
            ) from None
        try:
            return link.ask(path, until=until, **request)
        finally:
            self._idle.put(link)

    def _each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """All items side by side; the first error, once all that were begun have ended."""
        if len(items) == 1:
            work(items[0])
            return
        futures = [self._pool.submit(work, item) for item in items]
        try:
            pending: set[Future[None]] = set(futures)
            while pending:  # each call inside ends by its own deadline
                done, pending = wait(pending, timeout=_SILENCE_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result(timeout=0)
        finally:
            for future in futures:
                future.cancel()
            wait(futures, timeout=_SILENCE_SECONDS)


def _cut(ranges: Ranges) -> list[tuple[int, Ranges]]:
    """The ranges in pieces of a chunk each, with the place of a piece's first element among all of them."""
    pieces: list[tuple[int, Ranges]] = []
    position, size, current = 0, 0, list[tuple[int, int]]()
    for start, length in ranges:
        while length:
            taken = min(length, _ELEMENTS - size)
            current.append((start, taken))
            start, length, size = start + taken, length - taken, size + taken
            if size == _ELEMENTS:
                pieces.append((position, current))
                position, size, current = position + size, 0, []
    return [*pieces, (position, current)] if current else pieces
