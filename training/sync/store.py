"""The syncer's store: states, published models and HEAD, the one small object that says which state counts.

HEAD is the linearisation point. It is replaced only if it still is what this syncer wrote last, so a syncer that was
taken over cannot commit, wherever the other one runs. HEAD also carries the ledger, which may be newer than the one in
the state file: a registration makes a new generation durable without writing the weights again.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from spec.errors import ConfigError, DataError, RefusedError, UnreachableError
from storage import Bucket, ExistsError, MissingError, StaleError, Stored, file_path
from training.sync.files import Files, StoreError, later
from training.sync.layout import Floats
from training.sync.messages import Ledger
from training.sync.state import FragmentState, StateNote, read_state, state_prefix
from training.sync.tensors import Point, Written, no_point

HEAD = "HEAD.json"
_TRIES = 10
"""Of a start among other syncers that start; each of them ends the one before."""


class StateName(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a fragment that counts."""

    file: str
    sha256: str
    size: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Content of HEAD."""

    epoch: int
    serial: int
    """Grows with each replacement."""
    ledger: Ledger
    states: list[StateName] = []
    """By fragment; none before version 0."""
    format: int = 2
    writer: str = ""
    """The process that wrote it: two that start at once would write equal bytes otherwise, and both believe to have."""


class DeposedError(RefusedError):
    """Another syncer has taken over this store."""


class Store:
    """One run's store, held by one epoch."""

    def __init__(self, bucket: Bucket, *, keep_states: int, work: Path | None = None, point: Point = no_point) -> None:
        """`work`: this process's own folder, for the files of a bucket that is no folder of this machine."""
        folder = file_path(bucket.uri)
        if folder is None and work is None:
            raise ValueError("a store in a bucket needs a folder to work in")
        self.files = Files(
            folder or work or Path(), copies=None if folder else bucket, keep_states=keep_states, point=point
        )
        self._bucket, self._point = bucket, point
        self._writer = secrets.token_hex(8)
        self._tag = ""
        self._head: Head | None = None
        self._unsure: list[bytes] = []
        """What was sent and not answered for: HEAD may be one of these, and then still is ours."""

    @property
    def point(self) -> Point:
        return self._point

    @property
    def states(self) -> Path:
        """Folder in which states are written."""
        return self.files.states

    @property
    def models(self) -> Path:
        """Folder in which models are written."""
        return self.files.models

    @property
    def head(self) -> Head:
        """What this syncer wrote last and knows to be written."""
        assert self._head is not None, "take_over comes first"
        return self._head

    def take_over(self, ledger: Ledger) -> list[tuple[FragmentState, StateNote]]:
        """Verify what is here, then fence every earlier syncer with a higher epoch; the committed states, if any.

        `ledger` is that of a new run; its run and contract have to match what is here.
        """
        for _ in range(_TRIES):
            found = self._read()
            before, tag = found or (None, "")
            loaded: list[tuple[FragmentState, StateNote]] = []
            if before is not None:
                self._check(before.ledger, ledger)
                paths = [self.files.state(one.file, sha256=one.sha256) for one in before.states]
                loaded = [read_state(path, sha256=one.sha256) for path, one in zip(paths, before.states, strict=True)]
            head = Head(
                epoch=before.epoch + 1 if before else 1,
                serial=before.serial + 1 if before else 1,
                ledger=before.ledger if before else ledger,
                states=before.states if before else [],
                writer=self._writer,
            )
            try:
                self._write(head, tag=tag)
            except (ExistsError, StaleError, MissingError):
                continue  # another one was faster, or swept what we were writing: it is the one to be fenced
            self.files.sweep()
            return loaded
        raise UnreachableError(
            f"{_TRIES} other syncers took this store over while this one started",
            where=self._bucket.uri,
            hint="exactly one syncer may serve a run; end the others",
        )

    def keep(self, written: Written) -> None:
        """Make a state or model outlive this process; before HEAD names it."""
        self.files.keep(written)

    def commit(self, ledger: Ledger, *, states: Mapping[int, Written] | None = None) -> None:
        """Replace HEAD, if it still is ours. `StoreError` if that cannot be done now, or was and nobody could tell.

        `states`: the new one of each fragment that has changed.
        """
        names = dict(enumerate(self.head.states))
        for fragment, written in (states or {}).items():
            names[fragment] = StateName(file=written.path.name, sha256=written.sha256, size=written.size)
        found = [names[fragment] for fragment in sorted(names)]
        serial = self.head.serial + 1
        while True:
            head = Head(epoch=self.head.epoch, serial=serial, ledger=ledger, states=found, writer=self._writer)
            try:
                with later():
                    self._write(head, tag=self._tag)
            except StoreError:
                if (sent := _encode(head)) not in self._unsure:
                    self._unsure.append(sent)
                raise
            except (StaleError, MissingError):
                serial = self._own_late_write() + 1
            else:
                self._unsure.clear()
                return

    def check(self) -> None:
        """Raise `DeposedError` if another syncer has taken over."""
        with later():
            found = self._read()
        if found is None or found[0].epoch != self.head.epoch:
            self._raise_deposed(found[0] if found else None)

    def read_version(self, version: int, *, fragment: int) -> Floats | None:
        """Weights of an earlier version of a fragment, while its state is kept."""
        return self.files.read_version(version, fragment=fragment)

    def prune(self, *, wanted: Collection[tuple[int, int]] = ()) -> None:
        """Remove states and models that nobody needs any more. `wanted`: (fragment, version) that somebody does."""
        names = [state_prefix(fragment, version) for fragment, version in wanted]
        states, model = [one.file for one in self.head.states], self.head.ledger.model_sha256
        self.files.prune(states=states, model=model, wanted=tuple(names))

    def _check(self, found: Ledger, wanted: Ledger) -> None:
        if found.run != wanted.run:
            raise ConfigError(
                f"the store belongs to run {found.run!r}, not to {wanted.run!r}",
                where=self._bucket.uri,
                hint="give each run a store of its own",
            )
        if found.contract != wanted.contract:
            raise ConfigError(
                f"the store was made under other sync settings ({found.contract[:12]}, now {wanted.contract[:12]})",
                where=self._bucket.uri,
                hint="mode, steps, batch, fragments, optimizer and codec cannot change inside a run; start a new run",
            )

    def _own_late_write(self) -> int:
        """HEAD is not what we know to have written. If it is one of our unanswered writes it still is ours: its serial.
        Nobody was told of its content, and what is written next replaces it.
        """
        with later():
            found = self._get()
        if found is None:
            self._raise_deposed(None)
        head = _decode(found.data, where=self._where)
        if found.data not in self._unsure:
            self._raise_deposed(head)
        self._tag = found.tag
        return head.serial

    def _raise_deposed(self, found: Head | None) -> NoReturn:
        raise DeposedError(
            f"another syncer has taken over this run (epoch {found.epoch if found else 0}, mine is {self.head.epoch})",
            where=self._where,
            hint="exactly one syncer may serve a run; this one ends, the other goes on",
        )

    @property
    def _where(self) -> str:
        return f"{self._bucket.uri}/{HEAD}"

    def _get(self) -> Stored | None:
        try:
            return self._bucket.get(HEAD)
        except MissingError:
            return None

    def _read(self) -> tuple[Head, str] | None:
        found = self._get()
        return (_decode(found.data, where=self._where), found.tag) if found else None

    def _write(self, head: Head, *, tag: str) -> None:
        data = _encode(head)
        self._point("head-written")
        self._tag = self._bucket.replace(HEAD, data, tag=tag) if tag else self._bucket.create(HEAD, data)
        self._head = head
        self._point("head-named")


def _encode(head: Head) -> bytes:
    return msgspec.json.format(msgspec.json.encode(head), indent=1)


def _decode(data: bytes, *, where: str) -> Head:
    try:
        return msgspec.json.decode(data, type=Head)
    except msgspec.DecodeError as error:
        raise DataError(f"HEAD cannot be read: {error}", where=where, hint="restore it from a backup") from error
