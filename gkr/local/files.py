"""Writing a file so that readers see the old content or the new, never half."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to the disk, then take the place."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def link_atomically(link: Path, target: Path) -> None:
    """Let `link` point to `target`, which is relative to the link's folder."""
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    try:
        draft.replace(link)
    except OSError:
        draft.unlink()
        raise
