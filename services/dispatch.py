"""The client's half of flow control: which request goes to which replica, and what becomes of it. No I/O, no clock.

A request waits, is in flight at one replica, or is over. It goes out only with a credit; when its replica is lost it
goes back to the front of the queue and is sent again, to whichever replica has credit then. It is over exactly once:
answered, expired, cancelled or given up. A request that expires or is cancelled in flight keeps its credit taken until
the replica's own answer arrives, because until then the replica counts it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

LinkT = TypeVar("LinkT", bound=Hashable)


@dataclass
class Pending:
    """One request of this client. Mutable: `attempt` counts its sendings."""

    request: int
    expires: float
    payload: Any = None
    attempt: int = 0
    over: bool = False


@dataclass
class _Link:
    grant: int
    inflight: dict[int, Pending] = field(default_factory=dict[int, Pending])

    @property
    def free(self) -> int:
        return self.grant - len(self.inflight)


class Dispatcher(Generic[LinkT]):
    """All requests and credits of one client."""

    def __init__(self, *, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._waiting: deque[Pending] = deque()
        self._links: dict[LinkT, _Link] = {}

    @property
    def waiting(self) -> int:
        """Requests that have no credit yet."""
        return len(self._waiting)

    def submit(self, pending: Pending) -> None:
        """Take a request."""
        self._waiting.append(pending)

    def open(self, link: LinkT, *, grant: int) -> None:
        """A replica granted so many credits. Stating the grant again changes nothing that is in flight."""
        known = self._links.get(link)
        if known is None:
            self._links[link] = _Link(grant)
        else:
            known.grant = grant

    def lost(self, link: LinkT) -> list[Pending]:
        """A replica is gone: its requests wait again, in their order. Returns those sent too often, which are over."""
        gone = self._links.pop(link, None)
        if gone is None:
            return []
        unanswered = [pending for pending in gone.inflight.values() if not pending.over]
        given_up = [pending for pending in unanswered if pending.attempt >= self._max_attempts]
        for pending in given_up:
            pending.over = True
        self._waiting.extendleft(reversed([pending for pending in unanswered if not pending.over]))
        return given_up

    def assign(self) -> list[tuple[LinkT, Pending]]:
        """What to send now: waiting requests in order, each to the replica with the most free credit."""
        sendings: list[tuple[LinkT, Pending]] = []
        while self._waiting:
            name = max(self._links, key=lambda link: self._links[link].free, default=None)
            if name is None or self._links[name].free <= 0:
                break
            pending = self._waiting.popleft()
            if pending.over:
                continue
            pending.attempt += 1
            self._links[name].inflight[pending.request] = pending
            sendings.append((name, pending))
        return sendings

    def answered(self, link: LinkT, request: int) -> Pending | None:
        """An answer arrived: frees its credit. Returns the request if this ends it, none if it was over or unknown."""
        known = self._links.get(link)
        pending = known.inflight.pop(request, None) if known else None
        if pending is None or pending.over:
            return None
        pending.over = True
        return pending

    def expire(self, now: float) -> list[tuple[Pending, LinkT | None]]:
        """End every request whose caller has stopped waiting; with the replica to tell, if it is in flight."""
        late = [(pending, link) for pending, link in self._live() if pending.expires <= now]
        self._end(late)
        return late

    def cancel(self, request: int) -> list[tuple[Pending, LinkT | None]]:
        """End one request, as `expire` does."""
        found = [(pending, link) for pending, link in self._live() if pending.request == request]
        self._end(found)
        return found

    def drain(self) -> list[Pending]:
        """End everything: the client closes, or no replica will ever take it."""
        live = self._live()
        self._end(live)
        return [pending for pending, _ in live]

    def next_expiry(self) -> float | None:
        """The earliest deadline of all live requests."""
        return min((pending.expires for pending, _ in self._live()), default=None)

    def _live(self) -> list[tuple[Pending, LinkT | None]]:
        waiting: list[tuple[Pending, LinkT | None]] = [(pending, None) for pending in self._waiting]
        flying = [(pending, link) for link, state in self._links.items() for pending in state.inflight.values()]
        return [(pending, link) for pending, link in (*waiting, *flying) if not pending.over]

    def _end(self, ended: list[tuple[Pending, LinkT | None]]) -> None:
        for pending, _ in ended:
            pending.over = True
        if any(link is None for _, link in ended):
            self._waiting = deque(pending for pending in self._waiting if not pending.over)
