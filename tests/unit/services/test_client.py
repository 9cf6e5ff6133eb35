"""Client: deadlines, deaths of replicas, one end per future. Replicas are threads or processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from services.client import LocalClient, ServiceClient
from services.directory import write_directory
from services.server import Server
from services.service import Reply, Service
from spec.errors import RefusedError, UnreachableError
from spec.services import Directory, Replica
from tests.builders.echo import Echo, EchoArgs, EchoReply, Gated, context

SECONDS = 20.0


def ask(client: ServiceClient, text: str, *, deadline_seconds: float = SECONDS) -> Future[Reply]:
    return client.submit("echo", EchoArgs(text=text), reply=EchoReply, deadline_seconds=deadline_seconds)


def publish(path: Path, *endpoints: tuple[int, str], epoch: int) -> None:
    """A directory of replicas given as (incarnation, endpoint)."""
    replicas = [
        Replica(service="echo", kind="encode", index=index, endpoint=endpoint, incarnation=incarnation)
        for index, (incarnation, endpoint) in enumerate(endpoints)
    ]
    write_directory(path, directory=Directory(epoch=epoch, replicas=replicas))


@contextmanager
def replica_process(incarnation: int) -> Generator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """A replica in a process of its own, and what waits for its endpoint."""
    command = [sys.executable, "-m", "tests.builders.echo", str(incarnation)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        said = process.stdout
        assert said is not None
        try:
            yield process, lambda: said.readline().strip()
        finally:
            process.kill()


def test_a_replica_killed_under_load_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    """Two rounds of SIGKILL while requests are in flight; each time a successor appears in the directory."""
    path = tmp_path / "directory.json"
    ended: list[str] = []
    futures: list[Future[Reply]] = []
    with ExitStack() as stack:
        replicas = [stack.enter_context(replica_process(incarnation)) for incarnation in (1, 2, 3)]
        client = stack.enter_context(closing(ServiceClient(path, service="echo", identity="rank-0")))
        for incarnation, (process, endpoint) in enumerate(replicas, start=1):
            publish(path, (incarnation, endpoint()), epoch=incarnation)
            first = len(futures)
            for number in range(first, first + 200):
                future = ask(client, str(number), deadline_seconds=60)
                future.add_done_callback(lambda done: ended.append(done.result().body.text))
                futures.append(future)
            futures[first + 20].result(SECONDS)
            if incarnation < 3:
                os.kill(process.pid, signal.SIGKILL)
        texts = [future.result(60).body.text for future in futures]
        wait_for(lambda: len(ended) >= len(futures))
    assert texts == [str(number) for number in range(600)]
    assert sorted(ended, key=int) == texts


def wait_for(condition: Callable[[], bool]) -> None:
    """Callbacks run in the client's thread just after a future completes: look again until the deadline."""
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit
        os.sched_yield()


def test_the_other_replica_takes_over_what_a_dead_one_had(tmp_path: Path) -> None:
    path = tmp_path / "directory.json"
    slow = Gated(context(tmp_path))
    with Server(slow, queue_depth=4, incarnation=1) as dying, Server(Echo(context(tmp_path)), queue_depth=4) as other:
        publish(path, (1, dying.endpoint), epoch=1)
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            futures = [ask(client, str(number)) for number in range(4)]
            assert slow.began.acquire(timeout=SECONDS)
            publish(path, (1, dying.endpoint), (1, other.endpoint), epoch=2)
            dying.stop(deadline_seconds=0)

            assert [future.result(SECONDS).body.text for future in futures] == ["0", "1", "2", "3"]
        slow.permits.release(100)


def test_a_replica_that_left_the_directory_is_left_although_it_still_answers(tmp_path: Path) -> None:
    path = tmp_path / "directory.json"
    slow = Gated(context(tmp_path))
    with (
        Server(slow, queue_depth=4, incarnation=1) as old,
        Server(Echo(context(tmp_path)), queue_depth=4, incarnation=2) as new,
    ):
        publish(path, (1, old.endpoint), epoch=1)
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            future = ask(client, "x")
            assert slow.began.acquire(timeout=SECONDS)
            publish(path, (2, new.endpoint), epoch=2)

            assert future.result(SECONDS).body.text == "x"
            assert not slow.batches
        slow.permits.release(100)


def test_a_call_without_any_replica_ends_at_its_deadline_naming_service_and_directory(tmp_path: Path) -> None:
    with (
        closing(ServiceClient(tmp_path / "directory.json", service="echo", identity="rank-0")) as client,
        pytest.raises(UnreachableError, match=r"service echo did not answer echo within 0\.2 s") as late,
    ):
        client.call("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=0.2)
    assert "directory.json" in late.value.hint


def test_a_call_to_a_slow_service_ends_at_its_deadline_naming_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "directory.json"
    service = Gated(context(tmp_path))
    with Server(service, queue_depth=1, incarnation=1) as server:
        publish(path, (1, server.endpoint), epoch=1)
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            future = ask(client, "late", deadline_seconds=0.5)
            with pytest.raises(UnreachableError, match=server.endpoint):
                future.result(SECONDS)

            service.permits.release(100)
            # The late answer returned the only credit, and ended nothing a second time.
            assert ask(client, "next").result(SECONDS).body.text == "next"


def test_a_cancelled_call_gives_its_place_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "directory.json"
    service = Gated(context(tmp_path, max_batch=1))
    with Server(service, queue_depth=2, incarnation=1) as server:
        publish(path, (1, server.endpoint), epoch=1)
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            running = ask(client, "running")
            assert service.began.acquire(timeout=SECONDS)
            queued, third = ask(client, "queued"), ask(client, "third")
            limit = time.monotonic() + SECONDS
            while server.stats(timeout_seconds=SECONDS).queued < 1:
                assert time.monotonic() < limit
            assert queued.cancel()
            while server.stats(timeout_seconds=SECONDS).cancelled < 1:
                assert time.monotonic() < limit
            service.permits.release(100)

            assert running.result(SECONDS).body.text == "running"
            assert third.result(SECONDS).body.text == "third"
    assert ["queued"] not in service.batches


def test_a_replica_of_another_service_on_an_old_address_is_not_taken_for_ours(tmp_path: Path) -> None:
    path = tmp_path / "directory.json"
    with (
        Server(Echo(context(tmp_path, name="other")), queue_depth=1, incarnation=1) as stranger,
        Server(Echo(context(tmp_path)), queue_depth=1, incarnation=2) as ours,
    ):
        publish(path, (1, stranger.endpoint), epoch=1)
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            future = ask(client, "x")
            publish(path, (2, ours.endpoint), epoch=2)
            assert future.result(SECONDS).body.text == "x"
        assert stranger.stats(timeout_seconds=SECONDS).requests == 0


def test_a_second_client_with_the_identity_takes_over_and_the_first_is_told(tmp_path: Path) -> None:
    path = tmp_path / "directory.json"
    with Server(Echo(context(tmp_path)), queue_depth=1, incarnation=1) as server:
        publish(path, (1, server.endpoint), epoch=1)
        with (
            closing(ServiceClient(path, service="echo", identity="rank-0")) as first,
            closing(ServiceClient(path, service="echo", identity="rank-0")) as second,
        ):
            assert ask(second, "second").result(SECONDS).body.text == "second"
            with pytest.raises(RefusedError, match="a newer client has the identity 'rank-0'"):
                ask(first, "first").result(SECONDS)


def test_what_cannot_travel_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with closing(ServiceClient(tmp_path / "directory.json", service="echo", identity="rank-0")) as client:
        args = EchoArgs(text="x")
        with pytest.raises(RefusedError, match="is object"):
            client.submit("echo", args, reply=EchoReply, tensors={"x": np.array([object()])}, deadline_seconds=1)


@pytest.mark.parametrize("text", ["half a pair: \ud83d"])
def test_a_text_that_cannot_travel_is_refused_before_it_is_sent(tmp_path: Path, text: str) -> None:
    with (
        closing(ServiceClient(tmp_path / "directory.json", service="echo", identity="rank-0")) as client,
        pytest.raises(RefusedError, match="cannot be encoded"),
    ):
        ask(client, text)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e30])
def test_a_deadline_that_is_none_is_refused_and_the_client_goes_on(tmp_path: Path, seconds: float) -> None:
    """It broke the thread that sends, or left a request behind that took a credit for ever."""
    path = tmp_path / "directory.json"
    with Server(Echo(context(tmp_path)), queue_depth=1, incarnation=1) as server:
        publish(path, (1, server.endpoint), epoch=1)
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            with pytest.raises(RefusedError, match=re.escape(f"a deadline of {seconds} s")):
                ask(client, "x", deadline_seconds=seconds)
            assert ask(client, "y").result(SECONDS).body.text == "y"


@pytest.mark.parametrize("secret", [b"", b"s" * 32])
def test_a_replica_of_another_protocol_version_is_named_with_both_versions(tmp_path: Path, secret: bytes) -> None:
    path = tmp_path / "directory.json"
    with zmq.Context[Any]() as zmq_context, zmq_context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        other.bind("tcp://127.0.0.1:*")
        endpoint = other.getsockopt_string(zmq.LAST_ENDPOINT)
        one = Replica(
            service="echo", kind="encode", index=0, endpoint=endpoint, incarnation=1, sealed=bool(secret)
        )  # fmt: skip
        write_directory(path, directory=Directory(epoch=1, replicas=[one]))
        with closing(ServiceClient(path, service="echo", identity="rank-0", secret=secret)) as client:
            future = ask(client, "x", deadline_seconds=2)
            route = other.recv_multipart()[0]
            other.send_multipart([route, msgspec.msgpack.encode([9, ["another", "header"], {}])])
            with pytest.raises(UnreachableError, match=r"protocol version 9; this side speaks \d"):
                future.result(SECONDS)


def test_too_many_waiting_requests_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "directory.json"
    with closing(ServiceClient(path, service="echo", identity="rank-0", max_waiting=2)) as client:
        futures = [ask(client, "1"), ask(client, "2")]
        with pytest.raises(RefusedError, match="2 requests to echo wait"):
            ask(client, "3")
        client.close()
        for future in futures:
            with pytest.raises(UnreachableError, match="was closed"):
                future.result(SECONDS)


def test_a_closed_client_answers_at_once(tmp_path: Path) -> None:
    client = ServiceClient(tmp_path / "directory.json", service="echo", identity="rank-0")
    client.close()
    client.close()

    with pytest.raises(UnreachableError, match="closed"):
        ask(client, "x").result(SECONDS)


def _use(client: ServiceClient, found: multiprocessing.SimpleQueue[str]) -> None:
    try:
        ask(client, "x")
    except RuntimeError as error:
        found.put(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking beside threads is exactly what is refused here
def test_a_client_is_not_used_across_a_fork(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    found = fork.SimpleQueue()
    with closing(ServiceClient(tmp_path / "directory.json", service="echo", identity="rank-0")) as client:
        child = fork.Process(target=_use, args=(client, found))
        child.start()
        child.join(SECONDS)

    assert not found.empty()
    assert "does not survive a fork" in found.get()


def local(tmp_path: Path, kind: type[Service] = Echo) -> LocalClient:
    return LocalClient(kind(context(tmp_path)))


def test_the_local_client_answers_like_a_remote_one(tmp_path: Path) -> None:
    client = local(tmp_path)
    tensors = {"x": np.arange(3)}
    future = client.submit("echo", EchoArgs(text="a"), reply=EchoReply, tensors=tensors, deadline_seconds=1)

    assert future.result(0).body == EchoReply(text="a", batch=1)
    np.testing.assert_array_equal(future.result(0).tensors["x"], np.arange(3))


def test_the_local_client_refuses_like_a_remote_one(tmp_path: Path) -> None:
    client = local(tmp_path)
    with pytest.raises(RefusedError, match="the text is 'refuse'") as refusal:
        client.call("echo", EchoArgs(text="refuse"), reply=EchoReply, deadline_seconds=1)
    assert refusal.value.hint == "send another text"
    with pytest.raises(RefusedError):
        client.submit("echo", EchoArgs(text="refuse"), reply=EchoReply, deadline_seconds=1).result(0)


def test_the_local_client_breaks_like_a_remote_one(tmp_path: Path) -> None:
    future = local(tmp_path).submit("echo", EchoArgs(text="break"), reply=EchoReply, deadline_seconds=1)
    with pytest.raises(RefusedError, match="echo failed: ZeroDivisionError: a bug"):
        future.result(0)
