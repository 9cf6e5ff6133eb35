"""Credits, re-issue and effects of the services: random stories, and all short stories there are."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Hashable, Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.wire.frames import unpack
from tests.builders.service_world import ServiceWorld, run_story

STEPS = int(os.environ.get("GKR_CHAOS_STEPS", "20000"))
"""`make chaos` takes a million."""
STORY = 400
LOSSES = 2 if STEPS >= 1_000_000 else 1
"""Broken connections in the exhaustive search; each one makes it several times as large."""


@pytest.mark.slow
@pytest.mark.timeout(60 + STEPS // 100)
def test_no_story_loses_doubles_or_leaks_anything() -> None:
    """Slow because of its many steps. S1, S2, S3, S5, S8, S9 and S11 of the services' invariants; a failure names its
    seed."""
    seen: Counter[str] = Counter()
    for seed in range(max(1, STEPS // STORY)):
        try:
            world = run_story(Random(seed), steps=STORY)
        except AssertionError as error:
            raise AssertionError(f"story {seed}: {error}") from error
        seen.update(how if how in ("cancelled", "expired") else "answered" for how in world.answers.values())
        seen["again"] += sum(double.again for double in world.clients)
        seen["deaths"] += len(world.gone)
        seen["duplicates"] += sum(one.reception.stats().duplicates for one in (*world.replicas, *world.gone))
        seen["breaks"] += len(world.zombies)
    # The stories are not empty ones.
    least = {"answered": 2000, "cancelled": 20, "expired": 50, "again": 100, "deaths": 30, "duplicates": 10}
    for what, count in least.items():
        assert seen[what] >= count * STEPS // 20_000, (what, seen)


@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 60))
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_short_stories_that_shrink(random: Random, steps: int) -> None:
    run_story(random, steps=steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_credit_protocol_keeps_every_promise_in_every_state_it_can_reach() -> None:
    """Slow because there are thousands of states. One client, one replica, three requests of which two do not fit
    together by bytes; one request sent twice, one cancelled, one broken connection whose last messages still come, one
    death of the replica: every order of all steps until nothing new is found, and from each state quiet ends
    everything."""
    first = ServiceWorld(clients=1, replicas=1)
    for size in (1, 60, 60):
        first.submit(0, size=size)
    first.connect(0, 0)
    known = {_key(first)}
    frontier = [first]
    while frontier:
        world = frontier.pop()
        for step in _steps(world):
            after = copy.deepcopy(world)
            _take(after, step)
            key = _key(after)
            if key not in known:
                known.add(key)
                frontier.append(after)
        world.settle()
    assert len(known) > 5000


def _steps(world: ServiceWorld) -> Iterator[str]:
    link = world.clients[0].links.get(0)
    dispatcher = world.clients[0].dispatcher
    if link is None:
        yield "connect"
    else:
        yield from ("up",) if link.up else ()
        yield from ("down",) if link.down else ()
        yield from ("lose",) if len(world.zombies) < LOSSES else ()
        yield from ("send",) if dispatcher.waits else ()
        if 0 in dispatcher._links and dispatcher._links[0].inflight and not getattr(world, "doubled", False):
            yield "twice"
    for number, zombie in enumerate(world.zombies):
        yield from (f"zombie {number}",) if zombie.up else ()
        yield from (f"notice {number}",) if zombie.route in world.replicas[0].reception._clients else ()
    yield from ("kill",) if not world.gone else ()
    yield "finish" if world.replicas[0].running else "begin"
    yield from ("cancel",) if not world.ends.get((0, 2)) else ()


def _take(world: ServiceWorld, step: str) -> None:
    link = world.clients[0].links.get(0)
    match step:
        case "connect":
            world.connect(0, 0)
        case "up" if link is not None:
            world.deliver_up(link)
        case "down" if link is not None:
            world.deliver_down(link)
        case "lose" if link is not None:
            world.lose(link)
        case "send":
            world.send(0)
        case "twice":
            world.send_twice(0, 0, 0)
            world.doubled = True  # type: ignore[attr-defined]
        case "begin":
            world.begin(0)
        case "finish":
            world.finish(0)
        case "kill":
            world.kill(0)
        case "cancel":
            world.cancel(0, 2)
        case other if other.startswith("zombie"):
            world.deliver_up(world.zombies[int(other.split()[1])])
        case other if other.startswith("notice"):
            world.notice(world.zombies[int(other.split()[1])])
        case other:
            raise AssertionError(other)


def _key(world: ServiceWorld) -> Hashable:
    """Two worlds with equal keys go on the same way."""
    place = world.replicas[0]
    scheduler = place.reception._scheduler
    dispatcher = world.clients[0].dispatcher

    def pipes(link: object) -> Hashable:
        told = [
            tuple((unpack(one).header.kind, unpack(one).header.request) for one in pipe)
            for pipe in (getattr(link, "up"), getattr(link, "down"))  # noqa: B009 - of either kind of link
        ]
        return (*told, getattr(link, "route") in place.reception._clients)  # noqa: B009

    return (
        tuple(pipes(link) for link in world.links()),
        tuple(pipes(link) for link in world.zombies),
        tuple((client, tuple(sorted(state.outstanding))) for client, state in sorted(scheduler._clients.items())),
        tuple(
            ticket.request
            for state in scheduler._clients.values()
            for line in state.lines.values()
            for ticket in line.tickets
        ),
        tuple(one.request for one in place.running),
        tuple(sorted(request for _, request in place.reception._running)),
        tuple(sorted(request for _, request in place.reception._replies._replies)),
        tuple(sorted(place.computed.items())),
        tuple(sorted(world.ends.items())),
        tuple(one.request for queue in dispatcher._queues for one in queue if not one.over),
        tuple(
            sorted(
                (request, one.over) for known in dispatcher._links.values() for request, one in known.inflight.items()
            )
        ),
        len(place.reception._lost),
        place.incarnation,
        getattr(world, "doubled", False),
    )
