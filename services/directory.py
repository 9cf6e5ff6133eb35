"""The file that says where replicas answer now: replaced whole by the driver, read again when it changed."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from spec.services import Directory


def write_directory(path: Path, *, directory: Directory) -> None:
    """Replace the file in one step, so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(directory.write_json())
    temporary.replace(path)


class DirectoryWatch:
    """The newest directory seen in a file. An older epoch, a missing or an unreadable file changes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.current: Directory | None = None
        self._seen: tuple[int, int, int] | None = None

    def refresh(self) -> bool:
        """Look at the file; true if `current` is another one now."""
        try:
            stat = self.path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen == self._seen:
                return False
            found = Directory.read_json(self.path.read_bytes())
        except (OSError, ValidationError):
            return False
        self._seen = seen
        if self.current is not None and found.epoch <= self.current.epoch:
            return False
        self.current = found
        return True
