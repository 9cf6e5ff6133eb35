"""The same question to several clusters at once: those that answer are shown, those that do not are named.

Promises: done within the deadline whatever the clusters do; one that is down costs its own answer only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gkr.cluster.connection import Connection, connect
from gkr.cluster.registry import ClusterEntry, read_registry
from spec.errors import GkrError, NotFoundError, UnreachableError

DEADLINE_SECONDS = 20.0

T = TypeVar("T")


@dataclass(frozen=True)
class Answers(Generic[T]):
    """What came back."""

    found: Mapping[str, T]
    failed: Mapping[str, GkrError]

    def require_one(self) -> None:
        """Raise the first failure if nobody answered."""
        if not self.found and self.failed:
            raise next(iter(self.failed.values()))


def chosen_clusters(names: Sequence[str]) -> list[ClusterEntry]:
    """The named clusters, else all that were added."""
    registry = read_registry()
    if names:
        return [registry.get(name) for name in dict.fromkeys(names)]
    if not registry.entries:
        raise NotFoundError("no cluster has been added", hint="`gkr clusters add NAME` adds the current context")
    return list(registry.entries.values())


def ask(
    entries: Sequence[ClusterEntry],
    question: Callable[[Connection], T],
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Answers[T]:
    """Ask all at once. Daemon threads: one that hangs must not keep the command from ending."""
    found: dict[str, T] = {}
    failed: dict[str, GkrError] = {}
    bugs: list[BaseException] = []

    def one(entry: ClusterEntry) -> None:
        try:
            connection = connect(entry)
            try:
                found[entry.name] = question(connection)
            finally:
                connection.close()
        except GkrError as error:
            failed[entry.name] = error
        except Exception as error:  # noqa: BLE001 the thread's boundary: a bug is raised again in the caller's thread
            bugs.append(error)

    threads = {entry.name: threading.Thread(target=one, args=(entry,), daemon=True) for entry in entries}
    until = time.monotonic() + deadline_seconds
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            text = f"no answer within {deadline_seconds:g} s"
            failed[name] = UnreachableError(text, where=f"cluster {name}", hint="is the network or VPN up?")
    if bugs:
        raise bugs[0]
    order = [entry.name for entry in entries]
    return Answers(
        {name: found[name] for name in order if name in found and name not in failed},
        {name: failed[name] for name in order if name in failed},
    )
