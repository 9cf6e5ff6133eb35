"""Many threads on one client: whoever does the I/O, no wake-up is lost and nobody waits for himself."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from services.client import ServiceClient
from services.server import Server
from services.service import Reply
from spec.errors import RefusedError, UnreachableError
from tests.builders.echo import Echo, Gated, context
from tests.unit.services.test_client import ask, publish

SECONDS = 60.0


@contextmanager
def asking(tmp_path: Path, service: Echo | None = None, *, queue_depth: int = 8) -> Generator[ServiceClient]:
    path = tmp_path / "directory.json"
    with Server(service or Echo(context(tmp_path)), queue_depth=queue_depth, incarnation=1) as server:
        publish(path, (1, server.endpoint), epoch=1)
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            yield client


def test_threads_that_ask_wait_cancel_and_listen_at_once_all_get_their_own_answers(tmp_path: Path) -> None:
    """Waiters lead, follow, give up early or use callbacks, in any order; each request ends once, with its own text."""
    wrong: list[str] = []
    heard: list[str] = []

    def use(client: ServiceClient, random: Random, name: str) -> None:
        open_: list[tuple[str, Future[Reply]]] = []
        for number in range(150):
            text = f"{name}-{number}"
            future = ask(client, text, deadline_seconds=SECONDS)
            match random.randrange(5):
                case 0:
                    if future.result(SECONDS).body.text != text:
                        wrong.append(text)
                case 1:
                    future.add_done_callback(lambda done: heard.append(done.result().body.text))
                case 2 if future.cancel():
                    continue
                case 3:
                    try:
                        future.result(0.0001)
                    except TimeoutError:
                        open_.append((text, future))
                case _:
                    open_.append((text, future))
            if len(open_) > 5:
                text, future = open_.pop(random.randrange(len(open_)))
                if future.result(SECONDS).body.text != text:
                    wrong.append(text)
        for text, future in open_:
            if future.result(SECONDS).body.text != text:
                wrong.append(text)

    with asking(tmp_path) as client:
        threads = [threading.Thread(target=use, args=(client, Random(n), f"t{n}"), daemon=True) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        last = ask(client, "last")
        assert last.result(SECONDS).body.text == "last"
        limit = time.monotonic() + SECONDS
        while client._courier.waiting:
            assert time.monotonic() < limit
            ask(client, "more").result(SECONDS)
    assert not wrong
    assert len(heard) == len(set(heard)) > 0


def test_answers_that_nobody_waits_for_come_although_another_thread_just_led(tmp_path: Path) -> None:
    """What a leader's sending has taken notice of is left in the socket when it leaves; our thread must find it."""
    with asking(tmp_path, queue_depth=64) as client:
        for _ in range(100):
            others = [ask(client, "other") for _ in range(5)]
            ask(client, "mine").result(SECONDS)
            done, missing = wait(others, timeout=SECONDS)
            assert not missing
            assert {future.result().body.text for future in done} == {"other"}


def test_a_request_made_in_a_callback_is_sent(tmp_path: Path) -> None:
    second: Future[Reply] = Future()

    with asking(tmp_path) as client:

        def go_on(done: Future[Reply]) -> None:
            done.result()
            ask(client, "second").add_done_callback(lambda found: second.set_result(found.result()))

        ask(client, "first").add_done_callback(go_on)
        assert second.result(SECONDS).body.text == "second"


def trouble_in_a_callback(client: ServiceClient, wait: Callable[[Future[Reply]], object]) -> BaseException:
    """What comes of waiting for a request while another one's reply is handed over."""
    trouble: Future[BaseException] = Future()

    def wait_for_another(_: Future[Reply]) -> None:
        try:
            wait(ask(client, "second"))
        except RuntimeError as error:
            trouble.set_result(error)

    ask(client, "first").add_done_callback(wait_for_another)
    return trouble.result(SECONDS)


def test_waiting_in_a_callback_is_refused_instead_of_waiting_for_oneself(tmp_path: Path) -> None:
    with asking(tmp_path) as client:
        assert "must not wait" in str(trouble_in_a_callback(client, lambda one: one.result(SECONDS)))
        assert ask(client, "third").result(SECONDS).body.text == "third"


def test_asking_in_a_callback_for_what_ended_another_request_is_refused_too(tmp_path: Path) -> None:
    """It waited for the thread that it had stopped, and with it everybody else."""
    with asking(tmp_path) as client:
        assert "must not wait" in str(trouble_in_a_callback(client, lambda one: one.exception(SECONDS)))
        assert isinstance(ask(client, "refuse").exception(SECONDS), RefusedError)
        assert ask(client, "third").exception(SECONDS) is None


def test_a_wait_for_several_ends_although_some_were_cancelled(tmp_path: Path) -> None:
    """To `concurrent.futures` a cancelled future is over only when somebody has taken note of it."""
    service = Gated(context(tmp_path, max_batch=1))
    with asking(tmp_path, service) as client:
        futures = [ask(client, f"{number}") for number in range(4)]
        assert service.began.acquire(timeout=SECONDS)
        assert all(future.cancel() for future in futures[1:3])
        assert all(future.cancel() for future in futures[1:3])  # once more changes nothing
        service.permits.release(100)
        assert not wait(futures, timeout=SECONDS).not_done
        assert [future.cancelled() for future in futures] == [False, True, True, False]


def test_a_client_whose_process_has_no_descriptor_left_goes_on_when_there_are_some(tmp_path: Path) -> None:
    """It ended the client's thread for good, or was raised by whoever asked next."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with asking(tmp_path) as client:
        ask(client, "first").result(SECONDS)
        with client._courier._turning:
            (key,) = client._courier._links
            client._courier._lose(key, "a cut")
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(UnreachableError, match="Too many open files"):
                ask(client, "second", deadline_seconds=0.5).result(SECONDS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert ask(client, "third").result(SECONDS).body.text == "third"


def test_a_waiter_is_not_held_up_by_one_with_a_longer_wait(tmp_path: Path) -> None:
    """The one who leads waits for a reply that does not come; the others' replies come all the same."""
    service = Gated(context(tmp_path, max_batch=1))
    with asking(tmp_path, service) as client:
        slow = ask(client, "slow")
        assert service.began.acquire(timeout=SECONDS)
        leader = threading.Thread(target=lambda: slow.result(SECONDS), daemon=True)
        leader.start()
        with pytest.raises(TimeoutError):
            slow.result(0.05)
        assert not ask(client, "cancelled").cancelled()
        service.permits.release(2)
        leader.join(SECONDS)
        assert slow.result(0).body.text == "slow"


def test_closing_ends_every_waiter_at_once(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=1))
    ended: list[str] = []

    def wait_for(future: Future[Reply]) -> None:
        try:
            future.result(SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever ends it is told
            ended.append(str(error))

    with asking(tmp_path, service) as client:
        threads = [threading.Thread(target=wait_for, args=(ask(client, "x"),), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert service.began.acquire(timeout=SECONDS)
        client.close()
        for thread in threads:
            thread.join(SECONDS)
        service.permits.release(100)
    assert len(ended) == 4
    assert all("was closed" in text for text in ended)
