"""What the double remembers: one file for each thing it made, in a folder that stands for the cloud.

It is what a read answers and what a creation with a taken name runs into, whatever the engine's own state says. Faults
that a test wants are in the same folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

FAULTS = "faults.json"


@dataclass(frozen=True)
class Cloud:
    """A folder that stands for Google Cloud."""

    folder: Path

    def read(self, kind: str, identity: str) -> dict[str, Any] | None:
        """The outputs of a thing; None if it is not there."""
        path = self._path(kind, identity)
        return (
            cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))["outputs"]) if path.is_file() else None
        )

    def write(self, kind: str, identity: str, outputs: dict[str, Any]) -> None:
        """Make or change it."""
        path = self._path(kind, identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"type": kind, "id": identity, "outputs": outputs}, indent=1), encoding="utf-8")
        fresh.replace(path)

    def remove(self, kind: str, identity: str) -> None:
        """Delete it; what is gone already stays gone."""
        self._path(kind, identity).unlink(missing_ok=True)

    def things(self) -> list[tuple[str, str]]:
        """Type and id of everything there is."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("things/*.json"))]
        return [(str(one["type"]), str(one["id"])) for one in found]

    def stocked_out(self, pool: str) -> bool:
        """Whether there are no machines for a node pool of that name."""
        return pool in self._faults().get("stock_out", [])

    def set_faults(self, *, stock_out: Sequence[str] = (), client_key: str = "") -> None:
        """From now on there are no machines for these pools, and clusters have this client key."""
        self.folder.mkdir(parents=True, exist_ok=True)
        faults = {"stock_out": list(stock_out), "client_key": client_key}
        (self.folder / FAULTS).write_text(json.dumps(faults), encoding="utf-8")

    def client_key(self) -> str:
        """The key that clusters hand out; empty, as GKE's, unless it was set."""
        return str(self._faults().get("client_key", ""))

    def _faults(self) -> dict[str, Any]:
        path = self.folder / FAULTS
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _path(self, kind: str, identity: str) -> Path:
        digest = hashlib.sha256(f"{kind} {identity}".encode()).hexdigest()[:24]
        return self.folder / "things" / f"{digest}.json"
