"""One node's side of a learner, without Ray: preflight, spawn, watch and fence its ranks.

`training.agent` hosts this in a Ray actor; tests use it directly. Everything is asked by polling: no threads, no
callbacks, and the only waits are the ones with a deadline in `fence` and in the start of the zygote.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spec.errors import GkrError
from training.context import RuntimeContext
from training.files import replace_text
from training.progress import Page, read_page

ZYGOTE_DEADLINE_SECONDS = 120.0
FENCE_DEADLINE_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A rank that ended."""

    job: str
    pid: int
    code: int
    monotonic: float
    """When the zygote saw it, on this machine's monotonic clock."""
    reason: dict[str, Any] | None
    """What the rank wrote about its own error, if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a node knows right now."""

    epoch: int
    monotonic: float
    running: dict[str, int]
    """Job to process id."""
    exits: list[Exit]
    """Since the start of this epoch."""
    pages: dict[int, Page]
    """Rank to progress page, of this epoch only."""
    events: list[str]
    """New event lines of this node's ranks."""


@dataclass(slots=True)
class Node:
    """The ranks of one learner on one machine."""

    folder: Path
    epoch: int = 0
    _zygote: subprocess.Popen[bytes] | None = None
    _buffer: bytes = b""
    _running: dict[str, int] = field(default_factory=dict[str, int])
    _exits: list[Exit] = field(default_factory=list[Exit])
    _first_epoch: int | None = None
    """Of the first spawn here. Files of older epochs were another agent's, which handed their lines on."""
    _offsets: dict[Path, int] = field(default_factory=dict[Path, int])

    def warm(self) -> None:
        """Start the zygote, without waiting for its imports."""
        if self._zygote is not None and self._zygote.poll() is None:
            return
        self._drop_zygote()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "zygote.log").open("ab") as log:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "training.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._buffer = b""

    def spawn(self, jobs: dict[str, tuple[str, dict[str, str], str]], *, epoch: int) -> dict[str, int]:
        """Fork processes for a new epoch: job to (call, environment, log path). Refuses an epoch that is not newer;
        kills what is left."""
        if epoch <= self.epoch:
            raise GkrError(
                f"epoch {epoch} is not newer than {self.epoch}",
                hint="an older driver is still commanding this node; end it",
            )
        self.fence(epoch)
        self._first_epoch = self._first_epoch or epoch
        self.warm()
        for job, (call, environment, log) in jobs.items():
            (self.folder / f"reason-{job}.json").unlink(missing_ok=True)
            self._tell({"do": "spawn", "job": job, "call": call, "env": environment, "log": log})
        self._wait(
            lambda: all(job in self._running or self._exited(job) for job in jobs),
            deadline_seconds=ZYGOTE_DEADLINE_SECONDS,
            what="spawn",
        )
        return dict(self._running)

    def fence(self, epoch: int) -> None:
        """Kill everything older than `epoch` and wait until it is gone; from now on only `epoch` may run."""
        if self._running and self._zygote is not None and self._zygote.poll() is None:
            self._tell({"do": "kill"})
            self._wait(lambda: not self._running, deadline_seconds=FENCE_DEADLINE_SECONDS, what="fence")
        self._pump(0)
        self._running = {}  # without a zygote there are no ranks: the kernel ended them with it
        self.epoch = max(self.epoch, epoch)
        self._exits = []

    def poll(self) -> Snapshot:
        """Read what happened; never waits."""
        self._pump(0)
        if self._zygote is not None and self._zygote.poll() is not None and self._running:
            # Its ranks died with it by the kernel's signal, and there is nobody left who could reap them.
            gone = self._zygote.returncode
            self._exits += [
                Exit(job=job, pid=pid, code=gone, monotonic=time.monotonic(), reason=None)
                for job, pid in self._running.items()
            ]
            self._running = {}
        pages: dict[int, Page] = {}
        for path in self.folder.glob("progress-*.page"):
            page = read_page(path)
            if page is not None and page.epoch == self.epoch:
                pages[int(path.stem.removeprefix("progress-"))] = page
        return Snapshot(
            epoch=self.epoch,
            monotonic=time.monotonic(),
            running=dict(self._running),
            exits=list(self._exits),
            pages=pages,
            events=self._new_events(),
        )

    def run_once(
        self, job: str, *, call: str, environment: dict[str, str], log: Path, deadline_seconds: float
    ) -> int | None:
        """Fork one helper process and wait for its exit code; none if the deadline passed (it is killed then)."""
        self.warm()
        self._tell({"do": "spawn", "job": job, "call": call, "env": environment, "log": str(log)})
        try:
            self._wait(lambda: self._exited(job), deadline_seconds=deadline_seconds, what=job)
        except TimeoutError:
            self._tell({"do": "kill"})
            self._wait(lambda: not self._running, deadline_seconds=FENCE_DEADLINE_SECONDS, what="kill")
            self._exits = [one for one in self._exits if one.job != job]
            return None
        code = next(one.code for one in self._exits if one.job == job)
        self._exits = [one for one in self._exits if one.job != job]
        return code

    def set_directory(self, text: str) -> None:
        """Hand the services' addresses to the ranks of this node."""
        replace_text(self.directory_path, text)

    @property
    def directory_path(self) -> Path:
        return self.folder / "services.json"

    def close(self) -> None:
        """Kill the ranks and end the zygote."""
        self.fence(self.epoch)
        self._drop_zygote()

    @property
    def zygote_pid(self) -> int:
        return self._zygote.pid if self._zygote is not None else 0

    def _exited(self, job: str) -> bool:
        return any(one.job == job for one in self._exits)

    def _tell(self, command: dict[str, Any]) -> None:
        if self._zygote is None or self._zygote.stdin is None:
            raise GkrError("the zygote of this node is not running", hint=f"see {self.folder / 'zygote.log'}")
        try:
            self._zygote.stdin.write(json.dumps(command).encode() + b"\n")
            self._zygote.stdin.flush()
        except BrokenPipeError:
            self._raise_zygote_gone()

    def _raise_zygote_gone(self) -> None:
        code = self._zygote.wait(timeout=5) if self._zygote is not None else None
        raise GkrError(f"the zygote of this node ended with code {code}", hint=f"see {self.folder / 'zygote.log'}")

    def _wait(self, done: Any, *, deadline_seconds: float, what: str) -> None:
        deadline = time.monotonic() + deadline_seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{what}: not done after {deadline_seconds:.0f} s")
            if not self._pump(min(left, 0.5)) and self._zygote is not None and self._zygote.poll() is not None:
                self._raise_zygote_gone()

    def _pump(self, timeout_seconds: float) -> bool:
        """Read the zygote's events; true if there were any."""
        if self._zygote is None or self._zygote.stdout is None:
            return False
        descriptor, got = self._zygote.stdout.fileno(), False
        while select.select([descriptor], [], [], 0 if got else timeout_seconds)[0]:
            chunk = os.read(descriptor, 65536)
            if not chunk:
                break
            got = True
            *lines, self._buffer = (self._buffer + chunk).split(b"\n")
            for line in lines:
                self._note(json.loads(line))
        return got

    def _note(self, event: dict[str, Any]) -> None:
        if event["is"] == "spawned":
            self._running[event["job"]] = event["pid"]
        elif event["is"] == "exited":
            self._running.pop(event["job"], None)
            self._exits.append(
                Exit(
                    job=event["job"],
                    pid=event["pid"],
                    code=event["code"],
                    monotonic=event["monotonic"],
                    reason=self._reason(event["job"]),
                )
            )

    def _reason(self, job: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / f"reason-{job}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def _new_events(self) -> list[str]:
        lines: list[str] = []
        for path in sorted(self.folder.glob("events-*.jsonl")):
            if self._first_epoch is None or int(path.name.split("-")[1]) < self._first_epoch:
                continue
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            lines += whole.decode().splitlines()
        return lines

    def _drop_zygote(self) -> None:
        if self._zygote is None:
            return
        zygote, self._zygote = self._zygote, None
        for stream in (zygote.stdin, zygote.stdout):
            if stream is not None:
                stream.close()
        try:
            zygote.wait(timeout=5)
        except subprocess.TimeoutExpired:
            zygote.kill()
            zygote.wait(timeout=5)
        self._running = {}


def rank_jobs(
    context: RuntimeContext, *, ranks: dict[int, int], log_dir: Path
) -> dict[str, tuple[str, dict[str, str], str]]:
    """The jobs of `Node.spawn` for ranks (global rank to local rank) that share everything else in `context`."""
    jobs: dict[str, tuple[str, dict[str, str], str]] = {}
    for rank, local_rank in ranks.items():
        own = replace(context, rank=rank, local_rank=local_rank)
        jobs[f"rank-{rank}"] = ("rank", own.to_environment(), str(log_dir / f"rank-{rank}.log"))
    return jobs
