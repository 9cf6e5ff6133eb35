"""Dispatcher: credits, resending and one end per request, without sockets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatch import BREAKER_FAILURES, BREAKER_SECONDS, RETRY_RESERVE, RETRY_SHARE, Dispatcher, Pending
from services.wire.frames import Priority


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


def test_nothing_is_sent_beyond_the_grant_in_bytes_except_one_request_of_any_size() -> None:
    client: Dispatcher[str] = Dispatcher(max_attempts=3)
    client.open("a", grant=8, grant_bytes=100)
    for number, size in ((1, 1000), (2, 60), (3, 60), (4, 40)):
        client.submit(Pending(number, 1e9, size=size))

    assert sent(client) == [("a", 1)]
    client.answered("a", 1)
    assert sent(client) == [("a", 2)]  # the third holds up the fourth: order is kept
    client.answered("a", 2)
    assert sent(client) == [("a", 3), ("a", 4)]


def test_what_a_step_waits_for_does_not_wait_behind_what_was_asked_ahead() -> None:
    client = dispatcher("a", grant=1)
    for number in range(5):
        client.submit(Pending(number, 1e9, priority=Priority.PREFETCH))
    sent(client)
    client.submit(Pending(9, 1e9, priority=Priority.BLOCKING))
    client.answered("a", 0)

    assert sent(client) == [("a", 9)]


def test_s9_second_sendings_stay_within_a_tenth_when_every_replica_dies_at_once() -> None:
    """Total outage: replicas come, take what they are sent, and die."""
    client: Dispatcher[str] = Dispatcher(max_attempts=10**6)
    first, again = 0, 0
    for number in range(2000):
        client.submit(pending(number))
    for _ in range(1000):
        client.open("a", grant=8)
        for _, one in client.assign(0.0):
            first += one.attempt == 1
            again += one.attempt > 1
        client.lost("a")

    assert first == 2000
    assert again <= RETRY_RESERVE + RETRY_SHARE * first


def test_all_that_dies_with_a_replica_of_a_large_grant_is_sent_again_at_once() -> None:
    """S11: the reserve was 64 whatever the grant, so most of a deep window waited for its deadlines."""
    client: Dispatcher[str] = Dispatcher(max_attempts=10)
    for number in range(1024):
        client.submit(pending(number))
    client.open("dies", grant=1024)
    assert len(client.assign(0.0)) == 1024
    client.lost("dies")
    client.open("lives", grant=1024)
    assert len(client.assign(0.0)) == 1024


def test_second_sendings_go_on_slowly_when_nothing_new_is_asked() -> None:
    client: Dispatcher[str] = Dispatcher(max_attempts=10**6)
    client.submit(pending(1))
    sendings = 0
    for second in range(200):
        client.open("a", grant=8)
        sendings += len(client.assign(float(second)))
        client.lost("a")

    assert sendings == 200


def break_on(client: Dispatcher[str], link: str, *, now: float) -> None:
    for number in range(1000, 1000 + BREAKER_FAILURES):
        client._links[link].inflight[number] = pending(number)
        client.answered(link, number, broke=True, now=now)


def test_a_replica_that_breaks_again_and_again_is_passed_over_and_tried_with_one() -> None:
    client = dispatcher("bad", "good", grant=4)
    break_on(client, "bad", now=10.0)
    for number in range(8):
        client.submit(pending(number))

    assert {link for link, _ in client.assign(10.0)} == {"good"}  # the others wait for it
    later = client.assign(10.0 + BREAKER_SECONDS)
    assert [link for link, _ in later] == ["bad"]
    client.answered("bad", later[0][1].request, now=13.0)
    assert [link for link, _ in client.assign(13.0)] == ["bad"] * 3


def test_the_only_replica_is_asked_although_it_breaks() -> None:
    client = dispatcher("bad")
    break_on(client, "bad", now=10.0)
    client.submit(pending(1))

    assert [link for link, _ in client.assign(10.0)] == ["bad"]
