"""Which log files of a run a person means, and their lines with the place they come from.

Layout (design section 6): logs/<learner>/<attempt>/<role>-<index>.log, where a service's role is `service-<name>`; the
supervisor and the syncer stand under the learner `run`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gkr.watch.tail import LineTail

RUN = "run"

_FILE = re.compile(r"(?P<role>[a-z][a-z0-9-]*?)-(?P<index>\d+)\.log")
_DEFAULT_ROLES = {("driver", 0), ("rank", 0)}


@dataclass(frozen=True)
class LogFile:
    """One process's output."""

    path: Path
    learner: str
    attempt: int
    role: str
    index: int

    @property
    def prefix(self) -> str:
        """`east/rank-0#2`."""
        return f"{self.learner}/{self.role}-{self.index}#{self.attempt}"


@dataclass(frozen=True)
class Selection:
    """What to show. Nothing given.

    The drivers, every learner's rank 0, and whoever left a traceback; of each learner's latest attempt.
    """

    learner: str | None = None
    rank: int | None = None
    service: str | None = None
    role: str | None = None
    """A process's role such as `driver` or `rank`, or a pod's: `head`, `trainer`, `service`, `syncer`."""
    attempt: int | None = None
    previous: bool = False
    """The attempt before the latest."""
    everything: bool = False

    @property
    def narrow(self) -> bool:
        """A process was asked for, rather than the default choice."""
        asked = self.rank is not None or self.service is not None or self.role is not None
        return asked or self.learner == RUN or self.everything

    def means(self, *, role: str, index: int) -> bool | None:
        """Whether a process was asked for; none if that is left to the default choice."""
        if self.rank is not None:
            return role == "rank" and index == self.rank
        if self.service is not None:
            return role in {f"service-{self.service}", "service"} or f"{role}-{index}" == self.service
        if self.role is not None:
            return role == self.role or pod_role(role) == self.role
        return True if self.narrow else None


_POD_ROLES = {"rank": "trainer", "agent": "trainer", "preflight": "trainer", "syncer": "syncer"}


def pod_role(role: str) -> str:
    """In which kind of pod a process of that role runs on a cluster."""
    return "service" if role.startswith("service") else _POD_ROLES.get(role, "head")


def in_default(role: str, index: int) -> bool:
    """Shown when nothing is asked for, with or without a traceback."""
    return (role, index) in _DEFAULT_ROLES


def find_logs(folder: Path) -> list[LogFile]:
    """All log files of a run, by learner, attempt and name."""
    found: list[LogFile] = []
    for path in (folder / "logs").glob("*/*/*.log"):
        match = _FILE.fullmatch(path.name)
        attempt, learner = path.parent.name, path.parent.parent.name
        if match is not None and attempt.isdecimal():
            found.append(LogFile(path, learner, int(attempt), match["role"], int(match["index"])))
    return sorted(found, key=lambda log: (log.learner, log.attempt, log.role, log.index))


def select(logs: Iterable[LogFile], *, selection: Selection) -> list[LogFile]:
    """The files that a selection means."""
    logs = list(logs)
    latest: dict[tuple[str, str], int] = {}
    for log in logs:
        latest[log.learner, log.role] = max(latest.get((log.learner, log.role), 0), log.attempt)
    newest = {learner: max(attempt for (one, _), attempt in latest.items() if one == learner) for learner, _ in latest}
    return [log for log in logs if _matches(log, selection, newest=newest, latest=latest)]


def _matches(log: LogFile, selection: Selection, *, newest: dict[str, int], latest: dict[tuple[str, str], int]) -> bool:
    if selection.learner is not None and log.learner != selection.learner:
        return False
    if selection.attempt is not None and log.attempt != selection.attempt:
        return False
    # Ranks get a new attempt more often than their driver: each role's own latest counts, so that none disappears.
    wanted = newest[log.learner] if log.role == "rank" else latest[log.learner, log.role]
    wanted -= selection.previous
    if selection.attempt is None and not selection.everything and log.attempt != wanted:
        return False
    meant = selection.means(role=log.role, index=log.index)
    return in_default(log.role, log.index) or _has_traceback(log.path) if meant is None else meant


def first_failed(logs: Iterable[LogFile]) -> list[LogFile]:
    """The process that failed first: of those that left a traceback the one that wrote last long ago."""
    failed = [log for log in logs if _has_traceback(log.path)]
    return sorted(failed, key=lambda log: log.path.stat().st_mtime)[:1]


def tail_lines(log: LogFile, *, count: int | None) -> tuple[list[str], int]:
    """The last `count` lines (all if none) and how many were left out."""
    total, kept = 0, deque[bytes](maxlen=count)
    for line in _whole(log.path):
        total += 1
        kept.append(line)
    return [clean(line) for line in kept], total - len(kept)


def clean(line: bytes) -> str:
    """One line as text; of a progress bar that rewrote itself only the last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _whole(path: Path) -> Iterator[bytes]:
    reader = LineTail(path)
    yield from reader.read()
    rest = reader.rest()
    if rest:
        yield rest


def _has_traceback(path: Path) -> bool:
    try:
        return b"Traceback (most recent call last)" in path.read_bytes()
    except OSError:
        return False
