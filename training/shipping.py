"""Events of one writer on their way to the run's bucket: `events/<source>/<incarnation>-<number>.jsonl`.

The writer appends whole lines to a local file (`Outbox.path`); a thread copies them. Promises: the file is the buffer,
so a bucket that is away delays lines and loses none; at most about `SHIP_SECONDS` behind; each segment is created once,
holds whole lines and comes after those before it, so that a reader only ever takes new keys. An incarnation belongs to
one process: it claims the next number by creating the empty segment 0, and one that finds a newer claim was replaced.
Must not stop its process because of a bucket.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from spec.errors import GkrError, UnreachableError
from storage import Bucket, Entry, ExistsError

log = logging.getLogger("shipping")

SHIP_SECONDS = 0.5
SEGMENT_BYTES = 2**20
TAKEOVER_SECONDS = 10.0
"""How often it is looked for a newer process of the same source."""
RETRY_SECONDS = 1.0
_READERS = 16
_BATCH = 256
_SEGMENT = re.compile(r"(\d{6})-(\d{8})\.jsonl")

_T = TypeVar("_T")


class Outbox:
    """The events of this process, and what the processes of the same source before it said."""

    def __init__(self, bucket: Bucket, *, source: str, folder: Path, incarnation: int, history: Path) -> None:
        self.source, self.incarnation, self.history = source, incarnation, history
        """`history` is a file with the events of all earlier incarnations, in order."""
        self.path = _file(folder, incarnation)
        self.path.touch()
        self.taken_over = False
        """A newer process of this source is there: this one must end."""
        self._bucket = bucket
        self._copy = _Copy(bucket, path=self.path, source=source, incarnation=incarnation, number=1, offset=0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, bucket: Bucket, *, source: str, folder: Path, deadline_seconds: float) -> Outbox:
        """Ship what an earlier process left in `folder`, claim the next incarnation, and read what was said before.

        UnreachableError if the bucket does not answer until the deadline.
        """
        folder.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + deadline_seconds
        entries = _patiently(lambda: list(bucket.list(f"events/{source}")), until=until)
        _ship_rests(bucket, source=source, folder=folder, entries=entries, until=until)
        incarnation = _claim(bucket, source=source, last=max(_by_incarnation(entries), default=0), until=until)
        history = folder / "history.jsonl"
        # Listed again: all that was said before the claim, the rests included.
        entries = _patiently(lambda: list(bucket.list(f"events/{source}")), until=until)
        _read(bucket, [entry.key for entry in entries if _numbers(entry)[0] < incarnation], into=history, until=until)
        return cls(bucket, source=source, folder=folder, incarnation=incarnation, history=history)

    def close(self, *, deadline_seconds: float) -> bool:
        """Ship what is left, for at most that long; true if nothing is left."""
        self._stop.set()
        self._thread.join(timeout=deadline_seconds)
        return not self._thread.is_alive() and self._copy.offset == self.path.stat().st_size

    def _run(self) -> None:
        looked, away = time.monotonic(), False
        while True:
            stopping = self._stop.wait(RETRY_SECONDS if away else SHIP_SECONDS)
            try:
                while self._copy.step():
                    pass
                if time.monotonic() - looked > TAKEOVER_SECONDS:
                    looked = time.monotonic()
                    self.taken_over = self._bucket.exists(_key(self.source, self.incarnation + 1, 0))
                if away:
                    log.info("the bucket takes events again")
                away = False
            except GkrError as error:
                if not away:
                    log.warning("events wait in %s: %s", self.path, error.message)
                away = True
                continue
            if stopping:
                return


class _Copy:
    """One file going out in segments. An answer that never came may have been a success, so a segment that exists
    already is compared with the file."""

    def __init__(self, bucket: Bucket, *, path: Path, source: str, incarnation: int, number: int, offset: int) -> None:
        self._bucket, self._path, self._source, self._incarnation = bucket, path, source, incarnation
        self._number, self.offset = number, offset

    def step(self) -> bool:
        """One segment, if there are whole lines; true if there were."""
        data = _whole_lines(self._path, offset=self.offset)
        if not data:
            return False
        key = _key(self._source, self._incarnation, self._number)
        try:
            self._bucket.create(key, data)
            self.offset += len(data)
        except ExistsError:
            there = self._bucket.get(key).data
            if data.startswith(there):
                self.offset += len(there)
            else:  # nobody else writes under our claim; should it happen all the same, no line is lost
                log.warning("%s holds other lines than ours; going on after it", key)
        self._number += 1
        return True


def _ship_rests(bucket: Bucket, *, source: str, folder: Path, entries: Sequence[Entry], until: float) -> None:
    """Lines of earlier processes of this folder that never left it: a container that was started again."""
    segments = _by_incarnation(entries)
    for incarnation in sorted(segments):
        path = _file(folder, incarnation)
        if not path.exists():
            continue
        own = segments[incarnation]
        rest = _Copy(
            bucket, path=path, source=source, incarnation=incarnation, number=max(own) + 1, offset=sum(own.values())
        )
        while _patiently(rest.step, until=until):
            pass


def _claim(bucket: Bucket, *, source: str, last: int, until: float) -> int:
    incarnation = last
    while True:
        incarnation += 1
        try:
            _patiently(lambda: bucket.create(_key(source, incarnation, 0), b""), until=until)  # noqa: B023 called at once
        except ExistsError:
            continue  # another process, or our own try whose answer was lost
        return incarnation


def _read(bucket: Bucket, keys: Sequence[str], *, into: Path, until: float) -> None:
    def get(key: str) -> bytes:
        return _patiently(lambda: bucket.get(key).data, until=until)

    with into.open("wb") as file, ThreadPoolExecutor(_READERS) as pool:
        for first in range(0, len(keys), _BATCH):
            part = keys[first : first + _BATCH]
            for data in pool.map(get, part):
                file.write(data)


def _patiently(ask: Callable[[], _T], *, until: float) -> _T:
    """Repeat while the bucket does not answer."""
    while True:
        try:
            return ask()
        except UnreachableError as error:
            if time.monotonic() > until:
                raise
            log.warning("the bucket does not answer, trying again: %s", error.message)
        time.sleep(RETRY_SECONDS)


def _whole_lines(path: Path, *, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(SEGMENT_BYTES)
        if len(data) == SEGMENT_BYTES and b"\n" not in data:
            data += file.readline()
    return data[: data.rfind(b"\n") + 1]


def _by_incarnation(entries: Sequence[Entry]) -> dict[int, dict[int, int]]:
    """Incarnation to its segments' sizes by number."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for entry in entries:
        incarnation, number = _numbers(entry)
        found[incarnation][number] = entry.size
    return found


def _numbers(entry: Entry) -> tuple[int, int]:
    match = _SEGMENT.fullmatch(entry.key.rpartition("/")[2])
    if match is None:
        raise GkrError(f"{entry.key} is not a segment of events", hint="remove it; nothing else belongs there")
    return int(match[1]), int(match[2])


def _key(source: str, incarnation: int, number: int) -> str:
    return f"events/{source}/{incarnation:06d}-{number:08d}.jsonl"


def _file(folder: Path, incarnation: int) -> Path:
    return folder / f"{incarnation:06d}.jsonl"
