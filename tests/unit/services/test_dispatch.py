"""Dispatcher: credits, resending and one end per request, without sockets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatch import Dispatcher, Pending


def pending(request: int, expires: float = 1e9) -> Pending:
    return Pending(request=request, expires=expires)


def dispatcher(*links: str, grant: int = 2, max_attempts: int = 3) -> Dispatcher[str]:
    made: Dispatcher[str] = Dispatcher(max_attempts=max_attempts)
    for link in links:
        made.open(link, grant=grant)
    return made


def sent(dispatcher: Dispatcher[str]) -> list[tuple[str, int]]:
    return [(link, one.request) for link, one in dispatcher.assign(0.0)]


def test_nothing_is_sent_beyond_the_grant() -> None:
    client = dispatcher("a", grant=2)
    for number in (1, 2, 3):
        client.submit(pending(number))

    assert sent(client) == [("a", 1), ("a", 2)]
    assert client.answered("a", 1) is not None
    assert sent(client) == [("a", 3)]


def test_the_window_refills_at_once_after_a_stall() -> None:
    client = dispatcher("a", grant=4)
    for number in range(8):
        client.submit(pending(number))
    sent(client)
    for number in range(4):
        client.answered("a", number)

    assert len(sent(client)) == 4


def test_requests_spread_over_replicas_by_free_credit() -> None:
    client = dispatcher("a", "b", grant=2)
    for number in range(4):
        client.submit(pending(number))

    assert sorted(link for link, _ in sent(client)) == ["a", "a", "b", "b"]


def test_requests_of_a_lost_replica_go_first_and_in_order_to_another() -> None:
    client = dispatcher("a", grant=2)
    for number in (1, 2, 3):
        client.submit(pending(number))
    sent(client)

    assert client.lost("a") == []
    client.open("b", grant=8)

    assert sent(client) == [("b", 1), ("b", 2), ("b", 3)]


def test_an_answer_of_a_lost_replica_ends_nothing() -> None:
    client = dispatcher("a")
    client.submit(pending(1))
    sent(client)
    client.lost("a")

    assert client.answered("a", 1) is None


def test_a_request_that_was_lost_too_often_is_given_up() -> None:
    client = dispatcher(max_attempts=2)
    client.submit(pending(1))
    client.open("a", grant=1)
    sent(client)
    assert client.lost("a") == []
    client.open("b", grant=1)
    sent(client)

    assert [one.request for one in client.lost("b")] == [1]
    assert client.next_expiry() is None


def test_an_expired_request_keeps_its_credit_until_the_replica_answers() -> None:
    client = dispatcher("a", grant=1)
    client.submit(pending(1, expires=5))
    client.submit(pending(2))
    sent(client)

    assert [(one.request, link) for one, link in client.expire(now=6)] == [(1, "a")]
    assert sent(client) == []
    assert client.answered("a", 1) is None
    assert sent(client) == [("a", 2)]


def test_a_waiting_request_can_be_cancelled() -> None:
    client = dispatcher()
    client.submit(pending(1))

    assert [(one.request, link) for one, link in client.cancel(1)] == [(1, None)]
    assert client.cancel(1) == []
    client.open("a", grant=1)
    assert sent(client) == []


STEPS = st.tuples(
    st.sampled_from(["submit", "open", "lost", "assign", "answer", "expire", "cancel"]),
    st.integers(0, 2),
    st.integers(0, 9),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=120))
def test_every_request_ends_exactly_once_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    """Replicas come and go and answer what they hold in any order; at the end everything submitted has ended once."""
    client = dispatcher(grant=2, max_attempts=4)
    held: dict[str, list[int]] = {}
    submitted: list[int] = []
    ended: list[int] = []
    for number, (what, which, pick) in enumerate(steps, start=1):
        link = str(which)
        match what:
            case "submit":
                client.submit(pending(number, expires=number + pick))
                submitted.append(number)
            case "open" if link not in held:
                held[link] = []
                client.open(link, grant=2)
            case "lost" if link in held:
                del held[link]
                ended += [one.request for one in client.lost(link)]
            case "assign":
                for to, one in client.assign(0.0):
                    held[to].append(one.request)
                    assert len(held[to]) <= 2
            case "answer" if held.get(link):
                answered = client.answered(link, held[link].pop(pick % len(held[link])))
                ended += [answered.request] if answered else []
            case "expire":
                ended += [one.request for one, _ in client.expire(now=number)]
            case "cancel" if submitted:
                ended += [one.request for one, _ in client.cancel(submitted[pick % len(submitted)])]
            case _:
                continue
    ended += [one.request for one in client.drain()]
    assert sorted(ended) == submitted
