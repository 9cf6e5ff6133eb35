"""The I/O of a client: carries requests to replicas and completes their futures.

Sockets and dispatcher belong to whoever holds `_turning`. That is a thread of our own, which takes a turn when
something arrives; but whoever submits a request sends it itself, and whoever waits for a reply takes turns itself until
it is there ("leads"), because to wake another thread for each way costs more than everything else together. Other
threads only append to an inbox. Our thread watches file descriptors without touching sockets, and keeps out of the way
while somebody leads.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq
from msgspec import Struct

from services.directory import DirectoryWatch
from services.dispatch import Dispatcher, Pending
from services.link import Link, LinkLost, is_local
from services.service import Reply
from services.waker import Waker
from services.wire.frames import (
    FEATURE_ARENA,
    Buffer,
    ErrorBody,
    FrameError,
    Header,
    Kind,
    Message,
    Priority,
    TensorSpec,
    decode_body,
    pack,
    request_bytes,
)
from services.wire.sockets import high_water_mark
from spec.errors import GkrError, RefusedError, UnreachableError
from spec.services import Replica

_TICK_SECONDS = 0.2
"""How often the directory file is looked at when nothing else happens."""
_RETRY_SECONDS = (0.02, 1.0)
"""First and longest pause before a replica is tried again; doubled each time, with jitter."""
_MAX_ATTEMPTS = 8
"""A request that was lost with so many replicas is more likely their killer than their victim."""
_HWM = high_water_mark(1024)
"""The largest grant that a file may ask for."""
_IN = int(zmq.POLLIN)
_PARK_SECONDS = 0.005
"""How long our thread leaves the sockets to somebody who led just now and is likely to lead again."""

_EndT = TypeVar("_EndT")
LinkKey = tuple[int, int]
"""Index and incarnation of a replica."""


class Parcel(Struct, frozen=True, kw_only=True):
    """One request as it travels, and the future that waits for it."""

    number: int
    method: str
    reply: type[Struct]
    body: bytes
    specs: tuple[TensorSpec, ...]
    raw: Sequence[Buffer]
    deadline_seconds: float
    expires: float
    future: Future[Reply]
    priority: Priority = Priority.BLOCKING


class Awaited(Future[Reply]):
    """A future whose waiter does the client's I/O until it is complete."""

    def __init__(self, courier: Courier, number: int) -> None:
        super().__init__()
        self._courier, self._number = courier, number
        self._cancels = itertools.count()

    def result(self, timeout: float | None = None) -> Reply:
        """The reply, or what ended the request."""
        return self._awaited(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What ended the request, if not a reply."""
        return self._awaited(super().exception, timeout)

    def cancel(self) -> bool:
        """Nobody waits for it any more; the replica is told, too."""
        cancelled = super().cancel()
        if cancelled and next(self._cancels) == 0:
            self.set_running_or_notify_cancel()  # else `concurrent.futures.wait` goes on waiting for it
            self._courier.give_up(self._number)
        return cancelled

    def _awaited(self, get: Callable[[float | None], _EndT], timeout: float | None) -> _EndT:
        courier, number = self._courier, self._number
        until = None if timeout is None else time.monotonic() + timeout
        if courier.carries(number):
            courier.lead(number, until=until)
            if courier.carries(number):
                with courier.follow():
                    return get(None if until is None else max(0.0, until - time.monotonic()))
        return get(None if until is None else max(0.0, until - time.monotonic()))


@dataclass
class _Retry:
    failures: int = 0
    at: float = 0.0


class Courier:
    """One client's thread."""

    def __init__(
        self, directory_path: Path, *, service: str, identity: str, secret: bytes, shared: bytes = b""
    ) -> None:
        """`secret`: of the run's own replicas, if they are sealed; `shared`: of the platform's."""
        self._service = service
        self._secret, self._shared_secret = secret, shared
        self._identity = identity
        self._incarnation = time.time_ns() // 1000
        self._greetings = 0
        self._directory = DirectoryWatch(directory_path)
        self._dispatcher: Dispatcher[LinkKey] = Dispatcher(max_attempts=_MAX_ATTEMPTS)
        self._links: dict[LinkKey, Link] = {}
        self._retries: dict[LinkKey, _Retry] = {}
        self._trouble = ""
        """The last thing that went wrong with a connection, for the message of a request that expires."""
        self._looked_at = 0.0
        self._inbox: deque[Parcel | int] = deque()
        """Requests to carry, and numbers of those that nobody waits for any more."""
        self._open: dict[int, Parcel] = {}
        """Those whose future is not complete."""
        self._lock = threading.Lock()
        self._waker = Waker()
        self._closing = threading.Event()
        self._turning = threading.Lock()
        self._leading = threading.Lock()
        self._resume = threading.Condition()
        self._followers = 0
        self._led_at = 0.0
        self._watching = False
        self._watched = -1
        """`_changes` when our thread last looked which descriptors there are."""
        self._changes = 0
        """Grows with each connection made or lost."""
        self._watched_until = 0.0
        self._listed: Sequence[tuple[LinkKey, Link]] = ()
        self._polled: Sequence[tuple[Any, int]] = [(self._waker.fd, _IN)]
        """Links and what to poll of them, as of the last change."""
        self._turner = 0
        """The thread that has the turn."""
        self._expiry_at = math.inf
        """No request expires before."""
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name=f"service-client-{service}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests whose future is not complete."""
        return len(self._open)

    def carries(self, number: int) -> bool:
        """Whether the future of a request is not about to be complete."""
        return number in self._open

    def take(self, parcel: Parcel) -> None:
        """Carry this request."""
        with self._lock:
            closed = self._closing.is_set()
            if not closed:
                self._open[parcel.number] = parcel
                self._inbox.append(parcel)
        if closed:
            self._fail(parcel, UnreachableError(f"the client of {self._service} is closed"))
        else:
            self._post()

    def give_up(self, number: int) -> None:
        """A future was cancelled."""
        with self._lock:
            if self._open.pop(number, None) is None or self._closing.is_set():
                return
            self._inbox.append(number)
        self._post()

    def lead(self, number: int, *, until: float | None) -> None:
        """Take turns in the caller's thread until a request is answered, unless somebody else does so already.

        Raises RuntimeError in a callback of a future, which runs within a turn and so would wait for itself.
        """
        if self._turner == threading.get_ident():
            raise RuntimeError("a callback must not wait for another reply; let a thread of its own do so")
        if not self._leading.acquire(blocking=False):
            return
        try:
            if self._watching:
                self._waker.notify()
            if not self._turning.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
                return
            self._turner = threading.get_ident()
            try:
                while number in self._open and not self._closing.is_set():
                    now = time.monotonic()
                    if until is not None and now >= until:
                        break
                    wake_at = self._wake_at(now)
                    wait = (wake_at if until is None else min(wake_at, until)) - now
                    self._turn(self._ready(wait_ms=max(0, math.ceil(wait * 1000))), awaited=number)
            finally:
                self._turner = 0
                self._turning.release()
        finally:
            self._led_at = time.monotonic()
            self._leading.release()
            # Our thread may be about to wait for what we have taken, the notice above included.
            if self._watching:
                self._waker.notify()
            if self._followers:
                with self._resume:
                    self._resume.notify_all()

    @contextlib.contextmanager
    def follow(self) -> Generator[None]:
        """Wait for a future while somebody else takes the turns: our thread goes on as soon as that one leaves."""
        with self._resume:
            self._followers += 1
            self._resume.notify_all()
        try:
            yield
        finally:
            with self._resume:
                self._followers -= 1

    def close(self, *, deadline_seconds: float) -> None:
        """End the thread."""
        self._begin_closing()
        self._waker.notify()
        with self._resume:
            self._resume.notify_all()
        self._thread.join(deadline_seconds)
        if not self._thread.is_alive():
            self._waker.close()

    def _begin_closing(self) -> None:
        """From here on nothing enters the inbox, so the thread's last look at it misses nothing."""
        with self._lock:
            self._closing.set()

    def _post(self) -> None:
        """Something is in the inbox: deal with it here if the sockets are free, else leave it to who has them."""
        if not self._turning.acquire(blocking=False):
            self._waker.notify()
            return
        overdue = False
        self._turner = threading.get_ident()
        try:
            if self._closing.is_set():
                return
            if not self._listed:
                self._connect(time.monotonic())
            self._drain_inbox()
            self._send_waiting()
            # A send may take the signal of what arrived meanwhile, so what our thread watches would not wake it.
            overdue = self._watching and (
                self._changes != self._watched or self._expiry_at < self._watched_until or bool(self._ready(wait_ms=0))
            )
        finally:
            self._turner = 0
            self._turning.release()
        if overdue:
            self._waker.notify()

    def _submit(self, parcel: Parcel) -> None:
        self._expiry_at = min(self._expiry_at, parcel.expires)
        size = request_bytes(parcel.body, specs=parcel.specs)
        self._dispatcher.submit(Pending(parcel.number, parcel.expires, parcel, priority=parcel.priority, size=size))

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                with self._turning:
                    self._turner = threading.get_ident()
                    try:
                        self._turn(self._ready(wait_ms=0))
                        while (ready := self._ready(wait_ms=0)) and not self._closing.is_set():
                            self._turn(ready)
                    finally:
                        self._turner = 0
                self._park()
                self._watch()
        finally:
            self._begin_closing()
            with self._turning:
                self._turner = threading.get_ident()
                self._drain_inbox()
                for pending in self._dispatcher.drain():
                    self._fail(pending.payload, UnreachableError(f"the client of {self._service} was closed"))
                for link in self._links.values():
                    link.close(farewell=True)
                self._context.destroy()

    def _park(self) -> None:
        """Stay away while somebody leads, or led just now."""
        with self._resume:
            while not self._closing.is_set() and (
                self._leading.locked() or (not self._followers and time.monotonic() - self._led_at < _PARK_SECONDS)
            ):
                self._resume.wait(_PARK_SECONDS)

    def _watch(self) -> None:
        """Wait until something may have happened, without touching a socket: others may use them meanwhile."""
        with self._turning:
            # Descriptors of sockets that are closed later are no harm: whoever closes them wakes us or lets us look.
            watched = [link.socket.getsockopt(zmq.FD) for link in self._links.values()]
            watched += [link.monitor.getsockopt(zmq.FD) for link in self._links.values()]
            if self._inbox or self._ready(wait_ms=0):
                return
            self._watched_until = self._wake_at(time.monotonic())
            self._watched = self._changes
            self._watching = True  # from here on whoever takes something away, or adds to it, wakes us
        poll = select.poll()
        for descriptor in (self._waker.fd, *watched):
            poll.register(descriptor, select.POLLIN)
        if not self._leading.locked():
            poll.poll(max(0, math.ceil((self._watched_until - time.monotonic()) * 1000)))
        self._watching = False

    def _ready(self, *, wait_ms: int) -> Collection[Any]:
        """The sockets on which something has arrived, and the descriptor of the waker."""
        return [source for source, _ in zmq.zmq_poll(self._polled, wait_ms)]

    def _turn(self, ready: Collection[Any], *, awaited: int | None = None) -> None:
        """Once around; what arrives after the answer that is awaited is left for the next turn."""
        now = time.monotonic()
        self._connect(now)
        if self._waker.fd in ready:
            self._waker.drain()
        self._drain_inbox()
        for key, link in self._listed:
            try:
                watch = link.monitor in ready or not link.welcomed
                # Answers first: what arrived before the connection broke need not be asked again.
                if watch or link.socket in ready:
                    self._hear(key, link, awaited=None if watch else awaited)
                if watch:
                    link.watch()
            except LinkLost as lost:
                self._lose(key, str(lost))
        if now >= self._expiry_at:
            self._tell_cancelled(self._expire(now))
            self._expiry_at = self._dispatcher.next_expiry() or math.inf
        self._send_waiting()
        for key, link in self._listed:
            try:
                link.release_read()
            except LinkLost as lost:
                self._lose(key, str(lost))

    def _hear(self, key: LinkKey, link: Link, *, awaited: int | None) -> None:
        for message in link.receive():
            self._message(key, link, message)
            if awaited is not None and awaited not in self._open:
                return

    def _drain_inbox(self) -> None:
        while self._inbox:
            one = self._inbox.popleft()
            if isinstance(one, Parcel):
                self._submit(one)
            else:
                self._tell_cancelled(self._dispatcher.cancel(one))

    def _wake_at(self, now: float) -> float:
        """When a turn is due whatever arrives."""
        if len(self._links) == len(self._retries):
            return min(now + _TICK_SECONDS, self._expiry_at)
        retries = (retry.at for retry in self._retries.values() if retry.at > now)
        return min(now + _TICK_SECONDS, self._expiry_at, *retries)

    def _connect(self, now: float) -> None:
        """Follow the directory: leave replicas that are no longer in it, connect to those that are."""
        if now - self._looked_at < _TICK_SECONDS and len(self._links) == len(self._retries) > 0:
            return
        if now - self._looked_at >= _TICK_SECONDS or len(self._links) < len(self._retries):
            self._looked_at = now
            self._directory.refresh()
        wanted = {(replica.index, replica.incarnation): replica for replica in self._replicas()}
        for key in self._links.keys() - wanted.keys():
            self._lose(key, f"{self._links[key].replica.endpoint} left the directory")
        self._retries = {key: self._retries.get(key) or _Retry() for key in wanted}
        for key, replica in wanted.items():
            if key not in self._links and self._retries[key].at <= now:
                known = self._shared_secret if replica.shared else self._secret
                secret = known if replica.sealed else b""
                hello = self._hello(replica)
                try:
                    self._links[key] = Link(replica, context=self._context, hello=hello, hwm=_HWM, secret=secret)
                except zmq.ZMQError as error:  # this process has no descriptor left, for the moment
                    self._put_off(key, f"{replica.endpoint}: {error}")
                else:
                    self._list()

    def _list(self) -> None:
        self._changes += 1
        self._listed = tuple(self._links.items())
        sources = (source for link in self._links.values() for source in (link.socket, link.monitor))
        self._polled = [(self._waker.fd, _IN), *((source, _IN) for source in sources)]

    def _replicas(self) -> list[Replica]:
        directory = self._directory.current
        return [one for one in directory.replicas if one.service == self._service] if directory else []

    def _hello(self, replica: Replica) -> Header:
        self._greetings += 1
        return Header(
            kind=Kind.HELLO,
            attempt=self._greetings,
            identity=self._identity,
            incarnation=self._incarnation,
            service=replica.answers_to or self._service,
            expected=replica.incarnation,
            features=FEATURE_ARENA if is_local(replica.endpoint) else 0,
        )

    def _lose(self, key: LinkKey, reason: str) -> None:
        self._links.pop(key).close()
        self._list()
        self._put_off(key, reason)
        for pending in self._dispatcher.lost(key):
            parcel: Parcel = pending.payload
            text = f"{parcel.method} of {self._service} was lost with its replica {pending.attempt} times: {reason}"
            self._fail(parcel, UnreachableError(text, hint="the request may be what ends them; see their logs"))

    def _put_off(self, key: LinkKey, reason: str) -> None:
        self._trouble = reason
        retry = self._retries.setdefault(key, _Retry())
        pause = min(_RETRY_SECONDS[1], _RETRY_SECONDS[0] * 2**retry.failures) * random.uniform(0.5, 1.5)
        retry.failures = min(retry.failures + 1, 16)
        retry.at = time.monotonic() + pause

    def _message(self, key: LinkKey, link: Link, message: Message) -> None:
        header = message.header
        match header.kind:
            case Kind.REPLY | Kind.ERROR if header.request:
                error = None if header.kind is Kind.REPLY else decode_or_lose(message)
                broke = error is not None and error.code == "internal"
                pending = self._dispatcher.answered(key, header.request, broke=broke, now=time.monotonic())
                if pending is not None:
                    self._complete(pending.payload, message, error=error, endpoint=link.replica.endpoint)
            case Kind.WELCOME:
                link.welcomed = True
                self._retries[key] = _Retry()
                self._dispatcher.open(key, grant=header.credit, grant_bytes=header.credit_bytes)
            case Kind.CREDIT:
                self._dispatcher.open(key, grant=header.credit, grant_bytes=header.credit_bytes)
            case Kind.ERROR:
                error = decode_or_lose(message)
                # Of one that welcomed us a complaint about a message concerns this connection, not all that we send.
                if error.code == "superseded" or (error.code == "protocol" and not link.welcomed):
                    self._refuse_all(error)
                raise LinkLost(f"{link.replica.endpoint} refused us: {error.message}")
            case Kind.GOAWAY:
                raise LinkLost(f"{link.replica.endpoint} sent us away")
            case other:
                raise LinkLost(f"{link.replica.endpoint} sent {other.name}, which only clients send")

    def _complete(self, parcel: Parcel, message: Message, *, error: ErrorBody | None, endpoint: str) -> None:
        if error is None:
            try:
                body = decode_body(message.body, as_type=parcel.reply)
            except FrameError as unreadable:
                error = ErrorBody(code="internal", message=f"answered something else: {unreadable}")
            else:
                self._open.pop(parcel.number, None)
                with contextlib.suppress(InvalidStateError):  # cancelled at this moment
                    parcel.future.set_result(Reply(body, message.tensors))
                return
        where = f"{self._service} at {endpoint}"
        if error.code == "expired":
            self._fail(parcel, UnreachableError(self._late(parcel), hint=error.message, where=where))
        else:
            self._fail(parcel, RefusedError(error.message, hint=error.hint, where=where))

    def _expire(self, now: float) -> list[tuple[Pending, LinkKey | None]]:
        late = self._dispatcher.expire(now)
        for pending, key in late:
            link = self._links.get(key) if key is not None else None
            place = f"; it is at {link.replica.endpoint}" if link else f"; last trouble: {self._trouble or 'none'}"
            where = self._directory.path
            hint = "" if self._replicas() else f"no replica of it is in {where}; see logs of its replicas"
            self._fail(pending.payload, UnreachableError(self._late(pending.payload) + place, hint=hint))
        return late

    def _late(self, parcel: Parcel) -> str:
        return f"service {self._service} did not answer {parcel.method} within {parcel.deadline_seconds:g} s"

    def _refuse_all(self, error: ErrorBody) -> None:
        """No replica will ever take what this client sends, so nobody should wait for it."""
        for pending in self._dispatcher.drain():
            self._fail(pending.payload, RefusedError(error.message, hint=error.hint, where=self._service))

    def _tell_cancelled(self, ended: list[tuple[Pending, LinkKey | None]]) -> None:
        for pending, key in ended:
            link = self._links.get(key) if key is not None else None
            if link is not None:
                # If the link is gone its monitor says so next, and the replica forgets the request by itself.
                with contextlib.suppress(LinkLost):
                    link.send(pack(Header(kind=Kind.CANCEL, request=pending.request)))

    def _send_waiting(self) -> None:
        if not self._dispatcher.waits:
            return
        now = time.monotonic()
        lost: dict[LinkKey, str] = {}
        for key, pending in self._dispatcher.assign(now):
            parcel: Parcel = pending.payload
            header = Header(
                kind=Kind.REQUEST,
                request=parcel.number,
                attempt=pending.attempt - 1,
                method=parcel.method,
                deadline_ms=max(1, int((parcel.expires - now) * 1000)),
                tensors=parcel.specs,
                priority=parcel.priority,
            )
            try:
                self._links[key].send(pack(header, parcel.body, raw=parcel.raw))
            except LinkLost as error:
                lost[key] = str(error)
        # A request that could not be sent is in flight on its link all the same: losing the link takes it back.
        for key, reason in lost.items():
            self._lose(key, reason)

    def _fail(self, parcel: Any, error: GkrError) -> None:
        self._open.pop(parcel.number, None)
        with contextlib.suppress(InvalidStateError):  # cancelled at this moment
            parcel.future.set_exception(error)


def decode_or_lose(message: Message) -> ErrorBody:
    """The body of an ERROR. Raises LinkLost if it is not one."""
    try:
        return decode_body(message.body, as_type=ErrorBody)
    except FrameError as error:
        raise LinkLost(str(error)) from error
