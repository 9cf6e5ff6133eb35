"""Reception: the replica's side of the protocol, message by message."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from services.reception import KEPT_SECONDS, MAX_VIOLATIONS, ClientId, Reception
from services.scheduler import Ticket
from services.wire.frames import (
    Buffer,
    ErrorBody,
    Header,
    Kind,
    Message,
    Priority,
    decode_body,
    encode_body,
    pack,
    unpack,
)
from tests.builders.echo import Echo, EchoArgs, EchoReply

WEST, EAST = b"route-west", b"route-east"


@dataclass
class Desk:
    """A reception, and what it has said to each route."""

    reception: Reception
    now: float = 0.0
    computed: list[str] = field(default_factory=list[str])

    def hello(
        self, route: bytes, identity: str = "rank-0", *, incarnation: int = 1, service: str = "echo", expected: int = 7
    ) -> list[Message]:
        header = Header(kind=Kind.HELLO, identity=identity, incarnation=incarnation, service=service, expected=expected)
        return self.say(route, pack(header))

    def request(
        self, route: bytes, number: int, text: str = "x", *, method: str = "echo", deadline_ms: int = 1000
    ) -> list[Message]:
        header = Header(kind=Kind.REQUEST, request=number, method=method, deadline_ms=deadline_ms)
        return self.say(route, pack(header, encode_body(EchoArgs(text=text))))

    def say(self, route: bytes, frames: list[Buffer]) -> list[Message]:
        self.reception.receive(route, frames, now=self.now)
        return self.heard(route)

    def begin(self) -> list[Ticket[ClientId]]:
        return self.reception.next_batch(self.now)

    def finish(self, tickets: list[Ticket[ClientId]]) -> None:
        for ticket in tickets:
            self.computed.append(ticket.payload.args.text)
            body = encode_body(EchoReply(text=ticket.payload.args.text, batch=len(tickets)))
            frames = pack(Header(kind=Kind.REPLY, request=ticket.request), body)
            self.reception.finish(ticket, frames, failed=False, now=self.now)

    def heard(self, route: bytes) -> list[Message]:
        """All messages to that route since the last look; those to others are kept."""
        outbox = self.reception.outbox
        mine = [unpack(frames) for to, frames in outbox if to == route]
        others = [(to, frames) for to, frames in outbox if to != route]
        outbox.clear()
        outbox.extend(others)
        return mine


@pytest.fixture
def desk() -> Desk:
    methods = {method.name: method for method in Echo.methods}
    return Desk(Reception(methods, service="echo", incarnation=7, grant=2, max_batch=2))


def error(messages: list[Message]) -> tuple[int, str]:
    """Request number and code of the only message, which is an error."""
    (message,) = messages
    assert message.header.kind is Kind.ERROR
    return message.header.request, decode_body(message.body, as_type=ErrorBody).code


def test_a_client_is_welcomed_with_its_grant(desk: Desk) -> None:
    (welcome,) = desk.hello(WEST)

    assert (welcome.header.kind, welcome.header.credit, welcome.header.incarnation) == (Kind.WELCOME, 2, 7)


def test_a_request_is_answered_once_to_the_route_it_came_from(desk: Desk) -> None:
    desk.hello(WEST, "rank-0")
    desk.hello(EAST, "rank-1")
    desk.request(WEST, 1, "a")
    desk.finish(desk.begin())

    (reply,) = desk.heard(WEST)
    assert decode_body(reply.body, as_type=EchoReply).text == "a"
    assert not desk.heard(EAST)


def test_a_client_that_looks_for_another_replica_is_told_so(desk: Desk) -> None:
    assert error(desk.hello(WEST, service="other")) == (0, "misdirected")
    assert error(desk.hello(WEST, expected=6)) == (0, "misdirected")
    assert desk.hello(WEST, expected=0)[0].header.kind is Kind.WELCOME


def test_sending_beyond_the_grant_is_a_protocol_error_not_a_longer_queue(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1)
    desk.request(WEST, 2)

    assert error(desk.request(WEST, 3)) == (3, "protocol")
    assert desk.reception.stats().queued == 2


def test_a_peer_is_dropped_after_three_violations(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1)
    for _ in range(MAX_VIOLATIONS - 1):
        assert error(desk.say(WEST, [b"garbage", b""])) == (0, "protocol")

    last = desk.say(WEST, [b"garbage", b""])

    assert [message.header.kind for message in last] == [Kind.ERROR, Kind.GOAWAY]
    assert not desk.hello(WEST)
    assert not desk.begin()
    stats = desk.reception.stats()
    assert (stats.violations, stats.banned, stats.queued) == (3, 1, 0)


def test_what_cannot_be_opened_of_a_peer_that_was_dropped_is_neither_answered_nor_counted(desk: Desk) -> None:
    """Each such message was answered, counted as one more peer, and written to the log."""
    for _ in range(10):
        desk.reception.violated(WEST, reason="a broken seal")

    assert [message.header.kind for message in desk.heard(WEST)] == [Kind.ERROR] * MAX_VIOLATIONS + [Kind.GOAWAY]
    stats = desk.reception.stats()
    assert (stats.violations, stats.banned) == (3, 1)


def test_a_stranger_cannot_ask(desk: Desk) -> None:
    assert [message.header.kind for message in desk.request(WEST, 1)] == [Kind.GOAWAY]
    assert desk.reception.stats().violations == 1


def test_another_protocol_version_is_answered_with_the_reason(desk: Desk) -> None:
    assert error(desk.say(WEST, [msgspec.msgpack.encode([9]), b"\x80"])) == (0, "version")


def test_an_unknown_method_is_an_error_of_that_request_only(desk: Desk) -> None:
    desk.hello(WEST)

    assert error(desk.request(WEST, 1, method="eval")) == (1, "method")
    assert not desk.request(WEST, 2)


def test_arguments_of_another_type_are_refused(desk: Desk) -> None:
    desk.hello(WEST)
    header = Header(kind=Kind.REQUEST, request=1, method="echo", deadline_ms=1000)

    assert error(desk.say(WEST, pack(header, msgspec.msgpack.encode({"text": 5})))) == (1, "protocol")


def test_a_duplicate_of_an_answered_request_gets_the_stored_reply(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1, "a")
    desk.finish(desk.begin())
    desk.heard(WEST)

    (again,) = desk.request(WEST, 1, "a")

    assert again.header.request == 1
    assert desk.computed == ["a"]


def test_a_client_that_connects_again_joins_what_is_running(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1, "a")
    running = desk.begin()

    desk.hello(EAST)
    assert not desk.request(EAST, 1, "a")
    desk.finish(running)

    assert [message.header.request for message in desk.heard(EAST)] == [1]
    assert not desk.heard(WEST)
    assert desk.computed == ["a"]
    assert not desk.begin()


def test_a_client_that_connects_again_has_its_whole_grant(desk: Desk) -> None:
    """What it no longer wants of its former connection, queued or running, holds no credit of the new one."""
    desk.hello(WEST)
    desk.request(WEST, 1)
    desk.request(WEST, 2)
    running = desk.begin()
    desk.hello(EAST)

    assert not desk.request(EAST, 4)
    assert not desk.request(EAST, 5)
    desk.finish(running)
    assert not desk.heard(EAST)
    desk.finish(desk.begin())
    assert [message.header.request for message in desk.heard(EAST)] == [4, 5]


def test_a_newer_incarnation_replaces_the_older_and_gets_none_of_its_replies(desk: Desk) -> None:
    desk.hello(WEST, incarnation=1)
    desk.request(WEST, 1, "old")
    running = desk.begin()
    desk.hello(EAST, incarnation=2)
    desk.request(EAST, 1, "new")
    assert error(desk.heard(WEST)) == (0, "superseded")
    desk.finish(running)
    assert not desk.heard(EAST)
    assert not desk.heard(WEST)

    desk.finish(desk.begin())

    (reply,) = desk.heard(EAST)
    assert decode_body(reply.body, as_type=EchoReply).text == "new"


def test_an_older_incarnation_is_refused(desk: Desk) -> None:
    desk.hello(WEST, incarnation=2)

    assert error(desk.hello(EAST, incarnation=1)) == (0, "superseded")


def test_a_cancelled_request_is_answered_and_never_computed(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1)
    cancel = pack(Header(kind=Kind.CANCEL, request=1))

    assert error(desk.say(WEST, cancel)) == (1, "cancelled")
    assert not desk.say(WEST, cancel)
    assert not desk.begin()


def test_cancelling_what_runs_leaves_its_reply_to_return_the_credit(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1)
    running = desk.begin()

    assert not desk.say(WEST, pack(Header(kind=Kind.CANCEL, request=1)))
    desk.finish(running)
    assert [message.header.kind for message in desk.heard(WEST)] == [Kind.REPLY]


def test_an_expired_request_is_answered_and_never_computed(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1, deadline_ms=500)
    desk.now = 1.0

    assert not desk.begin()
    assert error(desk.heard(WEST)) == (1, "expired")


def test_the_queue_of_a_client_that_is_gone_is_dropped(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1)
    desk.reception.unreachable(WEST, now=desk.now)

    assert not desk.begin()


def test_answers_for_a_client_that_is_gone_are_dropped(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1)
    running = desk.begin()
    desk.reception.unreachable(WEST, now=desk.now)
    desk.finish(running)

    assert not desk.heard(WEST)


def test_an_answer_is_kept_for_a_client_that_was_lost_so_that_its_effect_is_once(desk: Desk) -> None:
    """S5: the connection broke before the answer came, and the replica had noticed."""
    desk.hello(WEST)
    desk.request(WEST, 1, "a")
    running = desk.begin()
    desk.reception.unreachable(WEST, now=desk.now)
    desk.finish(running)
    desk.now = KEPT_SECONDS / 2
    desk.hello(EAST)

    (reply,) = desk.request(EAST, 1, "a")
    assert decode_body(reply.body, as_type=EchoReply).text == "a"
    assert desk.computed == ["a"]


def test_what_runs_for_a_client_that_was_lost_is_joined_when_it_comes_back(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1, "a")
    running = desk.begin()
    desk.reception.unreachable(WEST, now=desk.now)
    desk.hello(EAST)
    assert not desk.request(EAST, 1, "a")
    desk.finish(running)

    assert len(desk.heard(EAST)) == 1
    assert desk.computed == ["a"]


def test_what_was_kept_for_a_lost_client_is_dropped_in_the_end(desk: Desk) -> None:
    desk.hello(WEST)
    desk.request(WEST, 1, "a")
    running = desk.begin()
    desk.reception.unreachable(WEST, now=desk.now)
    desk.finish(running)
    desk.reception.probe(KEPT_SECONDS + 1)
    desk.hello(EAST)

    assert not desk.request(EAST, 1, "a")  # computed again


def test_a_greeting_that_was_overtaken_by_a_later_connection_does_not_take_its_place(desk: Desk) -> None:
    """Messages of two connections may arrive in any order; the later connection is the one its client listens to."""
    greeting = Header(kind=Kind.HELLO, identity="rank-0", incarnation=1, service="echo")
    desk.say(EAST, pack(msgspec.structs.replace(greeting, attempt=2)))
    (answer,) = desk.say(WEST, pack(msgspec.structs.replace(greeting, attempt=1)))
    assert answer.header.kind is Kind.GOAWAY

    desk.request(EAST, 1, "a")
    desk.finish(desk.begin())
    assert [message.header.kind for message in desk.heard(EAST)] == [Kind.REPLY]


def test_report_20_a_restarted_client_is_served_and_never_gets_its_predecessors_answer(desk: Desk) -> None:
    """https://github.com/zeromq/libzmq/issues/2892: a client restarts with the same identity while the ROUTER is busy,
    and its messages never arrive. Here the name of a connection is ZeroMQ's own; identity and incarnation are ours."""
    desk.hello(WEST, "rank-0", incarnation=1)
    desk.request(WEST, 1, "old")
    running = desk.begin()
    desk.hello(EAST, "rank-0", incarnation=2)
    desk.request(EAST, 1, "new")
    desk.finish(running)
    assert not desk.heard(EAST)
    desk.finish(desk.begin())

    (reply,) = desk.heard(EAST)
    assert decode_body(reply.body, as_type=EchoReply).text == "new"
    assert [message.header.kind for message in desk.heard(WEST)] == [Kind.ERROR]


def test_report_23_a_client_that_cancels_just_as_work_starts_leaks_no_slot(desk: Desk) -> None:
    """https://github.com/ray-project/ray/issues/44644: the slot is never freed, and the replica is stuck at its limit.
    Here each moment of cancelling, a thousand times over with two slots."""
    desk.hello(WEST)
    for number in range(1, 3000, 3):
        for offset, moment in enumerate(("queued", "running", "answered")):
            request = number + offset
            assert not desk.request(WEST, request, moment)
            if moment == "queued":
                desk.say(WEST, pack(Header(kind=Kind.CANCEL, request=request)))
                assert not desk.begin()
                continue
            running = desk.begin()
            if moment == "answered":
                desk.finish(running)
            cancelled = desk.say(WEST, pack(Header(kind=Kind.CANCEL, request=request)))
            if moment == "running":
                assert not cancelled
                desk.finish(running)
                assert len(desk.heard(WEST)) == 1
        assert desk.reception.stats().queued_bytes == 0
    assert desk.reception.stats().violations == 0


def test_a_request_larger_than_all_grants_together_is_refused_with_what_would_help() -> None:
    methods = {method.name: method for method in Echo.methods}
    reception = Reception(
        methods, service="echo", incarnation=7, grant=2, max_batch=2, grant_bytes=100, budget_bytes=1000
    )
    desk = Desk(reception)
    (welcome,) = desk.hello(WEST)
    assert welcome.header.credit_bytes == 100
    assert not desk.request(WEST, 1, "x" * 900)
    desk.finish(desk.begin())
    desk.heard(WEST)

    (message,) = desk.request(WEST, 2, "x" * 1100)
    refusal = decode_body(message.body, as_type=ErrorBody)
    assert refusal.code == "refused"
    assert "this replica has 1000 for all clients together" in refusal.message
    assert desk.reception.stats().queued_bytes == 0


def test_no_more_clients_are_admitted_than_their_grants_fit_the_budget() -> None:
    desk = Desk(Reception({}, service="echo", incarnation=7, grant=2, max_batch=2, grant_bytes=100, budget_bytes=250))
    routes = [b"1", b"2", b"3"]
    kinds = [desk.hello(route, f"rank-{number}")[0].header.kind for number, route in enumerate(routes)]

    assert kinds == [Kind.WELCOME, Kind.WELCOME, Kind.ERROR]


def test_the_statistics_tell_classes_ranks_and_credit(desk: Desk) -> None:
    desk.hello(WEST, "rank-0")
    body = encode_body(EchoArgs(text="x"))
    for number, priority in ((1, Priority.BLOCKING), (2, Priority.EVALUATION)):
        header = Header(kind=Kind.REQUEST, request=number, method="echo", deadline_ms=1000, priority=priority)
        desk.say(WEST, pack(header, body))
    stats = desk.reception.stats()
    assert stats.by_rank["rank-0"].outstanding == 2
    assert stats.by_rank["rank-0"].outstanding_bytes == stats.queued_bytes == 2 * len(body)
    assert {name: one.queued for name, one in stats.by_priority.items()} == {"blocking": 1, "evaluation": 1}

    running = desk.begin()
    desk.now = 0.5
    desk.finish(running)
    stats = desk.reception.stats()
    assert stats.by_priority["evaluation"].p99_ms == pytest.approx(500)
    assert stats.by_rank["rank-0"].requests == 2
    assert (stats.clients, stats.grant) == (1, 2)


def test_more_clients_than_the_limit_are_refused() -> None:
    desk = Desk(Reception({}, service="echo", incarnation=7, grant=2, max_batch=2, max_clients=1))
    desk.hello(WEST, "rank-0")

    assert error(desk.hello(EAST, "rank-1")) == (0, "busy")


def test_the_statistics_tell_who_waits(desk: Desk) -> None:
    desk.hello(WEST, "rank-0")
    desk.hello(EAST, "rank-1")
    desk.request(WEST, 1)
    desk.request(WEST, 2)
    desk.request(EAST, 1)
    running = desk.begin()
    desk.now = 0.25
    desk.finish(running)

    stats = desk.reception.stats()

    assert stats.queued_by_rank == {"rank-0": 1}
    assert (stats.requests, stats.queued, stats.batch_mean) == (2, 1, 2.0)
    assert stats.p50_ms == pytest.approx(250)
