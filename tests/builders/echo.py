"""A service for tests: echoes, fails, refuses, or blocks until a test lets it go on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from services.server import Server
from services.service import Call, Method, Reply, Service, ServiceContext
from spec.errors import ConfigError, DataError, GkrError


class EchoArgs(Struct, frozen=True, kw_only=True):
    text: str
    cost: int = 1
    key: str = ""


class EchoReply(Struct, frozen=True, kw_only=True):
    text: str
    batch: int


def context(tmp_path: Path, *, max_batch: int = 8, name: str = "echo") -> ServiceContext:
    return ServiceContext(kind="encode", name=name, cache_dir=tmp_path, manifest="", max_batch=max_batch)


def _cost(args: EchoArgs) -> int:
    return args.cost


def _key(args: EchoArgs) -> str:
    return args.key


class Echo(Service):
    methods: ClassVar[tuple[Method, ...]] = (Method("echo", EchoArgs, EchoReply, batch_key=_key, cost=_cost),)

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.batches: list[list[str]] = []

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        self.batches.append([call.args.text for call in calls])
        return [self._answer(call, size=len(calls)) for call in calls]

    def _answer(self, call: Call, *, size: int) -> Reply | GkrError:
        if call.args.text == "refuse":
            return DataError("the text is 'refuse'", hint="send another text")
        if call.args.text == "break":
            raise ZeroDivisionError("a bug")
        return Reply(EchoReply(text=call.args.text, batch=size), dict(call.tensors))


class Gated(Echo):
    """Each batch says that it began and waits for one permit; so tests decide what arrives while it is computed."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.began = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        self.began.release()
        assert self.permits.acquire(timeout=20), "no permit came"
        return super().compute(method, calls)


class Hanging(Echo):
    """Computes for ever when told to."""

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        if any(call.args.text == "hang" for call in calls):
            threading.Event().wait(3600)
        return super().compute(method, calls)


class Dying(Echo):
    """Never becomes ready: a bug."""

    def warm_up(self) -> None:
        raise RuntimeError("cannot load")


class Misconfigured(Echo):
    """Never becomes ready: what a person wrote."""

    def warm_up(self) -> None:
        raise ConfigError("the weights are not there", hint="put them there")


def main() -> None:
    """A replica as a process of its own: says its endpoint, serves until its standard input ends."""
    context = ServiceContext(kind="encode", name="echo", cache_dir=Path(), manifest="", max_batch=4)
    with Server(Echo(context), queue_depth=8, incarnation=int(sys.argv[1])) as server:
        print(server.endpoint, flush=True)  # noqa: T201 - how the test learns it
        sys.stdin.read()


if __name__ == "__main__":
    main()
