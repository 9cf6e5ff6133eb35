"""Who is served next: a bounded queue per client, turns by cost, batches of calls that fit together. No I/O, no clock.

The promise: a client that keeps its queue full delays another client's request by at most the batch that is running
when the request arrives, plus the request's own batch. It follows from two rules. A queue never holds more than its
grant, so nothing a client sends can pile up in front of others; and a batch takes the next request of the client that
has received the least so far, one at a time, so every batch begins with whoever is most behind.

"Received so far" is a virtual time in cost units (start-time fair queueing): a request begins at its client's mark and
moves it by its cost. A client that was idle starts at the present mark, so idling earns no credit for later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

ClientT = TypeVar("ClientT", bound=Hashable)


class GrantExceeded(Exception):  # noqa: N818 - a verdict on the client, not a failure of ours
    """The client sent more than its grant."""


@dataclass(frozen=True)
class Ticket(Generic[ClientT]):
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

    @property
    def compatible(self) -> tuple[str, Hashable]:
        """Tickets with equal values may share a batch."""
        return (self.method, self.batch_key)


@dataclass(frozen=True)
class Batch(Generic[ClientT]):
    """What to compute now."""

    tickets: list[Ticket[ClientT]]
    expired: list[Ticket[ClientT]]
    """Dropped while forming it: answered, never computed."""


@dataclass
class _Queue(Generic[ClientT]):
    tickets: deque[Ticket[ClientT]] = field(default_factory=deque[Ticket[ClientT]])
    outstanding: set[int] = field(default_factory=set[int])
    """Requests that hold a credit: queued or running, not yet answered."""
    mark: float = 0.0
    turn: int = 0
    """When it was last served; breaks ties in favour of who waited longer."""


class Scheduler(Generic[ClientT]):
    """The state of all queues of one replica."""

    def __init__(self, *, grant: int, max_batch: int) -> None:
        self.grant = grant
        self.max_batch = max_batch
        self._queues: dict[ClientT, _Queue[ClientT]] = {}
        self._now = 0.0
        self._turns = 0

    def join(self, client: ClientT) -> list[Ticket[ClientT]]:
        """Admit a client, or start over with one that came back: returns what was queued, which is forgotten.

        Its running requests no longer hold a credit; the client sends again what it still wants.
        """
        before = self._queues.get(client)
        self._queues[client] = _Queue(mark=max(self._now, before.mark if before else 0.0))
        return list(before.tickets) if before else []

    def leave(self, client: ClientT) -> list[Ticket[ClientT]]:
        """Forget a client and return what it had queued."""
        queue = self._queues.pop(client, None)
        return list(queue.tickets) if queue else []

    def hold(self, client: ClientT, request: int) -> None:
        """Count a request that is not queued (it runs already, for this client's former connection)."""
        queue = self._queues[client]
        if request in queue.outstanding:
            return
        if len(queue.outstanding) >= self.grant:
            raise GrantExceeded(f"more than {self.grant} requests without an answer")
        queue.outstanding.add(request)

    def offer(self, ticket: Ticket[ClientT]) -> None:
        """Queue a request. Raises GrantExceeded if its client has no credit left."""
        self.hold(ticket.client, ticket.request)
        queue = self._queues[ticket.client]
        if not queue.tickets:
            queue.mark = max(queue.mark, self._now)
        queue.tickets.append(ticket)

    def holds(self, client: ClientT, request: int) -> bool:
        """True while the request holds one of the client's credits."""
        queue = self._queues.get(client)
        return queue is not None and request in queue.outstanding

    def cancel(self, client: ClientT, request: int) -> Ticket[ClientT] | None:
        """Take a queued request out, for the caller to answer and settle. None if it runs, is answered or unknown."""
        queue = self._queues.get(client)
        if queue is None:
            return None
        found = next((ticket for ticket in queue.tickets if ticket.request == request), None)
        if found is not None:
            queue.tickets.remove(found)
        return found

    def settle(self, client: ClientT, request: int) -> None:
        """The request is answered: its credit is free again. Every path of a request ends here."""
        queue = self._queues.get(client)
        if queue is not None:
            queue.outstanding.discard(request)

    def next_batch(self, now: float) -> Batch[ClientT] | None:
        """The next batch in turn, or none if nothing is queued. Its tickets stay outstanding until they are settled."""
        expired = [ticket for queue in self._queues.values() for ticket in _drop_expired(queue.tickets, now)]
        # The number only keeps the heap from comparing queues.
        heap = [(q.mark, q.turn, n, q) for n, q in enumerate(self._queues.values()) if q.tickets]
        heapq.heapify(heap)
        tickets: list[Ticket[ClientT]] = []
        room = self.max_batch
        while heap and (room > 0 or not tickets):
            _, _, number, queue = heapq.heappop(heap)
            head = queue.tickets[0]
            # The first of a batch decides what may join, and is taken whatever it costs. A queue whose head does not
            # fit stays out of this batch: room only shrinks, and order inside a queue is kept.
            if tickets and (head.cost > room or head.compatible != tickets[0].compatible):
                continue
            tickets.append(queue.tickets.popleft())
            room -= head.cost
            self._turns += 1
            self._now = max(self._now, queue.mark)
            queue.mark += head.cost
            queue.turn = self._turns
            if queue.tickets:
                heapq.heappush(heap, (queue.mark, queue.turn, number, queue))
        return Batch(tickets, expired) if tickets or expired else None

    def queued(self) -> dict[ClientT, int]:
        """Length of every queue that is not empty."""
        return {client: len(queue.tickets) for client, queue in self._queues.items() if queue.tickets}

    def outstanding(self, client: ClientT) -> int:
        """Credits in use by a client."""
        queue = self._queues.get(client)
        return len(queue.outstanding) if queue else 0


def _drop_expired(tickets: deque[Ticket[ClientT]], now: float) -> list[Ticket[ClientT]]:
    if all(ticket.expires > now for ticket in tickets):
        return []
    expired = [ticket for ticket in tickets if ticket.expires <= now]
    kept = [ticket for ticket in tickets if ticket.expires > now]
    tickets.clear()
    tickets.extend(kept)
    return expired
