"""Reads the logs of pods through the API server: once, or for as long as a run lasts.

Promises: a bounded number of open streams, whatever the number of pods (the others are read in turn); pods that come
later and containers that start again join; a stream that breaks goes on where it stopped, no line lost or twice; every
wait ends when `stop` is set.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from gkr.cluster.connection import Connection
from gkr.cluster.explain_objects import Object
from gkr.cluster.kinds import resource
from gkr.cluster.logs import Line, PodRef, Seen, pod_ref, read_line
from gkr.cluster.places import Places
from manifests.labels import RUN
from spec.errors import GkrError, NotFoundError, RefusedError, UnreachableError

MOST_STREAMS = 48
READERS = 12
WATCH_SECONDS = 50
RETRY_SECONDS = 1.0
TURN_SECONDS = 2.0
_SILENCE_SECONDS = 120.0
"""A stream that says nothing for so long is opened again: a connection can die without a word."""
_QUEUE = 20_000
SETTLE_SECONDS = 10.0
"""A container that runs all that time after its stream ended is the same one; something between us ended the stream."""
StreamEnd = Literal["whole", "broken", "gone"]
"""All there was; interrupted or not begun, more comes later; there will never be more."""


def list_pods(places: Places, connections: Mapping[str, Connection], *, container: str | None = None) -> list[PodRef]:
    """The pods that a run has now, head first."""
    found: list[PodRef] = []
    for cluster, namespace in places.namespaces():
        pods = connections[cluster].list("Pod", namespace=namespace, labels={RUN: places.run})
        found += [pod_ref(pod, cluster=cluster, container=container) for pod in pods]
    order = {"head": 0, "syncer": 1, "trainer": 2}
    return sorted(found, key=lambda one: (order.get(one.role, 3), one.learner, one.name))


@dataclass(frozen=True)
class Request:
    """What to ask of each container."""

    tail: int | None = None
    since: str | None = None
    """RFC 3339 time."""
    previous: bool = False


def read_pods(
    pods: Sequence[PodRef], connections: Mapping[str, Connection], *, request: Request
) -> tuple[list[Line], dict[str, str]]:
    """What containers have printed, and why some have nothing to show."""
    silent: dict[str, str] = {}

    def one(pod: PodRef) -> list[Line]:
        if request.previous and not pod.restarts:
            return []
        try:
            return list(_once(connections[pod.cluster], pod, request=request))
        except (RefusedError, NotFoundError, UnreachableError) as error:
            silent[pod.name] = error.message
            return []

    with ThreadPoolExecutor(max_workers=READERS) as pool:
        found = [line for lines in pool.map(one, pods) for line in lines]
    return found, silent


def _once(connection: Connection, pod: PodRef, *, request: Request) -> Iterator[Line]:
    attempt = pod.restarts + (0 if request.previous else 1)
    with _stream(connection, pod, request=request, follow=False) as lines:
        for raw in lines:
            yield read_line(raw, pod=pod, attempt=attempt)


class Follower:
    """All pods of a run, merged. Lines come out of `lines`; nothing is printed here."""

    def __init__(
        self,
        places: Places,
        connections: Mapping[str, Connection],
        *,
        request: Request,
        wants: Callable[[PodRef], bool],
        container: str | None,
    ) -> None:
        self._places, self._connections, self._request = places, connections, request
        self._wants, self._container = wants, container
        self.stop = threading.Event()
        self.problems: queue.SimpleQueue[GkrError] = queue.SimpleQueue()
        self._lines: queue.Queue[Line] = queue.Queue(_QUEUE)
        self._lock = threading.Lock()
        self._pods: dict[tuple[str, str, str], PodRef] = {}
        self._seen: dict[tuple[str, str, str], Seen] = {}
        self._first: dict[tuple[str, str, str], Request] = {}
        """What to ask a pod first: one that comes later is shown from its start."""
        self._streaming: set[tuple[str, str, str]] = set()
        self._threads: list[threading.Thread] = []

    @property
    def broken_pods(self) -> frozenset[str]:
        """Names of pods that ended badly and have not recovered."""
        with self._lock:
            return frozenset(one.name for one in self._pods.values() if one.broken)

    def start(self) -> None:
        """Begin to watch: one watch for each namespace, and one reader in turn for what has no stream of its own."""
        for cluster, namespace in self._places.namespaces():
            self._spawn(partial(self._watch, self._connections[cluster], cluster, namespace))
        self._spawn(self._take_turns)

    def lines(self, *, wait_seconds: float) -> list[Line]:
        """What came within the time, by the nodes' own clocks."""
        found: list[Line] = []
        until = time.monotonic() + wait_seconds
        while (left := until - time.monotonic()) > 0:
            try:
                found.append(self._lines.get(timeout=left))
            except queue.Empty:
                break
        return sorted(found, key=lambda line: line.stamp)

    def _spawn(self, act: Callable[[], None]) -> None:
        thread = threading.Thread(target=act, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self, connection: Connection, cluster: str, namespace: str) -> None:
        """Every pod now and from now on. A watch that ends begins again with a list, so nothing is missed."""
        first = self._request
        selector = {RUN: self._places.run}
        while not self.stop.is_set():
            try:
                for pod in connection.list("Pod", namespace=namespace, labels=selector):
                    self._see(connection, cluster, pod, first=first)
                first = Request()
                for change, pod in connection.watch("Pod", namespace=namespace, labels=selector, seconds=WATCH_SECONDS):
                    if change == "DELETED":
                        self._forget(cluster, pod)
                    else:
                        self._see(connection, cluster, pod, first=first)
                    if self.stop.is_set():
                        return
            except UnreachableError:
                pass  # whoever follows hears of it from the run's state, which is asked for as well
            except GkrError as error:
                self.problems.put(error)
                return
            self.stop.wait(RETRY_SECONDS)

    def _see(self, connection: Connection, cluster: str, pod: Object, *, first: Request) -> None:
        found = pod_ref(pod, cluster=cluster, container=self._container)
        if not self._wants(found) or not found.node:
            return
        with self._lock:
            self._pods[found.key] = found
            self._seen.setdefault(found.key, Seen())
            self._first.setdefault(found.key, first)
            fresh = found.key not in self._streaming and found.running and len(self._streaming) < MOST_STREAMS
            if fresh:
                self._streaming.add(found.key)
        if fresh:
            self._spawn(partial(self._follow, connection, found.key))

    def _forget(self, cluster: str, pod: Object) -> None:
        with self._lock:
            self._pods.pop(pod_ref(pod, cluster=cluster).key, None)

    def _follow(self, connection: Connection, key: tuple[str, str, str]) -> None:
        """One pod until it is gone: again after every break, and into the next container when it starts again."""
        known = self._pods[key]
        restarts = known.restarts
        while not self.stop.is_set():
            pod = self._now(key)
            if pod is None:
                break
            if pod.restarts > restarts:
                restarts = pod.restarts
                self._read(connection, pod, follow=False, previous=True)  # what it printed before it died
            end = self._read(connection, pod, follow=pod.running)
            if end == "gone" or pod.ended:
                break
            self.stop.wait(RETRY_SECONDS)
            if end == "whole":
                self._await_next(pod)
        with self._lock:
            self._streaming.discard(key)

    def _await_next(self, pod: PodRef) -> None:
        """After a stream that ended as streams do when a container ends: until the pod's status tells of the next one.
        It does so later than the node, which would give us the next one's lines already, under this one's number.
        """
        settled = time.monotonic() + SETTLE_SECONDS
        while (now := self._now(pod.key)) is not None and now.restarts == pod.restarts and not now.ended:
            if (now.printing and time.monotonic() >= settled) or self.stop.wait(RETRY_SECONDS):
                return

    def _now(self, key: tuple[str, str, str]) -> PodRef | None:
        with self._lock:
            return self._pods.get(key)

    def _take_turns(self) -> None:
        """Pods beyond the streams, and the ends of those that do not run any more."""
        pool = ThreadPoolExecutor(max_workers=READERS)
        done: set[tuple[tuple[str, str, str], int]] = set()
        while not self.stop.wait(TURN_SECONDS):
            with self._lock:
                others = [one for key, one in self._pods.items() if key not in self._streaming]
            others = [one for one in others if (one.key, one.restarts) not in done]
            ends = list(pool.map(self._read_rest, others))
            read = [one for one, end in zip(others, ends, strict=True) if end != "broken"]
            done |= {(one.key, one.restarts) for one in read if one.ended}
        pool.shutdown(wait=False, cancel_futures=True)

    def _read_rest(self, pod: PodRef) -> StreamEnd:
        return self._read(self._connections[pod.cluster], pod, follow=False)

    def _read(self, connection: Connection, pod: PodRef, *, follow: bool, previous: bool = False) -> StreamEnd:
        """One request, and how it ended. Only one at a time for each pod: two would both take the same line for new."""
        seen = self._seen[pod.key]
        if not seen.reading.acquire(timeout=RETRY_SECONDS):
            return "broken"
        try:
            return self._read_alone(connection, pod, seen=seen, follow=follow, previous=previous)
        finally:
            seen.reading.release()

    def _read_alone(
        self, connection: Connection, pod: PodRef, *, seen: Seen, follow: bool, previous: bool
    ) -> StreamEnd:
        seen.reconnect()
        request = Request(since=seen.last, previous=previous) if seen.last else self._first[pod.key]
        attempt = pod.restarts + (0 if previous else 1)
        try:
            with _stream(connection, pod, request=request, follow=follow) as lines:
                for raw in lines:
                    line = read_line(raw, pod=pod, attempt=attempt)
                    if seen.is_new(line.stamp, raw):
                        self._put(line)
                    if self.stop.is_set():
                        return "gone"
        except NotFoundError:
            return "gone"
        except (RefusedError, UnreachableError):
            return "broken"  # not started yet, or the node does not answer: again later
        return "whole"

    def _put(self, line: Line) -> None:
        while not self.stop.is_set():
            try:
                self._lines.put(line, timeout=0.5)
            except queue.Full:
                continue
            return


@contextmanager
def _stream(connection: Connection, pod: PodRef, *, request: Request, follow: bool) -> Generator[Iterator[str]]:
    """The lines of one request; the connection is given back whatever happens."""
    import httpx2

    params = {
        "container": pod.container or None,
        "timestamps": "true",
        "follow": "true" if follow else None,
        "previous": "true" if request.previous else None,
        "tailLines": str(request.tail) if request.tail is not None else None,
        "sinceTime": _whole_second(request.since) if request.since else None,
    }
    client: Any = connection.client._client  # noqa: SLF001 lightkube's own log() knows neither `previous` nor `sinceTime`
    with connection.translate(f"read the log of pod {pod.name}"):
        prepared = client.prepare_request(
            "get", resource("Pod"), name=f"{pod.name}/log", namespace=pod.namespace, params=params
        )
        if follow:
            prepared.timeout = httpx2.Timeout(10.0, read=_SILENCE_SECONDS)
        answer = client.send(client.build_adapter_request(prepared), stream=True)
        try:
            if answer.is_error:
                answer.read()
            client.raise_for_status(answer)
            yield _lines(answer.iter_bytes())
        finally:
            answer.close()


def _lines(blocks: Iterable[bytes]) -> Iterator[str]:
    """Split at line feeds alone: the client's own splitting takes a progress bar's carriage returns for line ends."""
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _whole_second(stamp: str) -> str:
    """The server cuts to whole seconds anyway; it refuses some fractions."""
    return stamp.partition(".")[0].removesuffix("Z") + "Z"


def since_time(seconds_ago: float, *, now: float) -> str:
    """A moment as the API server takes it."""
    return datetime.fromtimestamp(now - seconds_ago, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
