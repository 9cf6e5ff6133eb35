"""Small files that others read while we write them."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path`; a reader sees the old file or the new one, never a part. Not synced: these are addresses
    and reasons, which mean nothing after a power loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
