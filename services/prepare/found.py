"""The samples of a source with their places, so that a preparation that was stopped goes on behind the last one.

A place is a file of the source and a count of what was met in it, damage included. Files before it are passed over
without being opened; of its own file what was dealt with is read again and left out, and nothing is decoded twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from storage import Entry
from storage.sources import Damage, Raw, read_source


@dataclass(frozen=True)
class Found:
    """A sample, or damage where one should have been."""

    file: str
    number: int
    """From 1, in its file."""
    files: int
    """Files of the source that were begun, this one included."""
    item: Raw | Damage


def source_digest(entries: Sequence[Entry]) -> str:
    """Names the content of a source as far as a listing shows it: names and sizes."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.key}\0{entry.size}\n".encode())
    return digest.hexdigest()


def read_on(uri: str, *, file: str, number: int) -> Iterator[Found]:
    """Everything behind the first `number` samples of `file`; from the beginning if `file` is empty."""
    current, count, files = "", 0, 0
    waiting: list[Found] = []

    def enter(key: str) -> bool:
        nonlocal current, count, files
        current, count, files = key, 0, files + 1
        return key >= file

    def place(item: Raw | Damage) -> Found:
        nonlocal count
        count += 1
        return Found(current, count, files, item)

    def told(damage: Damage) -> None:
        waiting.append(place(damage))

    def behind(found: Found) -> bool:
        return found.file > file or found.number > number

    for raw in read_source(uri, told=told, enter=enter):
        found = [*waiting, place(raw)]
        waiting.clear()
        yield from (one for one in found if behind(one))
    yield from (one for one in waiting if behind(one))
