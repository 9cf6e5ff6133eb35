"""Scheduler: bounded queues, turns by cost, batches of calls that fit together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler import AGING_SECONDS, GrantExceeded, Scheduler, Ticket
from services.wire.frames import Priority


def ticket(client: str, request: int, *, cost: int = 1, key: str = "", expires: float = 1e9) -> Ticket[str]:
    return Ticket(client=client, request=request, method="m", batch_key=key, cost=cost, expires=expires)


def scheduler(*clients: str, grant: int = 8, max_batch: int = 4) -> Scheduler[str]:
    made: Scheduler[str] = Scheduler(grant=grant, max_batch=max_batch)
    for client in clients:
        made.join(client)
    return made


def take(scheduler: Scheduler[str], now: float = 0) -> list[tuple[str, int]]:
    """Form the next batch and answer it at once."""
    batch = scheduler.next_batch(now)
    tickets = batch.tickets if batch else []
    for one in tickets:
        scheduler.settle(one.client, one.request)
    return [(one.client, one.request) for one in tickets]


def test_a_client_cannot_queue_more_than_its_grant() -> None:
    queues = scheduler("a", grant=2)
    queues.offer(ticket("a", 1))
    queues.offer(ticket("a", 2))

    with pytest.raises(GrantExceeded, match="more than 2"):
        queues.offer(ticket("a", 3))


def test_a_running_request_still_holds_its_credit() -> None:
    queues = scheduler("a", grant=1)
    queues.offer(ticket("a", 1))
    assert queues.next_batch(0) is not None

    with pytest.raises(GrantExceeded):
        queues.offer(ticket("a", 2))
    queues.settle("a", 1)
    queues.offer(ticket("a", 2))


def test_a_request_behind_a_flood_is_in_the_next_batch() -> None:
    queues = scheduler("flood", "quiet", grant=100, max_batch=4)
    for number in range(100):
        queues.offer(ticket("flood", number))
    take(queues)

    queues.offer(ticket("quiet", 1))

    assert ("quiet", 1) in take(queues)


def test_a_request_behind_a_flood_leads_even_if_it_cannot_share_a_batch() -> None:
    queues = scheduler("flood", "quiet", grant=100, max_batch=4)
    for number in range(100):
        queues.offer(ticket("flood", number, key="model-a"))
    take(queues)

    queues.offer(ticket("quiet", 1, key="model-b"))

    assert take(queues) == [("quiet", 1)]


def test_two_full_queues_take_turns() -> None:
    queues = scheduler("a", "b", max_batch=1)
    for number in range(3):
        queues.offer(ticket("a", number))
        queues.offer(ticket("b", number))

    assert [take(queues)[0][0] for _ in range(6)] == ["a", "b", "a", "b", "a", "b"]


def test_turns_are_counted_in_cost_not_in_requests() -> None:
    queues = scheduler("large", "small", grant=100, max_batch=4)
    for number in range(20):
        queues.offer(ticket("large", number, cost=4))
    for number in range(80):
        queues.offer(ticket("small", number))

    served = [one for _ in range(20) for one in take(queues)]

    assert sum(4 for client, _ in served if client == "large") == sum(1 for client, _ in served if client == "small")


def test_idling_earns_no_credit_for_later() -> None:
    queues = scheduler("busy", "idle", grant=100, max_batch=1)
    for number in range(100):
        queues.offer(ticket("busy", number))
    for _ in range(50):
        take(queues)
    for number in range(10):
        queues.offer(ticket("idle", number))

    assert [take(queues)[0][0] for _ in range(4)].count("idle") == 2


def test_a_batch_holds_one_key_and_at_most_its_items() -> None:
    queues = scheduler("a", "b", "c", max_batch=5)
    queues.offer(ticket("a", 1, cost=3, key="x"))
    queues.offer(ticket("b", 1, cost=3, key="x"))
    queues.offer(ticket("c", 1, cost=2, key="x"))
    queues.offer(ticket("a", 2, cost=1, key="y"))

    assert take(queues) == [("a", 1), ("c", 1)]
    assert take(queues) == [("b", 1)]
    assert take(queues) == [("a", 2)]


def test_a_call_larger_than_a_batch_is_computed_alone() -> None:
    queues = scheduler("a", "b", max_batch=4)
    queues.offer(ticket("a", 1, cost=9))
    queues.offer(ticket("b", 1))

    assert take(queues) == [("a", 1)]
    assert take(queues) == [("b", 1)]


def test_a_queue_keeps_its_order_when_its_head_does_not_fit() -> None:
    queues = scheduler("a", "b", max_batch=4)
    queues.offer(ticket("b", 1, cost=2))
    queues.offer(ticket("a", 1, cost=3))
    queues.offer(ticket("a", 2, cost=1))

    taken = take(queues) + take(queues)

    assert [request for client, request in taken if client == "a"] == [1, 2]


def test_an_expired_request_is_dropped_before_it_is_computed() -> None:
    queues = scheduler("a")
    queues.offer(ticket("a", 1, expires=5))
    queues.offer(ticket("a", 2, expires=50))
    batch = queues.next_batch(now=10)

    assert batch is not None
    assert [one.request for one in batch.expired] == [1]
    assert [one.request for one in batch.tickets] == [2]


def test_a_cancelled_request_frees_its_place_once_it_is_settled() -> None:
    queues = scheduler("a", grant=1)
    queues.offer(ticket("a", 1))

    assert queues.cancel("a", 1) is not None
    assert queues.cancel("a", 1) is None
    queues.settle("a", 1)
    queues.offer(ticket("a", 2))
    assert take(queues) == [("a", 2)]


def test_a_client_that_comes_back_starts_with_an_empty_queue() -> None:
    queues = scheduler("a", grant=1)
    queues.offer(ticket("a", 1))

    assert [one.request for one in queues.join("a")] == [1]
    assert queues.outstanding("a") == 0
    assert queues.next_batch(0) is None


def urgent(
    client: str, request: int, priority: Priority, *, arrived: float = 0.0, cost: int = 1, size: int = 0
) -> Ticket[str]:
    return Ticket(
        client=client,
        request=request,
        method="m",
        batch_key="",
        cost=cost,
        expires=1e9,
        arrived=arrived,
        priority=priority,
        size=size,
    )


def test_a_grant_counts_bytes_beyond_the_first_request() -> None:
    queues: Scheduler[str] = Scheduler(grant=8, max_batch=4, grant_bytes=100)
    queues.join("a")
    queues.offer(urgent("a", 1, Priority.BLOCKING, size=1000))
    with pytest.raises(GrantExceeded, match="100 bytes"):
        queues.offer(urgent("a", 2, Priority.BLOCKING, size=1))
    assert queues.outstanding_bytes("a") == 1000
    queues.settle("a", 1)
    for number, size in ((3, 60), (4, 40)):
        queues.offer(urgent("a", number, Priority.BLOCKING, size=size))
    with pytest.raises(GrantExceeded):
        queues.offer(urgent("a", 5, Priority.BLOCKING, size=1))


def test_what_a_step_waits_for_goes_before_everything_else_of_any_client() -> None:
    queues = scheduler("a", "b", grant=100, max_batch=1)
    for number, priority in enumerate(reversed(Priority)):
        queues.offer(urgent("a", number, priority))
        queues.offer(urgent("b", number, priority))

    assert [take(queues)[0][1] for _ in range(8)] == [3, 3, 2, 2, 1, 1, 0, 0]


def test_lower_classes_use_what_a_batch_has_left() -> None:
    queues = scheduler("a", "b", max_batch=3)
    queues.offer(urgent("a", 1, Priority.BACKGROUND))
    queues.offer(urgent("b", 1, Priority.BLOCKING))

    assert take(queues) == [("b", 1), ("a", 1)]


def test_a_flood_of_blocking_requests_delays_the_others_and_does_not_starve_them() -> None:
    """Each waits at most `AGING_SECONDS` for each class above it, and its turn then."""
    queues = scheduler("flood", "low", grant=10_000, max_batch=1)
    for number, priority in enumerate((Priority.PREFETCH, Priority.EVALUATION, Priority.BACKGROUND)):
        queues.offer(urgent("low", number, priority))
    served: dict[int, float] = {}
    for step in range(1000):
        now = step * 0.01
        queues.offer(urgent("flood", step, Priority.BLOCKING, arrived=now))
        for client, request in take(queues, now):
            if client == "low":
                served[request] = now

    for number in range(3):
        assert (number + 1) * AGING_SECONDS <= served[number] <= (number + 1) * AGING_SECONDS + 0.05


def test_a_queue_that_rose_takes_turns_and_no_more_than_turns() -> None:
    queues = scheduler("flood", "low", grant=10_000, max_batch=1)
    for number in range(1000):
        queues.offer(urgent("low", number, Priority.PREFETCH))
        queues.offer(urgent("flood", number, Priority.BLOCKING))
    served = [take(queues, now=100.0)[0][0] for _ in range(100)]

    assert 45 <= served.count("flood") <= 55


def test_ranks_of_a_lower_class_get_equal_cost_beside_a_flood_above() -> None:
    """S4: within one quantum and one batch."""
    queues = scheduler("flood", "large", "small", grant=10_000, max_batch=4)
    cost = {"large": 4, "small": 1}
    for number in range(1000):
        for client in cost:
            queues.offer(urgent(client, number, Priority.EVALUATION, cost=cost[client]))
    got = dict.fromkeys(cost, 0)
    for step in range(800):
        if step % 2:
            queues.offer(urgent("flood", step, Priority.BLOCKING, cost=4))
        for client, _ in take(queues):
            if client != "flood":
                got[client] += cost[client]

    assert abs(got["large"] - got["small"]) <= 4 + 4


def test_requests_that_nobody_is_blocked_by_wait_for_company() -> None:
    queues: Scheduler[str] = Scheduler(grant=100, max_batch=4, max_delay_seconds=0.1)
    queues.join("a")
    queues.offer(urgent("a", 1, Priority.PREFETCH, arrived=10.0))
    assert queues.next_batch(10.0) is None
    assert queues.ready_at() == pytest.approx(10.1)
    assert take(queues, 10.11) == [("a", 1)]

    for number in range(2, 6):
        queues.offer(urgent("a", number, Priority.PREFETCH, arrived=20.0))
    assert len(take(queues, 20.0)) == 4  # a full batch waits for nobody

    queues.offer(urgent("a", 6, Priority.PREFETCH, arrived=30.0))
    queues.offer(urgent("a", 7, Priority.BLOCKING, arrived=30.0))
    assert take(queues, 30.0) == [("a", 7), ("a", 6)]
    assert queues.ready_at() == float("inf")


def test_requests_that_are_cancelled_over_and_over_leave_nothing_behind() -> None:
    queues = scheduler("busy", "fickle", grant=100_000, max_batch=1)
    for number in range(5000):
        queues.offer(urgent("fickle", number, Priority.BACKGROUND, arrived=float(number)))
        assert queues.cancel("fickle", number) is not None
        queues.settle("fickle", number)
        queues.offer(urgent("busy", number, Priority.BLOCKING, arrived=float(number)))
        take(queues, float(number))

    assert sum(len(heap) for heap in queues._heaps) + len(queues._risings) < 1000


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offer", "batch", "settle", "cancel", "leave"]), st.integers(0, 3), st.integers(1, 6)
        ),
        max_size=200,
    )
)
def test_credits_are_conserved_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    """Granted = free + queued + running, for every client, after every step."""
    grant = 3
    queues = scheduler(*"0123", grant=grant, max_batch=4)
    running: dict[str, list[int]] = {name: [] for name in "0123"}
    for number, (what, who, cost) in enumerate(steps, start=1):
        client = str(who)
        queued = queues.queued().get(client, 0)
        match what:
            case "offer" if queued + len(running[client]) < grant:
                queues.offer(ticket(client, number, cost=cost, key=str(cost % 2)))
            case "offer":
                with pytest.raises(GrantExceeded):
                    queues.offer(ticket(client, number))
            case "batch":
                batch = queues.next_batch(0)
                for one in batch.tickets if batch else []:
                    running[one.client].append(one.request)
            case "settle" if running[client]:
                queues.settle(client, running[client].pop())
            case "leave":
                queues.leave(client)
                queues.join(client)
                running[client].clear()
            case _:
                continue
        for name in "0123":
            assert queues.outstanding(name) == queues.queued().get(name, 0) + len(running[name])
