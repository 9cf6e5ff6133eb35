"""What a preparation remembers between two checkpoints, in one SQLite file: how far it is, and what it has seen.

A checkpoint is one transaction, so after a SIGKILL the journal says what it said at the last one. Digests of what was
kept are looked up on disk: memory does not grow with the dataset. One process at a time, which the caller's lock sees
to.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from spec.shards import Shard

_CACHE_KIB = 64 * 1024
_BITS = 64


@dataclass
class Part:
    """One split, as far as it was written."""

    shards: list[Shard] = field(default_factory=list[Shard])
    values: dict[str, list[Shard]] = field(default_factory=dict[str, list[Shard]])
    """Name of a feature to its files, one beside each shard."""
    rows: int = 0
    size: int = 0
    """Bytes of the open shard."""
    samples: int = 0
    """Samples of the open shard."""


@dataclass
class State:
    """How far a preparation is; everything that it needs to go on, besides the files beside the journal."""

    file: str = ""
    number: int = 0
    files: int = 0
    ended: bool = False
    """All of the source was dealt with."""
    found: int = 0
    captions: int = 0
    bytes: int = 0
    """Of images and texts that were kept."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    dropped_bytes: int = 0
    """Of the list of what was dropped."""
    labels: list[str] = field(default_factory=list[str])
    width: int = 1
    height: int = 1
    """The largest."""
    value_shapes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Name of a feature to the shape of one value."""
    train: Part = field(default_factory=Part)
    test: Part = field(default_factory=Part)

    @property
    def kept(self) -> int:
        """Samples of both splits."""
        return self.train.rows + self.test.rows


_STATE = TypeAdapter(State)


class Journal:
    """The journal in one file, which is made if there is none."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._db.execute("CREATE TABLE IF NOT EXISTS state (one INTEGER PRIMARY KEY, document TEXT)")
        self._db.execute("CREATE TABLE IF NOT EXISTS seen (pixels BLOB PRIMARY KEY, place TEXT) WITHOUT ROWID")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS looks (band INTEGER, part INTEGER, look BLOB, place TEXT, "
            "PRIMARY KEY (band, part, look)) WITHOUT ROWID"
        )
        self._db.execute("BEGIN")

    def state(self) -> State:
        """As of the last checkpoint; a new one if there was none."""
        row = self._db.execute("SELECT document FROM state").fetchone()
        return State() if row is None else _STATE.validate_json(row[0])

    def commit(self, state: State) -> None:
        """A checkpoint."""
        document = _STATE.dump_json(state).decode()
        self._db.execute("INSERT OR REPLACE INTO state VALUES (1, ?)", (document,))
        self._db.execute("COMMIT")
        self._db.execute("BEGIN")

    def same_pixels(self, pixels: bytes, *, place: str) -> str:
        """Where these pixels were met before; empty for the first time, which is remembered."""
        if self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (pixels, place)).rowcount == 1:
            return ""
        return str(self._db.execute("SELECT place FROM seen WHERE pixels = ?", (pixels,)).fetchone()[0])

    def same_look(self, look: int, *, place: str, bits: int) -> str:
        """Where a look that differs in at most `bits` bits was met before; else it is remembered.

        Two such looks are equal in one of `bits + 1` bands at least, so only those that share a band are compared.
        """
        if not look:
            return ""
        bands = _bands(look, count=bits + 1)
        for band in enumerate(bands):
            for other, where in self._db.execute("SELECT look, place FROM looks WHERE band = ? AND part = ?", band):
                if (int.from_bytes(other) ^ look).bit_count() <= bits:
                    return str(where)
        rows = [(band, part, look.to_bytes(8), place) for band, part in enumerate(bands)]
        self._db.executemany("INSERT OR IGNORE INTO looks VALUES (?, ?, ?, ?)", rows)
        return ""

    def close(self) -> None:
        """Forget what came after the last checkpoint."""
        self._db.execute("ROLLBACK")
        self._db.close()


def _bands(look: int, *, count: int) -> list[int]:
    edges = [_BITS * number // count for number in range(count + 1)]
    # A band of all 64 bits does not fit SQLite's signed integers; with no bit to differ, 63 tell apart enough.
    return [(look >> low) & ((1 << min(high - low, _BITS - 1)) - 1) for low, high in pairwise(edges)]
