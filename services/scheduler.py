"""Who is served next: bounded queues, classes, turns by cost, batches of calls that fit together. No I/O, no clock.

The promise: a client that keeps its queue full delays another client's request of the same class by at most the batch
that is running when the request arrives, plus the request's own batch. It follows from two rules. A client never has
more queued than its grant, in requests and in bytes, so nothing it sends can pile up in front of others; and a batch
takes the next request of the client that has received the least so far, one at a time, so every batch begins with
whoever is most behind.

"Received so far" is a virtual time in cost units (start-time fair queueing): a request begins at its line's mark and
moves it by its cost. A line that was idle starts at the present mark, so idling earns no credit for later.

Higher classes go first, and each class has a time of its own. A request of a lower one rises by one class for every
`AGING_SECONDS` that it waits and takes turns there like everybody else, so that a flood above delays it and does not
starve it. What a batch has room for after the higher classes, lower ones may use.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec import Struct

from services.wire.frames import Priority

AGING_SECONDS = 2.0
"""Of waiting, for each class that a request rises."""

_LEVELS = tuple(Priority)
_SPARE_ENTRIES = 64
"""Leftovers that the heaps may hold beyond what the number of clients explains."""

ClientT = TypeVar("ClientT", bound=Hashable)


class GrantExceeded(Exception):  # noqa: N818 - a verdict on the client, not a failure of ours
    """The client sent more than its grant."""


class Ticket(Struct, Generic[ClientT], frozen=True):
    """One admitted request."""

    client: ClientT
    request: int
    method: str
    batch_key: Hashable
    cost: int
    expires: float
    """Monotonic seconds of the server's clock after which nobody waits for the answer."""
    arrived: float = 0.0
    payload: Any = None
    priority: Priority = Priority.BLOCKING
    size: int = 0
    """Bytes of the grant that it takes."""

    @property
    def compatible(self) -> tuple[str, Hashable]:
        """Tickets with equal values may share a batch."""
        return (self.method, self.batch_key)


class Batch(Struct, Generic[ClientT], frozen=True):
    """What to compute now."""

    tickets: list[Ticket[ClientT]]
    expired: list[Ticket[ClientT]]
    """Dropped while forming it: answered, never computed."""


@dataclass
class _Line(Generic[ClientT]):
    """What one client has queued in one class."""

    priority: Priority
    tickets: deque[Ticket[ClientT]] = field(default_factory=deque[Ticket[ClientT]])
    marks: list[float] = field(default_factory=lambda: [0.0] * len(_LEVELS))
    """In the time of its own class, and of those above to which its requests have risen."""
    turn: int = 0
    """When it was last served; breaks ties in favour of who waited longer."""
    place: int = 0
    """Number of its entry in a heap; entries with other numbers are leftovers."""
    level: int = 0
    """Class that its first request has risen to."""


@dataclass
class _Client(Generic[ClientT]):
    outstanding: dict[int, int] = field(default_factory=dict[int, int])
    """Requests that hold a credit (queued or running, not yet answered), and their bytes."""
    bytes: int = 0
    lines: dict[Priority, _Line[ClientT]] = field(default_factory=dict[Priority, _Line[ClientT]])
    marks: dict[Priority, float] = field(default_factory=dict[Priority, float])
    """Where its lines begin that it has not used since it came."""


_Entry = tuple[float, int, int, "_Line[ClientT]"]


class Scheduler(Generic[ClientT]):
    """The state of all queues of one replica."""

    def __init__(self, *, grant: int, max_batch: int, grant_bytes: int = 0, max_delay_seconds: float = 0.0) -> None:
        """Per client: `grant` requests, and `grant_bytes` of them together (0: any); one request is always allowed.

        `max_delay_seconds`: how long requests that nobody is blocked by may wait for a full batch.
        """
        self.grant, self.grant_bytes, self.max_batch = grant, grant_bytes, max_batch
        self._max_delay = max_delay_seconds
        self._clients: dict[ClientT, _Client[ClientT]] = {}
        self._heaps: tuple[list[_Entry[ClientT]], ...] = tuple([] for _ in _LEVELS)
        self._risings: list[tuple[float, int, _Line[ClientT]]] = []
        """When the first request of a line rises: (time, place, line), a heap with leftovers like the others."""
        self._present = [0.0 for _ in _LEVELS]
        """Virtual time of each class."""
        self._turns = self._places = 0
        self._queued_cost = 0
        self._expiry_at = math.inf
        """No queued request expires before."""

    def join(self, client: ClientT) -> list[Ticket[ClientT]]:
        """Admit a client, or start over with one that came back: returns what was queued, which is forgotten.

        Its running requests no longer hold a credit; the client sends again what it still wants.
        """
        before = self._clients.get(client)
        marks = (
            {**before.marks, **{line.priority: line.marks[line.priority] for line in before.lines.values()}}
            if before
            else {}
        )
        queued = self.leave(client)
        self._clients[client] = _Client(marks=marks)
        return queued

    def leave(self, client: ClientT) -> list[Ticket[ClientT]]:
        """Forget a client and return what it had queued."""
        known = self._clients.pop(client, None)
        queued = [ticket for line in known.lines.values() for ticket in line.tickets] if known else []
        for line in known.lines.values() if known else ():
            line.tickets.clear()
            line.place = 0
        self._queued_cost -= sum(ticket.cost for ticket in queued)
        return queued

    def hold(self, client: ClientT, request: int, *, size: int = 0) -> None:
        """Count a request that is not queued (it runs already, for this client's former connection)."""
        known = self._clients[client]
        if request in known.outstanding:
            return
        if len(known.outstanding) >= self.grant:
            raise GrantExceeded(f"more than {self.grant} requests without an answer")
        if self.grant_bytes and known.outstanding and known.bytes + size > self.grant_bytes:
            raise GrantExceeded(f"more than {self.grant_bytes} bytes of requests without an answer")
        known.outstanding[request] = size
        known.bytes += size

    def offer(self, ticket: Ticket[ClientT]) -> None:
        """Queue a request. Raises GrantExceeded if its client has no credit left."""
        self.hold(ticket.client, ticket.request, size=ticket.size)
        known = self._clients[ticket.client]
        line = known.lines.get(ticket.priority)
        if line is None:
            line = known.lines[ticket.priority] = _Line(ticket.priority)
            line.marks[ticket.priority] = known.marks.get(ticket.priority, 0.0)
        line.tickets.append(ticket)
        self._queued_cost += ticket.cost
        self._expiry_at = min(self._expiry_at, ticket.expires)
        if len(line.tickets) == 1:
            self._enter(line)

    def holds(self, client: ClientT, request: int) -> bool:
        """Whether the request takes one of the client's credits: queued or running."""
        known = self._clients.get(client)
        return known is not None and request in known.outstanding

    def cancel(self, client: ClientT, request: int) -> Ticket[ClientT] | None:
        """Take a queued request out, for the caller to answer and settle. None if it runs, is answered or unknown."""
        known = self._clients.get(client)
        for line in known.lines.values() if known is not None else ():
            found = next((ticket for ticket in line.tickets if ticket.request == request), None)
            if found is not None:
                self._drop(line, [found])
                return found
        return None

    def settle(self, client: ClientT, request: int) -> None:
        """The request is answered: its credit is free again. Every path of a request ends here."""
        known = self._clients.get(client)
        if known is not None:
            known.bytes -= known.outstanding.pop(request, 0)

    def next_batch(self, now: float) -> Batch[ClientT] | None:
        """The next batch in turn, or none if nothing is queued. Its tickets stay outstanding until they are settled."""
        if not self._queued_cost:
            return None
        expired = self._expire(now) if now >= self._expiry_at else []
        self._rise(now)
        tickets = [] if self.ready_at() > now else self._form()
        return Batch(tickets, expired) if tickets or expired else None

    def ready_at(self) -> float:
        """When the next batch may be formed without another request: 0 for now, infinity while nothing is queued."""
        if not self._queued_cost:
            return math.inf
        if not self._max_delay or self._queued_cost >= self.max_batch or self._first(Priority.BLOCKING) is not None:
            return 0.0
        heads = [found.tickets[0].arrived for level in _LEVELS for _, _, _, found in self._current(level)]
        return min(heads) + self._max_delay

    def queued(self) -> dict[ClientT, int]:
        """Number of queued requests of every client that has some."""
        counts = {name: sum(len(line.tickets) for line in one.lines.values()) for name, one in self._clients.items()}
        return {name: count for name, count in counts.items() if count}

    def queued_by_priority(self) -> dict[Priority, int]:
        """Number of queued requests of each class that has some."""
        found: dict[Priority, int] = {}
        for one in self._clients.values():
            for priority, line in one.lines.items():
                if line.tickets:
                    found[priority] = found.get(priority, 0) + len(line.tickets)
        return found

    def outstanding(self, client: ClientT) -> int:
        """Credits in use by a client."""
        known = self._clients.get(client)
        return len(known.outstanding) if known else 0

    def outstanding_bytes(self, client: ClientT) -> int:
        """Bytes of its grant in use by a client."""
        known = self._clients.get(client)
        return known.bytes if known else 0

    def _form(self) -> list[Ticket[ClientT]]:
        tickets: list[Ticket[ClientT]] = []
        room = self.max_batch
        for level in _LEVELS:
            if tickets and not self._queued_cost:
                break
            passed: list[_Entry[ClientT]] = []
            while room > 0 or not tickets:
                entry = self._first(level)
                if entry is None:
                    break
                heapq.heappop(self._heaps[level])
                line = entry[3]
                head = line.tickets[0]
                # The first of a batch decides what may join, and is taken whatever it costs. A line whose head does not
                # fit stays out of this batch: room only shrinks, and order inside a line is kept.
                if tickets and (head.cost > room or head.compatible != tickets[0].compatible):
                    passed.append(entry)
                    continue
                tickets.append(line.tickets.popleft())
                room -= head.cost
                self._queued_cost -= head.cost
                self._turns += 1
                self._present[level] = max(self._present[level], line.marks[level])
                line.marks[level] += head.cost
                if level != line.priority:
                    line.marks[line.priority] += head.cost
                line.turn = self._turns
                self._enter(line)
            for entry in passed:
                heapq.heappush(self._heaps[level], entry)
        return tickets

    def _enter(self, line: _Line[ClientT]) -> None:
        """Give a line whose first request is a new one its place."""
        line.level = int(line.priority)
        if line.tickets:
            self._place(line, rises_at=line.tickets[0].arrived + AGING_SECONDS)
        else:
            line.place = 0

    def _place(self, line: _Line[ClientT], *, rises_at: float) -> None:
        mark = line.marks[line.level] = max(line.marks[line.level], self._present[line.level])
        self._places += 1
        line.place = self._places
        heap, most = self._heaps[line.level], _SPARE_ENTRIES + 2 * len(_LEVELS) * len(self._clients)
        heapq.heappush(heap, (mark, line.turn, line.place, line))
        if len(heap) > most:
            heap[:] = self._current(line.level)
            heapq.heapify(heap)
        if line.level:
            heapq.heappush(self._risings, (rises_at, line.place, line))
        if len(self._risings) > most:
            self._risings = [entry for entry in self._risings if entry[2].place == entry[1]]
            heapq.heapify(self._risings)

    def _rise(self, now: float) -> None:
        while self._risings and self._risings[0][0] <= now:
            due, place, line = heapq.heappop(self._risings)
            if line.place == place:
                line.level -= 1
                self._place(line, rises_at=due + AGING_SECONDS)

    def _first(self, level: int) -> _Entry[ClientT] | None:
        heap = self._heaps[level]
        while heap and heap[0][3].place != heap[0][2]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _current(self, level: int) -> Iterator[_Entry[ClientT]]:
        return (entry for entry in self._heaps[level] if entry[3].place == entry[2])

    def _drop(self, line: _Line[ClientT], gone: list[Ticket[ClientT]]) -> None:
        head = line.tickets[0]
        self._queued_cost -= sum(ticket.cost for ticket in gone)
        numbers = {ticket.request for ticket in gone}
        kept = [ticket for ticket in line.tickets if ticket.request not in numbers]
        line.tickets.clear()
        line.tickets.extend(kept)
        if not kept or kept[0] is not head:
            self._enter(line)

    def _expire(self, now: float) -> list[Ticket[ClientT]]:
        expired: list[Ticket[ClientT]] = []
        self._expiry_at = math.inf
        for one in self._clients.values():
            for line in one.lines.values():
                gone = [ticket for ticket in line.tickets if ticket.expires <= now]
                if gone:
                    self._drop(line, gone)
                    expired += gone
                self._expiry_at = min([self._expiry_at, *(ticket.expires for ticket in line.tickets)])
        return expired
