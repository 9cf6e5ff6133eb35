"""The process that owns a run on this machine: `python -m gkr.local.supervisor RUN_DIR`.

Promises: every child is known by process id and dies with it; each death is answered by `gkr.local.fate`; the run's
last status event tells its fate and so does the exit code; then summary and report are written. One thread, one loop,
no wait longer than `_TICK_SECONDS`. Must not decide.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from gkr.local import fate
from gkr.local.children import Children, Gone
from gkr.local.commands import Commands, ProductCommands
from gkr.local.environment import child_environment
from gkr.local.files import write_atomically
from gkr.local.journal import Journal
from gkr.local.links import Links, is_link
from gkr.local.states import (
    SYNCER,
    Begin,
    Broken,
    CancelAsked,
    Effect,
    Emit,
    Endpoints,
    Exited,
    Finish,
    Heard,
    Input,
    Kill,
    Limits,
    Serving,
    StartDriver,
    StartSyncer,
    Terminate,
    Tick,
)
from gkr.runs import process_birth
from gkr.watch.tail import EventTail
from spec.events import AttemptStarted, Event, Note, RunStatus
from spec.plan import Plan
from spec.sync_keys import ENVIRONMENT

KEYS = "state/keys"
"""Folder of a run with the keys of its processes, while it runs: one folder for each learner, and SYNCER's."""
_TICK_SECONDS = 0.25
_FULL_BYTES = 64 * 1024
"""With less than this free (nearly all of it our own reserve), a process that failed did so for want of space."""


class Supervisor:
    """One run. `finish` makes summary and report once the fate is written."""

    def __init__(
        self,
        folder: Path,
        *,
        plan: Plan,
        commands: Commands,
        finish: Callable[[Path], object],
        limits: Limits | None = None,
    ) -> None:
        self._folder, self._plan = folder, plan
        self._keys = folder / KEYS
        self._commands = commands
        self._finish = finish
        self._children = Children(environment=child_environment(os.environ, plan_env=plan.env))
        self._links = Links(folder, plan=plan, children=self._children)
        self._tail = EventTail(folder)
        self._state = fate.initial(
            [learner.name for learner in plan.learners],
            with_syncer=plan.syncer is not None,
            batch=plan.train.batch if plan.train else 1,
            limits=limits or Limits(),
            attempts=_used_attempts(folder, self._tail.read()),
        )
        self._journal = Journal(folder)
        self._cancelled: bool | None = None
        self._terminated = False
        self._exit_code: int | None = None
        self._broken = False

    def run(self) -> int:
        """Until the run has ended; its exit code."""
        with _Wakeup(self._on_signal) as wakeup:
            _announce(self._folder)
            self._make_keys()
            self._hear(Begin(time.monotonic()))
            while self._exit_code is None:
                wakeup.wait(_TICK_SECONDS)
                for heard in self._listen():
                    self._hear(heard)
        self._links.close()
        shutil.rmtree(self._keys, ignore_errors=True)
        self._conclude()
        self._journal.close()
        return self._exit_code

    def _listen(self) -> list[Input]:
        now = time.monotonic()
        # Events before exits: what a process wrote last explains its end.
        ended = self._children.collect()
        gone = [one for one in ended if not is_link(one.name)]
        heard: list[Input] = [Heard(now, event) for event in self._tail.read()]
        endpoints = self._published_endpoints()
        if endpoints is not None:
            heard.append(Serving(now, endpoints))
        heard += [Exited(now, one.name, one.code, one.detected_seconds, self._last_words(one)) for one in gone]
        died = [self._links.restart(one) for one in ended if is_link(one.name)]
        heard += [Broken(now, reason) for reason in died if reason]
        hard = self._asked_to_cancel()
        if hard is not None and hard != self._cancelled:
            self._cancelled = hard
            heard.append(CancelAsked(now, hard=hard))
        return [*heard, Tick(now)]

    def _hear(self, heard: Input) -> None:
        self._state, effects = fate.step(self._state, heard)
        for effect in effects:
            try:
                self._do(effect)
            except OSError as error:
                self._break(f"the supervisor cannot go on: {error}")

    def _do(self, effect: Effect) -> None:
        match effect:
            case Emit(event):
                self._journal.append(event)
            case StartSyncer(attempt, endpoints):
                self._start(SYNCER, "syncer", attempt, self._commands.syncer(endpoints=endpoints))
            case StartDriver(learner, attempt, endpoints):
                reached = self._links.endpoints(learner, endpoints)
                command = self._commands.driver(learner, attempt=attempt, endpoints=reached)
                self._start(learner, "driver", attempt, command)
            case Terminate(name):
                self._children.signal(name, signal.SIGTERM)
            case Kill(name):
                self._children.kill(name)
            case Finish():
                self._end(effect)

    def _start(self, name: str, role: str, attempt: int, command: list[str]) -> None:
        log = self._folder / "logs" / name / f"{attempt}" / f"{role}-0.log"
        try:
            own = self._keys / name
            environment = {ENVIRONMENT: f"{own}"} if own.exists() else {}
            pid = self._children.start(name, command=command, log=log, environment=environment)
        except OSError as error:
            self._hear(Exited(time.monotonic(), name, 127, 0.0, f"could not be started: {error}"))
            return
        _log(f"{role} of {name}, attempt {attempt}: process {pid}")

    def _make_keys(self) -> None:
        """Anew for each supervisor: nothing of the one before lives, and what it left must be of no use."""
        from gkr.sync_keys import write_keys

        try:
            write_keys(self._keys, plan=self._plan)
        except OSError as error:
            self._break(f"the keys of the run cannot be written: {error}")

    def _end(self, effect: Finish) -> None:
        ending = effect.fate
        self._exit_code = ending.exit_code
        self._journal.append(
            RunStatus(
                time=0.0, source="supervisor", status=ending.status, reason=ending.reason, exit_code=ending.exit_code
            )
        )

    def _break(self, reason: str) -> None:
        _log(reason)
        if not self._broken:
            self._broken = True
            self._hear(Broken(time.monotonic(), reason))

    def _conclude(self) -> None:
        try:
            self._finish(self._folder)
        except Exception as error:  # noqa: BLE001 a summary or report that fails must not change the fate of the run
            traceback.print_exc()
            text = f"summary or report could not be made: {type(error).__name__}: {error}"
            try:
                self._journal.append(Note(time=0.0, source="supervisor", level="error", text=text))
            except OSError:
                return  # the disk is full; the traceback above is all we can leave

    def _last_words(self, gone: Gone) -> str:
        """What a child wrote last; on a full disk it could not write, and that is the reason then."""
        try:
            space = os.statvfs(self._folder)
        except OSError as error:
            return f"{error}"
        if gone.code != 0 and space.f_bavail * space.f_frsize < _FULL_BYTES:
            return f"No space left on device for {self._folder}"
        return gone.last_line

    def _published_endpoints(self) -> Endpoints | None:
        syncer = self._state.syncer
        if syncer is None or syncer.serve_deadline is None:
            return None
        try:
            fields = json.loads((self._folder / "state" / "syncer.json").read_text())
            if int(fields["pid"]) != self._children.pid(SYNCER):
                return None  # left by the one before
            return Endpoints(control=str(fields["control"]), bulk=str(fields["bulk"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _asked_to_cancel(self) -> bool | None:
        try:
            return bool(json.loads((self._folder / "state" / "cancel").read_text()).get("now"))
        except (OSError, ValueError, AttributeError):
            return False if self._terminated else self._cancelled

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._terminated = self._terminated or number == signal.SIGTERM


class _Wakeup:
    """Signals end the wait at once. A death is noticed when it happens, not at the next tick."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._former: dict[signal.Signals, Any] = {}
        self._receive, self._send = socket.socketpair()
        for end in (self._receive, self._send):
            end.setblocking(False)  # noqa: FBT003 the socket module's own signature
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._receive, selectors.EVENT_READ)

    def __enter__(self) -> _Wakeup:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._handler)
        for number in (signal.SIGINT, signal.SIGHUP):
            self._former[number] = signal.signal(number, signal.SIG_IGN)  # those are for the terminal that watches
        signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, former in self._former.items():
            signal.signal(number, former)
        self._selector.close()
        self._receive.close()
        self._send.close()

    def wait(self, seconds: float) -> None:
        """Until a signal or `seconds` have passed."""
        if self._selector.select(seconds):
            self._receive.recv(4096)


def _announce(folder: Path) -> None:
    fields = {"pid": os.getpid(), "birth": process_birth(os.getpid()), "started": time.time()}
    write_atomically(folder / "state" / "supervisor.json", json.dumps(fields))


def _used_attempts(folder: Path, events: list[Event]) -> dict[str, int]:
    """Attempt numbers that a former supervisor of this run has used, by its events and its log folders."""
    used: dict[str, int] = {}
    for event in events:
        if isinstance(event, AttemptStarted):
            used[event.learner] = max(used.get(event.learner, 0), event.attempt)
    for log in [*folder.glob("logs/*/*/driver-0.log"), *folder.glob("logs/*/*/syncer-0.log")]:
        attempt, name = log.parent.name, log.parent.parent.name
        if attempt.isdecimal():
            used[name] = max(used.get(name, 0), int(attempt))
    return used


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201 stdout is the supervisor's log file


def main(arguments: list[str] | None = None) -> int:
    """The process's entry."""
    (given,) = sys.argv[1:] if arguments is None else arguments
    folder = Path(given).resolve()
    plan = Plan.read_json((folder / "plan.json").read_bytes())
    from gkr.conclusion import conclude

    limits = Limits(grace_seconds=plan.timeouts.grace, run_seconds=plan.timeouts.run, restarts=plan.retry.max)
    return Supervisor(folder, plan=plan, commands=ProductCommands(folder), finish=conclude, limits=limits).run()


if __name__ == "__main__":
    sys.exit(main())
