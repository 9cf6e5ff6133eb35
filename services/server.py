"""One replica: a ROUTER socket in an I/O thread, and one worker thread that computes.

The I/O thread moves frames between the socket and `Reception`, and hands the worker one batch at a time; while a batch
is computed, the next ones form in the queues. Batches that take less time than the hand-over it computes itself. It
never blocks on a client: queues are bounded by grants, sends do not wait, and a client that does not read is forgotten
once its pipe is full. Liveness of connections is ZeroMQ's heartbeat, answered by ZeroMQ's own thread, so a busy replica
does not look dead; nor does it to those who ask for its counters, which say since when it computes.

Security is one of two levels. `local`, without a secret: an address of this machine, or one that a network policy
guards, never all addresses. `token`, with a secret: only those who have it are heard (`services.wire.seal`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Self

import numpy as np
import zmq

from services.reception import ClientId, Reception
from services.scheduler import Ticket
from services.service import Reply, Service
from services.stats import ServerStats
from services.waker import Waker
from services.wire.frames import (
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    INLINE_BYTES,
    MAX_FRAME_BYTES,
    Buffer,
    FrameError,
    Header,
    Kind,
    encode_body,
    encode_tensors,
    pack,
    pack_error,
)
from services.wire.lane import Lane
from services.wire.seal import Gate
from services.wire.sockets import high_water_mark, receive_routed, send_frames
from spec.errors import ConfigError, GkrError

_log = logging.getLogger(__name__)

_PROBE_SECONDS = 15.0
_TICK_MS = 500
_QUICK_SECONDS = 0.0005
"""A service whose last batches all took less is computed by the I/O thread: handing over would cost as much."""
_QUICK_BATCHES = 16
_SNAPSHOT_SECONDS = 60.0
"""Longest that a snapshot of the counters may take; it takes microseconds."""
_MESSAGES_PER_TURN = 256
_IN = int(zmq.POLLIN)

_BUG = "this is a bug of the service; its log has the traceback"
_EVERYWHERE = ("tcp://*", "tcp://0.0.0.0", "tcp://[::]")

Answer = tuple[Sequence[Buffer], bool]
"""Frames, and whether they are an error."""


class Server:
    """Serves one service. `start` returns its endpoint; the service must be warm already."""

    def __init__(
        self,
        service: Service,
        *,
        queue_depth: int,
        incarnation: int = 1,
        bind: str = "tcp://127.0.0.1:*",
        queue_bytes: int = 0,
        budget_bytes: int = 0,
        max_delay_seconds: float = 0.0,
        secret: bytes = b"",
    ) -> None:
        """Of each client: `queue_depth` requests and `queue_bytes` of them; of all grants together `budget_bytes`.

        0 bytes: not counted. `max_delay_seconds`: see `Scheduler`.
        """
        self._service = service
        self._bind = bind
        self._queue_depth = queue_depth
        self._reception = Reception(
            {method.name: method for method in service.methods},
            service=service.context.name,
            incarnation=incarnation,
            grant=queue_depth,
            grant_bytes=queue_bytes,
            budget_bytes=budget_bytes,
            max_delay_seconds=max_delay_seconds,
            max_batch=service.context.max_batch,
            room=self._room,
        )
        self._gate = Gate(secret, is_connected=self._reception.shares.__contains__) if secret else None
        self._inbox: deque[Callable[[], None]] = deque()
        self._table = threading.Lock()
        """Held by the I/O thread except while it computes a batch itself; who gets it may look at the reception."""
        self._computing_since = 0.0
        self._weights = ""
        self._waker = Waker()
        self._batches: queue.SimpleQueue[list[Ticket[ClientId]]] = queue.SimpleQueue()
        self._lanes: dict[bytes, Lane] = {}
        self._read: deque[bytes] = deque()
        """Connections that have something to say about the memory of their clients."""
        self._challenges: deque[tuple[bytes, Sequence[Buffer]]] = deque()
        self._full: set[bytes] = set()
        """Connections that took no more: their clients are forgotten, and hear so as soon as they read."""
        self._busy = self._more = False
        self._quick = 0
        """Batches in a row that took little time."""
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.endpoint = ""

    def start(self) -> str:
        """Bind and begin to serve. Raises ConfigError if the address cannot be bound, or is not for this level."""
        if self._gate is None and self._bind.startswith(_EVERYWHERE):
            raise ConfigError(
                f"{self._bind} is open to everybody who reaches this machine, and no token guards it",
                hint="bind one address, or start the run with `gkr launch`, which makes its keys",
            )
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, high_water_mark(self._queue_depth))
        router.setsockopt(zmq.RCVHWM, high_water_mark(self._queue_depth))
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        try:
            router.bind(self._bind)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(
                f"cannot listen on {self._bind}: {error}", hint="another process has the port; give another or 0"
            ) from error
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._threads = [
            threading.Thread(target=self._serve, args=(context, router), name="service-io", daemon=True),
            threading.Thread(target=self._work, name="service-worker", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self.endpoint

    @property
    def serving(self) -> bool:
        """False before the start, after the stop, and if a thread ended by a bug of ours."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    def stats(self, *, timeout_seconds: float) -> ServerStats:
        """A snapshot between two turns of the I/O thread, so that an answer also says that it turns or computes.

        Raises TimeoutError if it does neither.
        """
        if not self.serving:
            raise RuntimeError("the server is not serving")
        found: Future[ServerStats] = Future()
        self._post(lambda: found.set_result(self._snapshot()))
        limit = time.monotonic() + timeout_seconds
        while time.monotonic() < limit:
            with contextlib.suppress(FutureTimeoutError):
                return found.result(timeout=min(timeout_seconds, _TICK_MS / 1000))
            if self._table.acquire(blocking=False):
                try:
                    return self._snapshot()
                finally:
                    self._table.release()
        raise TimeoutError(f"the I/O thread neither turned nor computed for {timeout_seconds:g} s")

    def stop(self, *, deadline_seconds: float) -> bool:
        """Send clients away and end both threads. False if a batch is still being computed at the deadline."""
        self._stopping.set()
        self._waker.notify()
        self._batches.put([])
        limit = time.monotonic() + deadline_seconds
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._waker.close()
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(deadline_seconds=10)

    def _snapshot(self) -> ServerStats:
        since = self._computing_since
        age = time.monotonic() - since if since else 0.0
        return self._reception.stats(weights=self._weights, computing_seconds=age)

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._waker.notify()

    def _serve(self, context: zmq.Context[Any], router: zmq.Socket[Any]) -> None:
        try:
            with self._table:
                self._loop(router)
        finally:
            while self._lanes:
                self._lanes.popitem()[1].close()
            context.destroy(linger=HEARTBEAT_MS)

    def _loop(self, router: zmq.Socket[Any]) -> None:
        watched = [(router, _IN), (self._waker.fd, _IN)]
        probe_at = time.monotonic() + _PROBE_SECONDS
        while not self._stopping.is_set():
            ready = {one for one, _ in zmq.zmq_poll(watched, 0 if self._more else self._wait_ms())}
            if self._waker.fd in ready:
                self._waker.drain()
            while self._inbox:
                self._inbox.popleft()()
            if router in ready:
                self._more = self._receive(router)
            now = time.monotonic()
            while not self._busy and (tickets := self._reception.next_batch(now)):
                if self._quick >= _QUICK_BATCHES:
                    self._finish(tickets, *self._computed_here(tickets, now=now))
                else:
                    self._busy = True
                    self._computing_since = now
                    self._batches.put(tickets)
            if now >= probe_at:
                probe_at = now + _PROBE_SECONDS
                self._reception.probe(now)
            self._flush(router)
        self._reception.go_away()
        self._flush(router)

    def _wait_ms(self) -> int:
        """Until the next batch is due whatever arrives; while one is computed, its end wakes us."""
        left = math.inf if self._busy else self._reception.ready_at() - time.monotonic()
        return _TICK_MS if left >= _TICK_MS / 1000 else max(0, math.ceil(left * 1000))

    def _receive(self, router: zmq.Socket[Any]) -> bool:
        """Take what has arrived; true if there may be more."""
        watched = [(router, _IN)]
        for _ in range(_MESSAGES_PER_TURN):
            self._take(*receive_routed(router))
            if not zmq.zmq_poll(watched, 0):  # cheaper than the exception of a receive that finds nothing
                return False
        return True

    def _take(self, route: bytes, frames: Sequence[Buffer]) -> None:
        lane = self._lanes.get(route)
        now = time.monotonic()
        try:
            inner = frames if self._gate is None else self._gate.open(route, frames)
            if inner is None:
                assert self._gate is not None
                self._challenges.append((route, self._gate.challenge(route, frames)))
                return
            opened = inner if lane is None else lane.opened(inner)
        except FrameError as error:
            self._reception.violated(route, reason=str(error))
            return
        self._reception.receive(route, opened, now=now)
        while self._reception.lane_messages:
            route, header = self._reception.lane_messages.popleft()
            lane = self._lane(route)
            for answer in lane.handle(header):
                self._reception.outbox.append((route, answer))

    def _room(self, route: bytes, size: int) -> np.ndarray | None:
        """Asked by whatever thread computes."""
        lane = self._lanes.get(route)
        return lane.room(size) if lane is not None else None

    def _lane(self, route: bytes) -> Lane:
        lane = self._lanes.get(route)
        if lane is None:
            shared = self._reception.shares.get(route, False)
            lane = self._lanes[route] = Lane(shared=shared, on_read=lambda: self._read.append(route))
        return lane

    def _flush(self, router: zmq.Socket[Any]) -> None:
        reception = self._reception
        while self._challenges:
            route, frames = self._challenges.popleft()
            self._send(router, route, [frames])
        while reception.outbox:
            route, frames = reception.outbox.popleft()
            lane = self._lanes.get(route)
            if lane is None and len(frames) > 1 and reception.shares.get(route):
                lane = self._lane(route)
            self._send_sealed(router, route, (frames,) if lane is None else lane.outgoing(frames))
        while self._read:
            route = self._read.popleft()
            if route in self._lanes:
                self._send_sealed(router, route, self._lanes[route].releases())
        while reception.gone:  # after the last words to them
            self._forget(reception.gone.popleft())
        for route in tuple(self._full):
            self._full.discard(route)
            self._send(router, route, [pack(Header(kind=Kind.GOAWAY))])

    def _forget(self, route: bytes) -> None:
        """The connection is no client's any more, unless it greeted again."""
        if route in self._reception.shares:
            return
        if route in self._lanes:
            self._lanes.pop(route).close()
        if self._gate is not None:
            self._gate.forget(route)

    def _send_sealed(self, router: zmq.Socket[Any], route: bytes, messages: Sequence[Sequence[Buffer]]) -> None:
        if self._gate is not None:
            messages = [self._gate.close(route, message) for message in messages]
        self._send(router, route, messages)

    def _send(self, router: zmq.Socket[Any], route: bytes, messages: Sequence[Sequence[Buffer]]) -> None:
        try:
            for message in messages:
                send_frames(router, message, route=route)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EAGAIN:
                self._full.add(route)
            self._reception.unreachable(route, now=time.monotonic())
            if self._gate is not None:
                self._gate.forget(route)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                tickets = self._batches.get(timeout=_TICK_MS / 1000)
            except queue.Empty:
                continue
            if not tickets:  # woken by `stop`
                continue
            answers, seconds = self._timed(tickets)
            self._post(lambda done=(tickets, answers, seconds): self._finish(*done))
            del tickets, answers  # their tensors would lie in their senders' memory until the next batch

    def _computed_here(self, tickets: list[Ticket[ClientId]], *, now: float) -> tuple[list[Answer], float]:
        """By the I/O thread itself. If the batch takes long after all, nothing else is served meanwhile, as it would
        be on the other thread, but counters can be read.
        """
        self._computing_since = now
        self._table.release()
        try:
            return self._timed(tickets)
        finally:
            if not self._table.acquire(timeout=_SNAPSHOT_SECONDS):
                raise RuntimeError("whoever asked for counters did not let go of them")

    def _timed(self, tickets: list[Ticket[ClientId]]) -> tuple[list[Answer], float]:
        began = time.perf_counter()
        answers, weights = answer_batch(self._service, tickets=tickets)
        self._weights = weights or self._weights
        return answers, time.perf_counter() - began

    def _finish(self, tickets: list[Ticket[ClientId]], answers: list[Answer], seconds: float) -> None:
        self._busy = False
        self._computing_since = 0.0
        self._quick = self._quick + 1 if seconds < _QUICK_SECONDS else 0
        now = time.monotonic()
        for ticket, (frames, failed) in zip(tickets, answers, strict=True):
            self._reception.finish(ticket, frames, failed=failed, now=now)


def answer_batch(service: Service, *, tickets: list[Ticket[ClientId]]) -> tuple[list[Answer], str]:
    """Compute one batch and encode its answers; with the version of the weights that they name, if any.

    Never raises: whatever a service computes or raises, each ticket gets its frames. If a batch breaks, its calls are
    computed one by one, so that a call that breaks the service fails alone.
    """
    method = tickets[0].method
    try:
        replies = list(service.compute(method, [ticket.payload for ticket in tickets]))
        if len(replies) != len(tickets):
            raise RuntimeError(f"{method} gave {len(replies)} answers for {len(tickets)} calls")  # noqa: TRY301
    except GkrError as error:
        replies = [error] * len(tickets)
    except Exception as error:  # noqa: BLE001 - boundary: a bug of the service ends the call, not the replica
        _log.error("%s failed for %d calls", method, len(tickets), exc_info=error)
        if len(tickets) > 1:
            alone = [answer_batch(service, tickets=[ticket]) for ticket in tickets]
            return [answer for answers, _ in alone for answer in answers], max(weights for _, weights in alone)
        text = f"{method} failed: {type(error).__name__}: {error}"
        return [(pack_error(request=tickets[0].request, code="internal", message=text, hint=_BUG), True)], ""
    answers = [_encode_answer(reply, ticket) for ticket, reply in zip(tickets, replies, strict=True)]
    weights = [one.weights for one in replies if isinstance(one, Reply) and one.weights]
    return answers, weights[0] if weights else ""


def _encode_answer(answer: Reply | GkrError, ticket: Ticket[ClientId]) -> Answer:
    request = ticket.request
    if isinstance(answer, GkrError):
        return pack_error(request=request, code="refused", message=answer.message, hint=answer.hint), True
    try:
        specs, raw = encode_tensors({name: _alone(tensor) for name, tensor in answer.tensors.items()})
        return pack(Header(kind=Kind.REPLY, request=request, tensors=specs), encode_body(answer.body), raw=raw), False
    except Exception as error:  # noqa: BLE001 - boundary: what the service answered may be anything
        _log.error("the answer of %s cannot travel", ticket.method, exc_info=error)
        text = f"the answer of {ticket.method} cannot travel: {error}"
        return pack_error(request=request, code="internal", message=text, hint=_BUG), True


def _alone(tensor: np.ndarray) -> np.ndarray:
    """Not a view of a whole batch, which would live as long as any of its replies is kept. Small ones are copied
    anyway."""
    whole = tensor.base
    shares = isinstance(whole, np.ndarray) and whole.nbytes > tensor.nbytes >= INLINE_BYTES
    return tensor.copy() if shares else tensor
