"""The syncer's folder: states, published models and HEAD, the one small file that says which state counts.

HEAD is the linearisation point. It is replaced under a file lock and only if it still is what this syncer wrote last,
so a syncer that was taken over cannot commit. HEAD also carries the ledger, which may be newer than the one in the
state file: a registration makes a new generation durable without writing the weights again.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from spec.errors import ConfigError, DataError, RefusedError, UnreachableError
from training.sync.layout import Floats
from training.sync.messages import Ledger
from training.sync.outer import OuterState
from training.sync.state import StateNote, read_state, read_weights
from training.sync.tensors import Point, Written, no_point, sync_folder

_LOCK_SECONDS = 10.0
_MODELS_KEPT = 8
"""Published models that stay: evaluation may lag some rounds behind."""
_STATE = re.compile(r"state-(\d{8})-\d{6}\.safetensors")


class StateName(msgspec.Struct, frozen=True, kw_only=True):
    """The state that counts."""

    file: str
    sha256: str
    size: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Content of HEAD.json."""

    epoch: int
    serial: int
    """Grows with each replacement."""
    ledger: Ledger
    state: StateName | None = None
    format: int = 1


class DeposedError(RefusedError):
    """Another syncer has taken over this store."""


class Store:
    """One run's folder, held by one epoch."""

    def __init__(self, folder: Path, *, keep_states: int, point: Point = no_point) -> None:
        self.folder = folder
        self.states = folder / "states"
        self.models = folder / "models"
        self._keep = keep_states
        self._point = point
        self._mark = b""
        self._head: Head | None = None
        for one in (self.states, self.models):
            one.mkdir(parents=True, exist_ok=True)

    @property
    def point(self) -> Point:
        return self._point

    @property
    def head(self) -> Head:
        assert self._head is not None, "take_over comes first"
        return self._head

    def take_over(self, ledger: Ledger) -> tuple[OuterState, StateNote] | None:
        """Verify what is here, then fence every earlier syncer with a higher epoch; the committed state, if any.

        `ledger` is that of a new run; its run and contract have to match what is here.
        """
        with self._locked():
            before = self._read()
            loaded = None
            if before is not None:
                self._check(before.ledger, ledger)
                ledger = before.ledger
                if before.state is not None:
                    loaded = read_state(self.states / before.state.file, sha256=before.state.sha256)
            epoch, serial = (before.epoch + 1, before.serial + 1) if before else (1, 1)
            self._write(Head(epoch=epoch, serial=serial, ledger=ledger, state=before.state if before else None))
        self._sweep()
        return loaded

    def commit(self, ledger: Ledger, *, state: Written | None = None) -> None:
        """Replace HEAD, if it still is ours."""
        with self._locked():
            if self._read_bytes() != self._mark:
                self._raise_deposed()
            name = StateName(file=state.path.name, sha256=state.sha256, size=state.size) if state else self.head.state
            self._write(Head(epoch=self.head.epoch, serial=self.head.serial + 1, ledger=ledger, state=name))

    def check(self) -> None:
        """Raise `DeposedError` if another syncer has taken over."""
        found = self._read()
        if found is None or found.epoch != self.head.epoch:
            self._raise_deposed()

    def read_version(self, version: int) -> Floats | None:
        """Weights of an earlier version, while its state is kept."""
        paths = sorted(self.states.glob(f"state-{version:08d}-*.safetensors"))
        with suppress(FileNotFoundError):
            return read_weights(paths[-1]) if paths else None
        return None

    def prune(self) -> None:
        """Remove states and models that nobody needs any more."""
        head = self.head.state.file if self.head.state else ""
        states = sorted((one for one in self.states.iterdir() if _STATE.fullmatch(one.name)), reverse=True)
        kept = [one for one in states if one.name <= head][: self._keep]
        models = sorted(self.models.glob("*.safetensors"), key=lambda one: one.stat().st_mtime_ns, reverse=True)
        newest = self.head.ledger.model_sha256
        dropped = [one for one in models[_MODELS_KEPT:] if one.stem != newest]
        for path in [*(one for one in states if one not in kept and one.name != head), *dropped]:
            path.unlink(missing_ok=True)

    def _check(self, found: Ledger, wanted: Ledger) -> None:
        if found.run != wanted.run:
            raise ConfigError(
                f"the store belongs to run {found.run!r}, not to {wanted.run!r}",
                where=str(self.folder),
                hint="give each run a store of its own",
            )
        if found.contract != wanted.contract:
            raise ConfigError(
                f"the store was made under other sync settings ({found.contract[:12]}, now {wanted.contract[:12]})",
                where=str(self.folder),
                hint="mode, inner steps, batch and outer optimizer cannot change inside a run; start a new run",
            )

    def _raise_deposed(self) -> None:
        found = self._read()
        epoch = found.epoch if found else 0
        raise DeposedError(
            f"another syncer has taken over this run (epoch {epoch}, mine is {self.head.epoch})",
            where=str(self.folder / "HEAD.json"),
            hint="exactly one syncer may serve a run; this one ends, the other goes on",
        )

    def _read_bytes(self) -> bytes:
        with suppress(FileNotFoundError):
            return (self.folder / "HEAD.json").read_bytes()
        return b""

    def _read(self) -> Head | None:
        data = self._read_bytes()
        if not data:
            return None
        try:
            return msgspec.json.decode(data, type=Head)
        except msgspec.DecodeError as error:
            raise DataError(
                f"HEAD cannot be read: {error}", where=str(self.folder / "HEAD.json"), hint="restore it from a backup"
            ) from error

    def _write(self, head: Head) -> None:
        path = self.folder / "HEAD.json"
        temporary = self.folder / f"HEAD.json.{os.getpid()}.tmp"
        data = msgspec.json.format(msgspec.json.encode(head), indent=1)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._point("head-written")
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._mark, self._head = data, head
        sync_folder(self.folder)
        self._point("head-named")

    def _sweep(self) -> None:
        """Remove what crashed writers left unfinished."""
        for folder in (self.folder, self.states, self.models):
            for path in folder.glob("*.tmp"):
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Generator[None]:
        with (self.folder / "lock").open("ab") as file:
            until = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise UnreachableError(
                            f"the store has been locked by another syncer for {_LOCK_SECONDS:g} s",
                            where=str(self.folder / "lock"),
                        ) from None
                    time.sleep(0.02)
            yield
