"""A run's folder here, kept like the folders in the buckets of its clusters: events, logs, pictures.

Promises: every event that was shipped is appended to events.jsonl once (twice only if we die between two writes, which
readers bear); what the run's objects say becomes a RunStatus event whenever it changes; two commands that mirror the
same run do not mix. Must not decide what a state means: that is `gkr.cluster.state`.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gkr.cluster.state import Standing
from gkr.local.files import write_atomically
from gkr.runs import FINAL, read_state
from spec.errors import GkrError, UnreachableError
from spec.events import Event, RunStatus, read_event, write_event
from storage import Bucket
from storage.errors import ExistsError

if TYPE_CHECKING:
    from storage import Entry

SOURCE = "gkr"
_LOCK_SECONDS = 20.0
_POLL_SECONDS = 0.05


class Mirror:
    """One run. `buckets` are its folders in the regions, the home one first, each once."""

    def __init__(self, folder: Path, *, buckets: Mapping[str, Bucket]) -> None:
        self._folder, self._buckets = folder, buckets
        self._memory = folder / "state" / "mirror.json"

    def events(self) -> int:
        """Fetch what was shipped since the last time; how many events."""
        with locked(self._folder):
            seen = self._seen()
            fetched = [
                (uri, entry, bucket) for uri, bucket in self._buckets.items() for entry in _new(uri, bucket, seen)
            ]
            events = [event for _, entry, bucket in fetched for event in _read(bucket, entry.key)]
            append(self._folder, sorted(events, key=lambda one: one.time))
            if fetched:
                self._remember({**seen, **{f"{uri}/{entry.key}": entry.size for uri, entry, _ in fetched}})
        return len(events)

    def files(self, prefix: str) -> int:
        """Fetch objects below `prefix` that are new or have grown, to the same path here; how many."""
        count = 0
        with locked(self._folder):
            seen = self._seen()
            fresh: dict[str, float] = {}
            for uri, bucket in self._buckets.items():
                for entry in bucket.list(prefix):
                    mark = entry.size + entry.modified
                    if seen.get(f"{uri}/{entry.key}") != mark:
                        bucket.fetch(entry.key, self._folder / entry.key)
                        fresh[f"{uri}/{entry.key}"] = mark
                        count += 1
            if fresh:
                self._remember({**seen, **fresh})
        return count

    def publish(self, event: RunStatus) -> None:
        """Say how the run ended to everybody who mirrors it; the first word stands."""
        for bucket in list(self._buckets.values())[:1]:
            with suppress(ExistsError):
                bucket.create(f"events/{SOURCE}/000001-00000001.jsonl", write_event(event).encode())

    def _seen(self) -> dict[str, float]:
        try:
            return dict(json.loads(self._memory.read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def _remember(self, seen: Mapping[str, float]) -> None:
        write_atomically(self._memory, json.dumps(seen))


def note_standing(folder: Path, found: Standing) -> bool:
    """Append what the objects say if it is news; true if it was. What is final stays."""
    with locked(folder):
        known = read_state(folder)
        if known.status in FINAL or (known.status, known.reason) == (found.status, found.reason):
            return False
        final = found.status in FINAL
        append(folder, [status_event(found.status, found.reason, exit_code=found.exit_code if final else None)])
    return True


def status_event(status: str, reason: str, *, exit_code: int | None) -> RunStatus:
    """As the supervisor writes them on the local backend."""
    return RunStatus.model_validate(
        {"time": time.time(), "source": SOURCE, "status": status, "reason": reason, "exit_code": exit_code}
    )


def append(folder: Path, events: Iterable[Event]) -> None:
    """One write for all of them."""
    lines = "".join(map(write_event, events)).encode()
    if not lines:
        return
    file = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(file, lines)
    except OSError as error:
        raise GkrError(f"cannot write {folder}/events.jsonl: {error.strerror}", hint="free some space") from error
    finally:
        os.close(file)
    if written != len(lines):
        raise GkrError(f"{folder}/events.jsonl was cut short", hint="free some space")


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """One writer of the run's folder at a time."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    with (folder / "state" / "mirror.lock").open("ab") as file:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UnreachableError(
                        f"another gkr has held {folder} for {_LOCK_SECONDS:g} s", hint="end it, or wait for it"
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield


def _new(uri: str, bucket: Bucket, seen: Mapping[str, float]) -> list[Entry]:
    """Segments are written once; a key that was read is never read again."""
    return [entry for entry in bucket.list("events") if f"{uri}/{entry.key}" not in seen]


def _read(bucket: Bucket, key: str) -> list[Event]:
    lines = bucket.get(key).data.split(b"\n")
    return [event for line in lines if line.strip() and (event := read_event(line)) is not None]
