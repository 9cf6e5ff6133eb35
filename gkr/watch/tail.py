"""New whole lines of a file that others append to.

Reads from where it stopped; a line without its newline yet waits for the rest.
"""

from __future__ import annotations

from pathlib import Path

from spec.events import Event, read_event

_CHUNK = 1 << 20


class LineTail:
    """Lines as bytes, without their newline. A file that is not there yet is an empty file."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._rest = b""

    def read(self) -> list[bytes]:
        """Whole lines since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                blocks = list(iter(lambda: file.read(_CHUNK), b""))
        except FileNotFoundError:
            return []
        self._offset += sum(map(len, blocks))
        *lines, self._rest = (self._rest + b"".join(blocks)).split(b"\n")
        return lines

    def rest(self) -> bytes:
        """What stands after the last newline: the end of a file whose writer is gone."""
        rest, self._rest = self._rest, b""
        return rest


class EventTail:
    """Events of a run in the order they were appended; lines that cannot be read are skipped."""

    def __init__(self, folder: Path) -> None:
        self._lines = LineTail(folder / "events.jsonl")

    def read(self) -> list[Event]:
        """Events since the last call."""
        return [event for line in self._lines.read() if line.strip() and (event := read_event(line)) is not None]
