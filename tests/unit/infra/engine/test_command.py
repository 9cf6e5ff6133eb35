"""The engine's process: it is interrupted once, and nothing that it started outlives it.

`ENGINE` is a double: a script in the binary's place that starts a plugin in a process group of its own, as the engine
does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.engine import command
from infra.engine.command import Engine, session_members
from spec.errors import UnreachableError

ENGINE = """\
#!{python}
import os, signal, subprocess, sys, time
if sys.argv[1] != "up":
    sys.exit(0)
folder = sys.argv[2]
def interrupted(*_):
    with open(folder + "/interrupts", "a") as file:
        file.write("x")
    if sys.argv[3] == "obeys":
        plugin.kill()
        sys.exit(1)
signal.signal(signal.SIGINT, interrupted)
plugin = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with open(folder + "/plugin", "w") as file:
    file.write(str(plugin.pid))
os.rename(folder + "/plugin", folder + "/pid")
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    binary = tmp_path / "bin" / "pulumi"
    binary.parent.mkdir()
    binary.write_text(ENGINE.format(python=sys.executable))
    binary.chmod(0o755)
    return tmp_path


class Session:
    """The engine's session, found through its plugin; `then` is called as soon as that runs."""

    def __init__(self, folder: Path, *, then: Callable[[], None] = lambda: None) -> None:
        self._there, self._then, self._leader = folder / "pid", then, 0
        self._thread = threading.Thread(target=self._find, daemon=True)
        self._thread.start()

    def _find(self) -> None:
        wait_until(self._there.is_file)
        self._leader = os.getsid(int(self._there.read_text()))
        assert len(session_members(self._leader)) == 2
        self._then()

    def is_gone(self) -> bool:
        self._thread.join(timeout=60)
        assert self._leader
        return wait_until(lambda: not session_members(self._leader))


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return holds()


def test_an_engine_that_obeys_is_interrupted_once_and_its_plugin_is_gone(folder: Path) -> None:
    session = Session(folder, then=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Engine(folder, seconds=60).run(["up", f"{folder}", "obeys"], f"{folder}", {})
    assert session.is_gone()
    assert (folder / "interrupts").read_text() == "x"


def test_an_engine_that_does_not_react_is_killed_with_its_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(command, "ABORT_SECONDS", 0.3)
    session = Session(folder)
    with pytest.raises(UnreachableError, match="run it again") as late:
        Engine(folder, seconds=3).run(["up", f"{folder}", "ignores"], f"{folder}", {})
    assert "not done after 3 s" in late.value.message
    assert session.is_gone()
    assert (folder / "interrupts").read_text() == "xx"


def test_an_interrupt_while_the_engine_is_started_reaches_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is there, and whoever makes it has not been told yet."""
    started: list[int] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    engine = Engine(folder, seconds=60)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run(["up", f"{folder}", "obeys"], f"{folder}", {})
    [leader] = started
    assert wait_until(lambda: not session_members(leader))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
