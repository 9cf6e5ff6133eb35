"""The client's half of flow control: which request goes to which replica, and what becomes of it. No I/O, no clock.

A request waits, is in flight at one replica, or is over. It goes out only with a credit, in requests and in bytes; when
its replica is lost it goes back to the front of the queue and is sent again, to whichever replica has credit then. It
is over exactly once: answered, expired, cancelled or given up. A request that expires or is cancelled in flight keeps
its credit taken until the replica's own answer arrives, because until then the replica counts it too.

What is sent again is paid for: each first sending earns a tenth of a second one, and a reserve covers the death of a
replica. So when replicas die one after the other, or all at once, the traffic stays within a tenth more, and requests
wait instead. A replica that breaks on request after request gets no more for a while, as long as another one can take
them; then it is tried with one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec import Struct

from services.wire.frames import Priority

RETRY_SHARE = 0.1
"""Second sendings that one first sending pays for."""
RETRY_RESERVE = 64.0
"""Second sendings that need not be earned first; as many as a replica grants, if that is more."""
RETRY_SECONDS = 1.0
"""One more is allowed after so long, lest a client that sends nothing new never sends again."""
BREAKER_FAILURES = 5
"""Internal errors in a row after which a replica is passed over."""
BREAKER_SECONDS = 2.0

LinkT = TypeVar("LinkT", bound=Hashable)


class Pending(Struct):
    """One request of this client. Mutable: `attempt` counts its sendings."""

    request: int
    expires: float
    payload: Any = None
    attempt: int = 0
    over: bool = False
    priority: Priority = Priority.BLOCKING
    size: int = 0
    """Bytes of credit that it takes."""


@dataclass
class _Link:
    grant: int
    grant_bytes: int
    inflight: dict[int, Pending] = field(default_factory=dict[int, Pending])
    bytes: int = 0
    failures: int = 0
    """Internal errors in a row."""
    passed_over_until: float = 0.0

    @property
    def free(self) -> int:
        return self.grant - len(self.inflight)

    def takes(self, pending: Pending) -> bool:
        fits = not self.grant_bytes or not self.inflight or self.bytes + pending.size <= self.grant_bytes
        return self.free > 0 and fits


class Dispatcher(Generic[LinkT]):
    """All requests and credits of one client."""

    def __init__(self, *, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._waiting: dict[Priority, deque[Pending]] = {priority: deque() for priority in Priority}
        self._again: deque[Pending] = deque()
        """Those that were sent before."""
        self._queues = (self._again, *self._waiting.values())
        """In their order."""
        self._links: dict[LinkT, _Link] = {}
        self._reserve = self._retries = RETRY_RESERVE
        self._refilled_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether `assign` may have something."""
        return any(self._queues)

    def submit(self, pending: Pending) -> None:
        """Take a request."""
        self._waiting[pending.priority].append(pending)

    def open(self, link: LinkT, *, grant: int, grant_bytes: int = 0) -> None:
        """A replica granted so many credits, and so many bytes of requests (0: any) beyond the first one. Stating the
        grant again changes nothing that is in flight."""
        more = max(0.0, grant - self._reserve)  # or what dies with one replica would wait to be earned
        self._reserve += more
        self._retries += more
        known = self._links.get(link)
        if known is None:
            self._links[link] = _Link(grant, grant_bytes)
        else:
            known.grant, known.grant_bytes = grant, grant_bytes

    def lost(self, link: LinkT) -> list[Pending]:
        """A replica is gone: its requests wait again, in their order. Returns those sent too often, which are over."""
        gone = self._links.pop(link, None)
        if gone is None:
            return []
        unanswered = [pending for pending in gone.inflight.values() if not pending.over]
        given_up = [pending for pending in unanswered if pending.attempt >= self._max_attempts]
        for pending in given_up:
            pending.over = True
        again = [pending for pending in unanswered if not pending.over]
        ordered = sorted((*again, *self._again), key=lambda one: (one.priority, one.request))
        self._again.clear()
        self._again.extend(ordered)
        return given_up

    def assign(self, now: float) -> list[tuple[LinkT, Pending]]:
        """What to send now: first what was sent before, then by class and in order, each to the replica with the most
        free credit. A request that no credit in bytes is left for holds up those behind it."""
        self._refill(now)
        sendings: list[tuple[LinkT, Pending]] = []
        for queue in self._queues:
            while queue and (queue is not self._again or self._retries >= 1):
                if queue[0].over:
                    queue.popleft()
                    continue
                name = self._choose(queue[0], now)
                if name is None:
                    return sendings
                sendings.append((name, self._send(queue.popleft(), name)))
        return sendings

    def answered(self, link: LinkT, request: int, *, broke: bool = False, now: float = 0.0) -> Pending | None:
        """An answer arrived: frees its credit. Returns the request if this ends it, none if it was over or unknown.

        `broke`: the answer is that the replica broke on it.
        """
        known = self._links.get(link)
        pending = known.inflight.pop(request, None) if known else None
        if known is None or pending is None:
            return None
        known.bytes -= pending.size
        known.failures = known.failures + 1 if broke else 0
        if known.failures >= BREAKER_FAILURES:
            known.passed_over_until = now + BREAKER_SECONDS
        if pending.over:
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

    def _choose(self, pending: Pending, now: float) -> LinkT | None:
        if len(self._links) == 1:  # no choice
            [(name, link)] = self._links.items()
            return name if link.takes(pending) else None
        sound = {name for name, link in self._links.items() if self._is_sound(link, now)}
        # One replica that breaks is better than none: it may be the request.
        usable = [name for name, link in self._links.items() if link.takes(pending) and (name in sound or not sound)]
        return max(usable, key=lambda name: self._links[name].free, default=None)

    def _is_sound(self, link: _Link, now: float) -> bool:
        if link.failures < BREAKER_FAILURES:
            return True
        return now >= link.passed_over_until and not link.inflight  # time to try it with one

    def _send(self, pending: Pending, name: LinkT) -> Pending:
        if pending.attempt:
            self._retries -= 1
        else:
            self._retries = min(self._reserve, self._retries + RETRY_SHARE)
        pending.attempt += 1
        link = self._links[name]
        link.inflight[pending.request] = pending
        link.bytes += pending.size
        return pending

    def _refill(self, now: float) -> None:
        if self._retries < 1 and now - self._refilled_at >= RETRY_SECONDS:
            self._retries += 1
            self._refilled_at = now

    def _live(self) -> list[tuple[Pending, LinkT | None]]:
        waiting: list[tuple[Pending, LinkT | None]] = [(one, None) for queue in self._queues for one in queue]
        flying = [(pending, link) for link, state in self._links.items() for pending in state.inflight.values()]
        return [(pending, link) for pending, link in (*waiting, *flying) if not pending.over]

    def _end(self, ended: list[tuple[Pending, LinkT | None]]) -> None:
        for pending, _ in ended:
            pending.over = True
        if any(link is None for _, link in ended):
            for queue in self._queues:
                kept = [pending for pending in queue if not pending.over]
                queue.clear()
                queue.extend(kept)
