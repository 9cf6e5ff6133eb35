"""A replica's side of the protocol: who is connected, what each message means, what is answered. No sockets, no clock.

Bytes go in with the route they came from; messages to send come out in `outbox`. Every request that was taken is
answered exactly once on its connection (reply or error), because the answer is what returns the client's credit.
A client is (identity, incarnation), not a connection: when it connects again, what it had queued is forgotten (it sends
again what it still wants), what runs is joined, and what was answered is answered again from the cache. So a request,
which is known by its client and number, has its effect once on one replica, also when the connection broke before the
answer came: for `KEPT_SECONDS` after a client was lost, its answers are kept and what runs for it is kept too. A newer
incarnation of an identity replaces the older one, whose answers are dropped.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from services.replies import ReplyCache
from services.scheduler import GrantExceeded, Scheduler, Ticket
from services.service import Call, Method, no_room
from services.stats import ServerStats, Times
from services.wire.frames import (
    FEATURE_ARENA,
    Buffer,
    Code,
    FrameError,
    Header,
    Kind,
    Message,
    Priority,
    VersionError,
    decode_body,
    pack,
    pack_error,
    request_bytes,
    unpack,
)
from spec.errors import GkrError
from spec.events import ServiceClassStats, ServiceRankStats

_log = logging.getLogger(__name__)

MAX_VIOLATIONS = 3
KEPT_SECONDS = 60.0
"""How long a client that was lost may take to connect again and find its answers."""
_REMEMBERED_ROUTES = 4096
_MOST_RANKS = 64
"""Ranks told one by one in the counters: those that wait most."""


class ClientId(NamedTuple):
    """One start of one client."""

    identity: str
    incarnation: int


class Reception:
    """All protocol state of one replica."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        service: str,
        incarnation: int,
        grant: int,
        max_batch: int,
        grant_bytes: int = 0,
        budget_bytes: int = 0,
        max_delay_seconds: float = 0.0,
        max_clients: int = 4096,
        cache_bytes: int = 64 * 2**20,
        room: Callable[[bytes, int], np.ndarray | None] | None = None,
    ) -> None:
        """`grant` requests and `grant_bytes` of them for each client; of all grants together at most `budget_bytes`.
        0: as many bytes as come. `room`: memory that the client of a connection sees, for tensors of a reply."""
        self.outbox: deque[tuple[bytes, Sequence[Buffer]]] = deque()
        self.lane_messages: deque[tuple[bytes, Header]] = deque()
        """What concerns shared memory, which is the socket's owner's business."""
        self.shares: dict[bytes, bool] = {}
        """Whether the client of a connection may see our memory."""
        self.gone: deque[bytes] = deque()
        """Connections that are no client's any more."""
        self._methods, self._room = methods, room
        self._service = service
        self._incarnation = incarnation
        self._grant = grant
        self._grant_bytes, self._budget_bytes = grant_bytes, budget_bytes
        self._max_clients = max_clients
        if grant_bytes and budget_bytes:
            self._max_clients = max(1, min(max_clients, budget_bytes // grant_bytes))
        self._scheduler: Scheduler[ClientId] = Scheduler(
            grant=grant, max_batch=max_batch, grant_bytes=grant_bytes, max_delay_seconds=max_delay_seconds
        )
        self._replies: ReplyCache[ClientId] = ReplyCache(per_client=grant, max_bytes=cache_bytes)
        self._clients: dict[bytes, ClientId] = {}
        self._routes: dict[ClientId, bytes] = {}
        self._newest: dict[str, int] = {}
        self._connections: dict[ClientId, int] = {}
        """Number of the last connection of each client."""
        self._running: set[tuple[ClientId, int]] = set()
        self._violations: OrderedDict[bytes, int] = OrderedDict()
        self._lost: OrderedDict[ClientId, float] = OrderedDict()
        """Clients without a connection whose answers are kept, and since when."""
        self._times: dict[Priority, Times] = {priority: Times() for priority in Priority}
        self._answered: dict[ClientId, int] = {}
        self._requests = self._errors = self._cancelled = self._duplicates = self._total_violations = self._banned = 0
        self._batches = self._items = 0

    def receive(self, route: bytes, frames: Sequence[Buffer], *, now: float) -> None:
        """Take one message."""
        if self._is_banned(route):
            return
        try:
            message = unpack(frames)
        except VersionError as error:
            self._violation(route, code="version", reason=str(error))
            return
        except FrameError as error:
            self._violation(route, reason=str(error))
            return
        match message.header.kind:
            case Kind.REQUEST:
                self._request(route, message, now=now)
            case Kind.HELLO:
                self._hello(route, message.header)
            case Kind.CANCEL:
                self._cancel(route, message.header.request)
            case Kind.BYE:
                client = self._clients.get(route)
                if client is not None:
                    self._forget(client)
            case Kind.ARENA | Kind.MAPPED | Kind.RELEASE if route in self._clients:
                self.lane_messages.append((route, message.header))
            case other:
                self._violation(route, reason=f"a client must not send {other.name}")

    def violated(self, route: bytes, *, reason: str) -> None:
        """What arrived could not even be opened."""
        if not self._is_banned(route):
            self._violation(route, reason=reason)

    def unreachable(self, route: bytes, *, now: float) -> None:
        """The connection is gone: its client holds no credit any more, and may come back for its answers."""
        client = self._clients.get(route)
        if client is not None:
            self._disconnect(client)
            self._lost[client] = now
            self._lost.move_to_end(client)
            self._forget_lost(now)

    def next_batch(self, now: float) -> list[Ticket[ClientId]]:
        """What to compute now, possibly nothing; expired requests are answered on the way."""
        batch = self._scheduler.next_batch(now)
        if batch is None:
            return []
        for ticket in batch.expired:
            self._errors += 1
            self._answer_error(ticket, code="expired", message="its deadline passed before its turn came")
        if batch.tickets:
            self._batches += 1
            self._items += sum(ticket.cost for ticket in batch.tickets)
            self._running.update((ticket.client, ticket.request) for ticket in batch.tickets)
        return batch.tickets

    def finish(self, ticket: Ticket[ClientId], answer: Sequence[Buffer], *, failed: bool, now: float) -> None:
        """A computed answer, as frames."""
        self._running.discard((ticket.client, ticket.request))
        self._errors += failed
        self._requests += not failed
        times = self._times[ticket.priority]
        times.requests += 1
        times.seconds.append(now - ticket.arrived)
        route = self._routes.get(ticket.client)
        if route is None and ticket.client not in self._lost:
            return
        self._replies.put(ticket.client, ticket.request, answer)
        if route is None:
            return
        self._answered[ticket.client] = self._answered.get(ticket.client, 0) + 1
        if self._scheduler.holds(ticket.client, ticket.request):
            self._scheduler.settle(ticket.client, ticket.request)
            self.outbox.append((route, answer))

    def probe(self, now: float) -> None:
        """State the grant once more to idle clients: sending is how a connection that died in silence is noticed."""
        self._forget_lost(now)
        credit = pack(Header(kind=Kind.CREDIT, credit=self._grant, credit_bytes=self._grant_bytes))
        for client, route in self._routes.items():
            if not self._scheduler.outstanding(client):
                self.outbox.append((route, credit))

    def ready_at(self) -> float:
        """When `next_batch` may have something without another message."""
        return self._scheduler.ready_at()

    def go_away(self) -> None:
        """Tell every client to turn to another replica."""
        for route in self._clients:
            self.outbox.append((route, pack(Header(kind=Kind.GOAWAY))))

    def stats(self, *, weights: str = "", computing_seconds: float = 0.0) -> ServerStats:
        """A snapshot."""
        seconds = Times(seconds=deque(second for times in self._times.values() for second in times.seconds))
        queued: dict[str, int] = {client.identity: count for client, count in self._scheduler.queued().items()}
        waiting = self._scheduler.queued_by_priority()
        used = {client: self._scheduler.outstanding(client) for client in self._routes}
        return ServerStats(
            requests=self._requests,
            errors=self._errors,
            cancelled=self._cancelled,
            duplicates=self._duplicates,
            violations=self._total_violations,
            banned=self._banned,
            p50_ms=seconds.quantile_ms(50),
            p99_ms=seconds.quantile_ms(99),
            queued=sum(queued.values()),
            queued_by_rank=queued,
            batches=self._batches,
            batch_mean=self._items / self._batches if self._batches else 0.0,
            clients=len(self._routes),
            grant=self._grant,
            grant_bytes=self._grant_bytes,
            queued_bytes=sum(self._scheduler.outstanding_bytes(client) for client in self._routes),
            by_priority={
                priority.name.lower(): ServiceClassStats(
                    requests=times.requests,
                    queued=waiting.get(priority, 0),
                    p50_ms=times.quantile_ms(50),
                    p99_ms=times.quantile_ms(99),
                )
                for priority, times in self._times.items()
                if times.requests or waiting.get(priority)
            },
            by_rank={
                client.identity: ServiceRankStats(
                    requests=self._answered.get(client, 0),
                    outstanding=used[client],
                    outstanding_bytes=self._scheduler.outstanding_bytes(client),
                )
                for client in sorted(used, key=lambda one: (-used[one], one))[:_MOST_RANKS]
            },
            weights=weights,
            computing_seconds=computing_seconds,
        )

    def _hello(self, route: bytes, header: Header) -> None:
        client = ClientId(header.identity, header.incarnation)
        if not client.identity or self._clients.get(route, client) != client:
            self._violation(route, reason="HELLO without an identity, or with a second one")
            return
        if header.service != self._service or header.expected not in (0, self._incarnation):
            here = f"{self._service} incarnation {self._incarnation}"
            self._refuse(route, code="misdirected", message=f"{here} answers here, not {header.service}")
            return
        newest = self._newest.get(client.identity)
        if newest is not None and newest > client.incarnation:
            self._refuse(route, code="superseded", message=_superseded(client))
            return
        if header.attempt < self._connections.get(client, 0):
            # Overtaken by the greeting of a later connection, which would never learn that this one replaced it.
            self.outbox.append((route, pack(Header(kind=Kind.GOAWAY))))
            return
        if newest is not None and newest < client.incarnation:
            self._supersede(ClientId(client.identity, newest))
        if client not in self._routes and len(self._routes) >= self._max_clients:
            hint = "raise the memory of the service's replicas, or their number" if self._grant_bytes else ""
            message = f"{self._max_clients} clients are connected, which is the limit"
            self._refuse(route, code="busy", message=message, hint=hint)
            return
        self._lost.pop(client, None)
        self._connections[client] = header.attempt
        former = self._routes.get(client)
        if former is not None:
            self._unlink(former)
        self._newest[client.identity] = client.incarnation
        self._routes[client] = route
        self._clients[route] = client
        self.shares[route] = bool(header.features & FEATURE_ARENA)
        self._scheduler.join(client)
        welcome = Header(
            kind=Kind.WELCOME,
            credit=self._grant,
            credit_bytes=self._grant_bytes,
            incarnation=self._incarnation,
            service=self._service,
            features=FEATURE_ARENA,
        )
        self.outbox.append((route, pack(welcome)))

    def _supersede(self, client: ClientId) -> None:
        route = self._routes.get(client)
        if route is not None:
            self._refuse(route, code="superseded", message=_superseded(client))
        self._forget(client)

    def _request(self, route: bytes, message: Message, *, now: float) -> None:
        header = message.header
        client = self._clients.get(route)
        if client is None:
            # A stranger, or a client that was forgotten because it did not read: a new connection mends both.
            self._violation(route, reason="a request needs a HELLO before it", answer=pack(Header(kind=Kind.GOAWAY)))
            return
        if header.request == 0:
            self._violation(route, reason="a request needs a number")
            return
        stored = self._replies.get(client, header.request)
        if stored is not None:
            self._duplicates += 1
            self.outbox.append((route, stored))
            return
        try:
            if (client, header.request) in self._running:
                self._duplicates += 1
                self._scheduler.hold(client, header.request, size=self._size(message))
            elif self._scheduler.holds(client, header.request):
                self._duplicates += 1
            else:
                ticket = self._ticket(client, message, now=now)
                if ticket is not None:
                    self._scheduler.offer(ticket)
        except FrameError as error:
            self._violation(route, request=header.request, reason=str(error))
        except GrantExceeded as error:
            self._violation(route, request=header.request, reason=str(error))

    def _ticket(self, client: ClientId, message: Message, *, now: float) -> Ticket[ClientId] | None:
        """The request as the scheduler sees it; none if it was answered with an error right here."""
        header, route = message.header, self._routes[client]
        method = self._methods.get(header.method)
        if method is None:
            known = ", ".join(self._methods)
            self._refuse(route, header.request, code="method", message=f"no method {header.method!r}; there is {known}")
            return None
        size = self._size(message)
        if self._budget_bytes and size > self._budget_bytes:
            text = f"{header.method} with {size} bytes: this replica has {self._budget_bytes} for all clients together"
            hint = "ask for less at once, or raise the memory of the service's replicas"
            self._refuse(route, header.request, code="refused", message=text, hint=hint)
            return None
        args = decode_body(message.body, as_type=method.args)
        try:
            key, cost = method.batch_key(args), method.cost(args)
        except GkrError as error:
            self._refuse(route, header.request, code="refused", message=error.message, hint=error.hint)
            return None
        except Exception:  # noqa: BLE001 - the service's own code: its bug must not end the replica
            _log.exception("batch key or cost of %s failed", header.method)
            self._refuse(route, header.request, code="internal", message=f"{header.method} failed on these arguments")
            return None
        return Ticket(
            client=client,
            request=header.request,
            method=header.method,
            batch_key=key,
            cost=max(1, cost),
            expires=now + header.deadline_ms / 1000,
            arrived=now,
            payload=Call(args, message.tensors, partial(self._room, route) if self._room is not None else no_room),
            priority=header.priority,
            size=size,
        )

    def _size(self, message: Message) -> int:
        return request_bytes(message.body, specs=message.header.tensors)

    def _cancel(self, route: bytes, request: int) -> None:
        client = self._clients.get(route)
        ticket = self._scheduler.cancel(client, request) if client is not None else None
        if ticket is not None:
            self._cancelled += 1
            self._answer_error(ticket, code="cancelled", message="cancelled by its caller")

    def _answer_error(self, ticket: Ticket[ClientId], *, code: Code, message: str) -> None:
        """Of a queued request. Kept like a reply: if the request arrives again, its end is the same."""
        self._scheduler.settle(ticket.client, ticket.request)
        route = self._routes.get(ticket.client)
        if route is not None:
            answer = pack_error(request=ticket.request, code=code, message=message)
            self._replies.put(ticket.client, ticket.request, answer)
            self.outbox.append((route, answer))

    def _refuse(self, route: bytes, request: int = 0, *, code: Code, message: str, hint: str = "") -> None:
        self._errors += 1
        self.outbox.append((route, pack_error(request=request, code=code, message=message, hint=hint)))

    def _is_banned(self, route: bytes) -> bool:
        return self._violations.get(route, 0) >= MAX_VIOLATIONS

    def _violation(
        self,
        route: bytes,
        *,
        request: int = 0,
        code: Code = "protocol",
        reason: str,
        answer: Sequence[Buffer] | None = None,
    ) -> None:
        """Answer, count, and after the third one listen no more: libzmq gives no way to close one connection."""
        count = self._violations.get(route, 0) + 1
        self._violations[route] = count
        self._violations.move_to_end(route)
        if len(self._violations) > _REMEMBERED_ROUTES:
            self._violations.popitem(last=False)
        self._total_violations += 1
        self._errors += 1
        self.outbox.append((route, answer or pack_error(request=request, code=code, message=reason)))
        if count < MAX_VIOLATIONS:
            return
        self._banned += 1
        client = self._clients.get(route)
        _log.warning("dropping %s after %d protocol errors; the last: %s", client or "a stranger", count, reason)
        self.outbox.append((route, pack(Header(kind=Kind.GOAWAY))))
        if client is not None:
            self._forget(client)

    def _forget(self, client: ClientId) -> None:
        self._disconnect(client)
        self._drop_kept(client)

    def _disconnect(self, client: ClientId) -> None:
        self._scheduler.leave(client)
        self._answered.pop(client, None)
        route = self._routes.pop(client, None)
        if route is not None:
            self._unlink(route)

    def _unlink(self, route: bytes) -> None:
        self._clients.pop(route, None)
        self.shares.pop(route, None)
        self.gone.append(route)

    def _forget_lost(self, now: float) -> None:
        while self._lost:
            client, since = next(iter(self._lost.items()))
            if now - since < KEPT_SECONDS and len(self._lost) <= self._max_clients:
                return
            self._drop_kept(client)

    def _drop_kept(self, client: ClientId) -> None:
        self._lost.pop(client, None)
        self._connections.pop(client, None)
        self._replies.forget(client)
        if self._newest.get(client.identity) == client.incarnation:
            del self._newest[client.identity]


def _superseded(client: ClientId) -> str:
    return f"a newer client has the identity {client.identity!r}"
