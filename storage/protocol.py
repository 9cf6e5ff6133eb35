"""What a store can do, and what it promises, whichever it is.

An object appears whole or not at all. `create` refuses to overwrite; `replace` refuses unless the object still is the
one that was read, also against a writer in another region. Every call ends: each request has a deadline, and is
repeated only where that is safe. After an unclear answer to `create` or `replace` (the connection broke before the
answer came) the object is read back: exactly our bytes there count as our success. So where two writers could write
equal bytes and only one may win, the bytes must name their writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PIECE_BYTES = 16 * 2**20
"""Large objects travel in pieces of this size."""

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Entry:
    """One object of a listing."""

    key: str
    """Relative to the bucket's prefix."""
    size: int
    modified: float
    """Seconds since 1970, by the store's clock."""


@dataclass(frozen=True)
class Stored:
    """An object as it was read, and the tag with which it can be replaced."""

    data: bytes
    tag: str


class Bucket(Protocol):
    """Keys are relative paths with `/` between their parts."""

    uri: str
    poll_seconds: float
    """Pause between two looks of somebody who waits for an object here."""

    def get(self, key: str) -> Stored:
        """A small object; MissingError if there is none."""
        ...

    def put(self, key: str, data: bytes) -> str:
        """Write or overwrite a small object; the new tag."""
        ...

    def create(self, key: str, data: bytes) -> str:
        """Write a small object; ExistsError if it is there already."""
        ...

    def replace(self, key: str, data: bytes, *, tag: str) -> str:
        """Write a small object if it still has this tag, else StaleError; the new tag."""
        ...

    def read(self, key: str) -> bytearray:
        """A large object in memory of the caller's own."""
        ...

    def read_range(self, key: str, *, offset: int, size: int) -> Bytes:
        """Some bytes of an object, by one request; DataError if the object ends before."""
        ...

    def pieces(self, key: str) -> Iterator[Bytes]:
        """A large object in order, none of it kept; StaleError if it is overwritten meanwhile."""
        ...

    def write(self, key: str, pieces: Iterable[Bytes]) -> int:
        """Write or overwrite a large object from its pieces, none of which is kept; its size."""
        ...

    def digest(self, key: str) -> tuple[int, str]:
        """Size and sha256 of what the store gives back."""
        ...

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> int:
        """Copy an object to a file, which appears whole; DataError if it does not have the digest; its size."""
        ...

    def send(self, key: str, path: Path) -> int:
        """Copy a file to an object; its size."""
        ...

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Entry]:
        """All objects in the folder `prefix` and below, sorted by key; with `after`, only those behind that key."""
        ...

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly in a folder, sorted."""
        ...

    def exists(self, key: str) -> bool:
        """True if there is such an object."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is gone already is fine."""
        ...

    def clear(self, prefix: str) -> None:
        """Remove everything in a folder and below, with what writers that were killed have left there."""
        ...

    def below(self, prefix: str) -> Bucket:
        """The bucket of a deeper prefix."""
        ...


def checked_key(key: str) -> str:
    """The key, if it is a path inside the bucket; anything else is a bug of the caller."""
    if key.startswith("/") or ".." in key.split("/"):
        raise ValueError(f"key {key!r} is not a relative path inside the bucket")
    return key.strip("/")
