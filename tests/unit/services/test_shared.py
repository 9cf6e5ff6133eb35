"""Clients of the platform's services: sealed with the platform's token, called by the platform's name."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from services.client import ServiceClient
from services.directory import write_directory
from services.server import Server
from services.wire.seal import run_secret
from spec.errors import UnreachableError
from spec.services import Directory, Replica
from spec.sync_keys import ENVIRONMENT, SHARED_ENVIRONMENT, TOKEN, SyncKeys
from tests.builders.echo import Echo, EchoArgs, EchoReply, context

SECONDS = 20.0


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The keys of this process's run and of its platform."""
    for variable, letter in ((ENVIRONMENT, "r"), (SHARED_ENVIRONMENT, "p")):
        folder = tmp_path / letter
        folder.mkdir()
        (folder / TOKEN).write_text(letter * 64)
        monkeypatch.setenv(variable, f"{folder}")
    return tmp_path


def secret(variable: str) -> bytes:
    return run_secret(SyncKeys.read(variable=variable))


def ask(path: Path, service: str, *, seconds: float = SECONDS) -> str:
    with closing(ServiceClient(path, service=service, identity="r/east/rank-0")) as client:
        return client.call("echo", EchoArgs(text=service), reply=EchoReply, deadline_seconds=seconds).body.text


def test_a_run_asks_its_own_replicas_and_the_platforms_each_with_its_token(tokens: Path) -> None:
    with (
        Server(Echo(context(tokens)), queue_depth=4, secret=secret(ENVIRONMENT)) as own,
        Server(Echo(context(tokens, name="captions")), queue_depth=4, secret=secret(SHARED_ENVIRONMENT)) as platforms,
    ):
        mine = Replica(service="echo", kind="encode", index=0, endpoint=own.endpoint, incarnation=1, sealed=True)
        theirs = Replica(
            service="texts", kind="encode", index=0, endpoint=platforms.endpoint, incarnation=0, sealed=True,
            shared=True, answers_to="captions",
        )  # fmt: skip
        path = tokens / "services.json"
        write_directory(path, directory=Directory(epoch=1, replicas=[mine, theirs]))
        assert (ask(path, "echo"), ask(path, "texts")) == ("echo", "texts")


def test_a_client_counts_what_it_asked(tokens: Path) -> None:
    with Server(Echo(context(tokens)), queue_depth=4) as server:
        one = Replica(service="echo", kind="encode", index=0, endpoint=server.endpoint, incarnation=0, shared=True)
        path = tokens / "services.json"
        write_directory(path, directory=Directory(epoch=1, replicas=[one]))
        with closing(ServiceClient(path, service="echo", identity="r/east/rank-0", counted=True)) as client:
            for text in ("a", "b", "refuse"):
                future = client.submit("echo", EchoArgs(text=text), reply=EchoReply, deadline_seconds=SECONDS)
                assert (future.exception(SECONDS) is None) == (text != "refuse")
            found = client.asked.counts()
        assert (found["requests"], found["errors"]) == (2, 1)
        assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_the_platforms_replicas_do_not_hear_who_has_only_a_runs_token(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(Echo(context(tokens)), queue_depth=4, secret=secret(SHARED_ENVIRONMENT)) as platforms:
        monkeypatch.setenv(SHARED_ENVIRONMENT, f"{tokens / 'r'}")
        theirs = Replica(
            service="echo", kind="encode", index=0, endpoint=platforms.endpoint, incarnation=0, sealed=True, shared=True
        )
        write_directory(tokens / "services.json", directory=Directory(epoch=1, replicas=[theirs]))
        with pytest.raises(UnreachableError):
            ask(tokens / "services.json", "echo", seconds=1.0)
        assert platforms.stats(timeout_seconds=SECONDS).requests == 0
