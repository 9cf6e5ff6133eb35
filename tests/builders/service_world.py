"""Clients and replicas of one service on an imagined network: both real halves of flow control, no sockets, no clock.

`Dispatcher` (with what `Courier` does around it) on one side, `Reception` on the other; between them connections that
keep order, as ZeroMQ's do, and that break, linger and are made again; replicas that die and come back with a new
incarnation. Whoever drives it chooses what happens next; the world checks the promises of both sides after every step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from services.dispatch import RETRY_RESERVE, RETRY_SHARE, Dispatcher, Pending
from services.reception import ClientId, Reception
from services.scheduler import Ticket
from services.wire.frames import (
    Buffer,
    ErrorBody,
    Header,
    Kind,
    Priority,
    decode_body,
    encode_body,
    pack,
    request_bytes,
    unpack,
)
from tests.builders.echo import Echo, EchoArgs, EchoReply

GRANT, GRANT_BYTES, BUDGET = 3, 100, 400
MAX_BATCH = 4
_METHODS = {method.name: method for method in Echo.methods}

Call = tuple[int, int]
"""Client and request."""


@dataclass
class Connection:
    """One connection of a client to one start of a replica. Up is towards the replica."""

    route: bytes
    client: int
    replica: int
    incarnation: int
    up: deque[list[Buffer]] = field(default_factory=deque[list[Buffer]])
    down: deque[Sequence[Buffer]] = field(default_factory=deque[Sequence[Buffer]])
    broken: bool = False
    """The client knows that it is gone; what is on its way up may still arrive."""


@dataclass
class ReplicaDouble:
    """One start of a replica: the real reception, and what it computes."""

    reception: Reception
    incarnation: int
    running: list[Ticket[ClientId]] = field(default_factory=list[Ticket[ClientId]])
    computed: Counter[Call] = field(default_factory=Counter[Call])
    ended: set[Call] = field(default_factory=set[Call])


@dataclass
class ClientDouble:
    """What `Courier` does around a dispatcher, without sockets."""

    dispatcher: Dispatcher[int] = field(default_factory=lambda: Dispatcher[int](max_attempts=10**6))
    links: dict[int, Connection] = field(default_factory=dict[int, Connection])
    sent: int = 0
    again: int = 0


class ServiceWorld:
    """`now` moves only when the driver says so."""

    def __init__(self, *, clients: int, replicas: int) -> None:
        self.now = 0.0
        self.clients = [ClientDouble() for _ in range(clients)]
        self.replicas = [self._start(1) for _ in range(replicas)]
        self.gone: list[ReplicaDouble] = []
        self.zombies: list[Connection] = []
        self.asked: dict[Call, EchoArgs] = {}
        self.ends: Counter[Call] = Counter()
        self.answers: dict[Call, str] = {}
        self._routes = 0

    def submit(
        self, client: int, *, size: int = 1, priority: Priority = Priority.BLOCKING, seconds: float = 1e9
    ) -> int:
        number = 1 + sum(1 for who, _ in self.asked if who == client)
        args = EchoArgs(text=f"{client}-{number}-".ljust(size, "x"), cost=1 + number % 3, key=str(number % 2))
        self.asked[client, number] = args
        bytes_ = request_bytes(encode_body(args), specs=())
        pending = Pending(number, self.now + seconds, args, priority=priority, size=bytes_)
        self.clients[client].dispatcher.submit(pending)
        return number

    def connect(self, client: int, replica: int) -> None:
        if replica in self.clients[client].links:
            return
        self._routes += 1
        place = self.replicas[replica]
        link = Connection(f"r{self._routes}".encode(), client, replica, place.incarnation)
        self.clients[client].links[replica] = link
        hello = Header(kind=Kind.HELLO, identity=f"c{client}", incarnation=1, service="echo", attempt=self._routes)
        link.up.append(pack(hello))

    def send(self, client: int) -> None:
        double = self.clients[client]
        for replica, pending in double.dispatcher.assign(self.now):
            self._push(double.links[replica], pending)
            double.sent += pending.attempt == 1
            double.again += pending.attempt > 1
        self.check()

    def send_twice(self, client: int, replica: int, pick: int) -> None:
        """What is unanswered on a connection is sent on it once more."""
        double = self.clients[client]
        link = double.links.get(replica)
        known = double.dispatcher._links.get(replica)
        if link is None or known is None:
            return
        wanted = [one for one in known.inflight.values() if not one.over]
        if wanted:
            self._push(link, wanted[pick % len(wanted)])

    def deliver_up(self, link: Connection) -> None:
        if not link.up:
            return
        place = self.replicas[link.replica]
        frames = link.up.popleft()
        if place.incarnation == link.incarnation:
            place.reception.receive(link.route, frames, now=self.now)
            self._flush(place)
        self.check()

    def deliver_down(self, link: Connection) -> None:
        if not link.down or link.broken:
            return
        double = self.clients[link.client]
        message = unpack(link.down.popleft())
        header = message.header
        match header.kind:
            case Kind.WELCOME | Kind.CREDIT:
                double.dispatcher.open(link.replica, grant=header.credit, grant_bytes=header.credit_bytes)
            case Kind.REPLY:
                self._answered(link, header.request, decode_body(message.body, as_type=EchoReply).text)
            case Kind.ERROR if header.request:
                self._answered(link, header.request, decode_body(message.body, as_type=ErrorBody).code)
            case Kind.ERROR | Kind.GOAWAY:
                self.lose(link)
            case other:
                raise AssertionError(f"a client got {other.name}")
        self.check()

    def begin(self, replica: int) -> None:
        place = self.replicas[replica]
        if not place.running:
            place.running = place.reception.next_batch(self.now)
            assert sum(one.cost for one in place.running) <= MAX_BATCH or len(place.running) == 1
            assert len({one.compatible for one in place.running}) <= 1
            self._flush(place)
        self.check()

    def finish(self, replica: int) -> None:
        place = self.replicas[replica]
        for ticket in place.running:
            call = (int(ticket.client.identity[1:]), ticket.request)
            place.computed[call] += 1
            body = encode_body(EchoReply(text=ticket.payload.args.text, batch=1))
            frames = pack(Header(kind=Kind.REPLY, request=ticket.request), body)
            place.reception.finish(ticket, frames, failed=False, now=self.now)
        place.running = []
        self._flush(place)
        self.check()

    def lose(self, link: Connection) -> None:
        """The client notices; the replica does not, until it sends."""
        link.broken = True
        link.down.clear()
        double = self.clients[link.client]
        del double.links[link.replica]
        assert not double.dispatcher.lost(link.replica)
        self.zombies.append(link)
        self.check()

    def notice(self, link: Connection) -> None:
        """The replica's heartbeat, or its next sending, finds that a connection is gone."""
        place = self.replicas[link.replica]
        if place.incarnation == link.incarnation:
            place.reception.unreachable(link.route, now=self.now)
        self.check()

    def kill(self, replica: int) -> None:
        for double in self.clients:
            link = double.links.get(replica)
            if link is not None:
                self.lose(link)
        dead = self.replicas[replica]
        self.gone.append(dead)
        self.replicas[replica] = self._start(dead.incarnation + 1)
        self.check()

    def cancel(self, client: int, request: int) -> None:
        self._end(client, self.clients[client].dispatcher.cancel(request), "cancelled")

    def expire(self, client: int) -> None:
        self._end(client, self.clients[client].dispatcher.expire(self.now), "expired")

    def links(self) -> list[Connection]:
        return [link for double in self.clients for link in double.links.values()]

    def settle(self) -> None:
        """No more trouble: everything asked ends."""
        for _ in range(4 * len(self.asked) + 20):
            self.now += 1.0
            for client, double in enumerate(self.clients):
                for replica in range(len(self.replicas)):
                    self.connect(client, replica)
                self.send(client)
                assert len(double.links) == len(self.replicas)
            for link in self.links():
                while link.up:
                    self.deliver_up(link)
            for replica in range(len(self.replicas)):
                self.begin(replica)
                self.finish(replica)
            for link in self.links():
                while link.down and not link.broken:
                    self.deliver_down(link)
            if len(self.ends) == len(self.asked):
                break
        assert set(self.ends) == set(self.asked), f"never ended: {set(self.asked) - set(self.ends)}"
        for double in self.clients:
            for known in double.dispatcher._links.values():
                known.inflight = {number: one for number, one in known.inflight.items() if not one.over}
                assert not known.inflight

    def check(self) -> None:
        """What always holds."""
        for call, count in self.ends.items():
            assert count == 1, f"{call} ended {count} times"
        for place in (*self.replicas, *self.gone):
            for call, count in place.computed.items():
                assert count == 1, f"{call} had its effect {count} times on one replica"
        for place in self.replicas:
            scheduler = place.reception._scheduler
            total = 0
            for client, state in scheduler._clients.items():
                used = state.outstanding
                queued = [ticket for line in state.lines.values() for ticket in line.tickets]
                assert len(used) <= GRANT, f"{client} holds {len(used)} of {GRANT} credits"
                assert len(used) <= 1 or state.bytes <= GRANT_BYTES, f"{client} holds {state.bytes} bytes"
                assert state.bytes == sum(used.values())
                assert {ticket.request for ticket in queued} <= used.keys()
                running = {one.request for one in place.running if one.client == client}
                lost = used.keys() - {ticket.request for ticket in queued} - running
                assert not lost, f"credits of {lost} of {client} are held by nothing"
                total += min(state.bytes, GRANT_BYTES)
            assert total <= BUDGET
        for double in self.clients:
            for replica, known in double.dispatcher._links.items():
                assert known.bytes == sum(one.size for one in known.inflight.values())
                assert len(known.inflight) <= GRANT
                self._check_window(double, replica)
            paid = RETRY_RESERVE + RETRY_SHARE * double.sent + self.now + 1
            assert double.again <= paid, f"{double.again} of {double.sent} were sent again"

    def _check_window(self, double: ClientDouble, replica: int) -> None:
        """The replica never counts what the client thinks is free."""
        link = double.links[replica]
        place = self.replicas[replica]
        client = ClientId(f"c{link.client}", 1)
        if place.incarnation == link.incarnation and place.reception._routes.get(client) == link.route:
            state = place.reception._scheduler._clients[client]
            known = double.dispatcher._links[replica]
            assert state.outstanding.keys() <= known.inflight.keys(), "the replica holds a credit that is spent again"

    def _start(self, incarnation: int) -> ReplicaDouble:
        reception = Reception(
            _METHODS,
            service="echo",
            incarnation=incarnation,
            grant=GRANT,
            grant_bytes=GRANT_BYTES,
            budget_bytes=BUDGET,
            max_batch=MAX_BATCH,
        )
        return ReplicaDouble(reception, incarnation)

    def _push(self, link: Connection, pending: Pending) -> None:
        header = Header(
            kind=Kind.REQUEST,
            request=pending.request,
            method="echo",
            attempt=pending.attempt - 1,
            deadline_ms=max(1, min(2**40, int(1000 * (pending.expires - self.now)))),
            priority=pending.priority,
        )
        link.up.append(pack(header, encode_body(pending.payload)))

    def _flush(self, place: ReplicaDouble) -> None:
        outbox = place.reception.outbox
        routes = {link.route: link for link in self.links()}
        while outbox:
            route, frames = outbox.popleft()
            link = routes.get(route)
            if link is None:  # as ROUTER_MANDATORY says
                place.reception.unreachable(route, now=self.now)
            else:
                link.down.append(frames)

    def _answered(self, link: Connection, request: int, text: str) -> None:
        pending = self.clients[link.client].dispatcher.answered(link.replica, request)
        if pending is not None:
            assert text in (self.asked[link.client, request].text, "expired"), f"answered {text}"
            self._over(link.client, request, text)

    def _end(self, client: int, ended: list[tuple[Pending, int | None]], how: str) -> None:
        for pending, replica in ended:
            self._over(client, pending.request, how)
            link = self.clients[client].links.get(replica) if replica is not None else None
            if link is not None:
                link.up.append(pack(Header(kind=Kind.CANCEL, request=pending.request)))
        self.check()

    def _over(self, client: int, request: int, how: str) -> None:
        self.ends[client, request] += 1
        self.answers[client, request] = how


def run_story(random: Random, *, steps: int) -> ServiceWorld:
    """So many random steps, then quiet. Everything of the world is checked on the way."""
    world = ServiceWorld(clients=random.randint(1, 3), replicas=random.randint(1, 2))
    trouble = random.choice((0.0, 0.02, 0.1))
    for _ in range(steps):
        if random.random() < trouble:
            _disturb(world, random)
        else:
            _go_on(world, random)
    world.settle()
    return world


def _go_on(world: ServiceWorld, random: Random) -> None:
    client, replica = random.randrange(len(world.clients)), random.randrange(len(world.replicas))
    links = world.links()
    actions: list[Any] = [
        lambda: world.submit(client, size=random.choice((1, 1, 40, 150)), priority=random.choice(list(Priority))),
        lambda: world.submit(client, seconds=random.uniform(0.1, 10)),
        lambda: world.connect(client, replica),
        lambda: world.send(client),
        lambda: world.begin(replica),
        lambda: world.finish(replica),
    ]
    if links:
        link = random.choice(links)
        actions += [lambda: world.deliver_up(link)] * 4 + [lambda: world.deliver_down(link)] * 4
    random.choice(actions)()


def _disturb(world: ServiceWorld, random: Random) -> None:
    client, replica = random.randrange(len(world.clients)), random.randrange(len(world.replicas))
    links, zombies = world.links(), world.zombies[-5:]
    mine = [number for who, number in world.asked if who == client]

    def pass_time() -> None:
        world.now += random.choice((0.1, 1.0, 5.0, 100.0))
        world.expire(client)

    actions: list[Any] = [
        lambda: world.kill(replica),
        pass_time,
        lambda: world.send_twice(client, replica, random.randrange(10)),
    ]
    if mine:
        actions.append(lambda: world.cancel(client, random.choice(mine)))
    if links:
        actions.append(lambda: world.lose(random.choice(links)))
    if zombies:
        actions += [lambda: world.deliver_up(random.choice(zombies)), lambda: world.notice(random.choice(zombies))]
    random.choice(actions)()
