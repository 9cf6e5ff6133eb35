"""The log files of a pod: printed to its output as they grow, and kept in the run's bucket.

Printing is for people who look at the pod; the bucket is what outlives it. A bucket that is away delays copies and
loses none; nothing here raises because of one.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spec.errors import GkrError
from storage import Bucket, MissingError

log = logging.getLogger("logs")

SHIP_SECONDS = 2.0
BYTES_PER_SECOND = 4 * 2**20
"""A file goes out whole each time, so a large one goes out less often: its size by this rate."""
_READ_BYTES = 2**20
_LINE_BYTES = 2**16


class LineFollower:
    """New whole lines of one growing file. Of a line that was written over with carriage returns, as progress bars
    are, only its last state."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path, self._offset, self._rest = path, offset, b""

    def read(self, *, last: bool = False) -> list[str]:
        """What is new, at most 1 MiB; with `last` also a line without its end."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(_READ_BYTES)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES:  # a progress bar that never ends its line: only its end counts
            self._rest = self._rest[-_LINE_BYTES:]
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        return [_final(line) for line in lines]


class LogPrinter:
    """All log files below a folder. Files that are there already were printed by the container before this one."""

    def __init__(self, folder: Path, *, write: Callable[[str], object]) -> None:
        self._folder, self._write = folder, write
        self._followers = {path: LineFollower(path, offset=path.stat().st_size) for path in folder.rglob("*.log")}

    def step(self, *, last: bool = False) -> None:
        """Print what is new."""
        for path in sorted(self._folder.rglob("*.log")):
            follower = self._followers.setdefault(path, LineFollower(path))
            prefix = path.relative_to(self._folder).with_suffix("").as_posix()
            try:
                lines = follower.read(last=last)
            except OSError as error:
                log.warning("cannot read %s: %s", path, error)
                continue
            for line in lines:
                self._write(f"{prefix} | {line}\n")


@dataclass(slots=True)
class _Sent:
    """What the bucket has of a file."""

    size: int = -1
    next: float = 0.0
    """Not before this time again."""


class LogShipper:
    """Copies log files to `logs/...`, each as one object that is replaced while the file grows.

    A pod that replaces another may write a file of the same name: what the bucket has of it then stays in front.
    """

    def __init__(self, folder: Path, *, bucket: Bucket, state: Path) -> None:
        self._folder, self._bucket, self._state = folder, bucket, state
        self._sent: dict[Path, _Sent] = {}
        self._away = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def close(self, *, deadline_seconds: float) -> bool:
        """Copy what is left, for at most that long; true if nothing is left."""
        self._stop.set()
        self._thread.join(timeout=deadline_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            stopping = self._stop.wait(SHIP_SECONDS)
            done = self._step(everything=stopping)
            if stopping and done:
                return

    def _step(self, *, everything: bool) -> bool:
        try:
            for path in sorted(self._folder.rglob("*.log")):
                sent = self._sent.setdefault(path, _Sent())
                size = path.stat().st_size
                if size == sent.size or (time.monotonic() < sent.next and not everything):
                    continue
                self._send(path)
                sent.size, sent.next = size, time.monotonic() + size / BYTES_PER_SECOND
        except (GkrError, OSError) as error:
            if not self._away:
                log.warning("logs wait: %s", error)
            self._away = True
            return False
        self._away = False
        return True

    def _send(self, path: Path) -> None:
        below = path.relative_to(self._folder)
        key = f"logs/{below.as_posix()}"
        before = self._state / below
        if not before.exists():
            before.parent.mkdir(parents=True, exist_ok=True)
            draft = before.with_name(f".{before.name}")
            try:
                self._bucket.fetch(key, draft)
            except MissingError:
                draft.touch()
            draft.replace(before)
        if not before.stat().st_size:
            self._bucket.send(key, path)
            return
        whole = before.with_name(f".{before.name}.whole")
        with whole.open("wb") as file:
            for part in (before, path):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        self._bucket.send(key, whole)
        whole.unlink()


def _final(line: bytes) -> str:
    kept = line.rstrip(b"\r").rpartition(b"\r")[2][:_LINE_BYTES]
    return kept.decode(errors="replace")
