"""Which command lines a plan's processes are.

The only place that knows them; tests hand in stand-ins of the same shape.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gkr.local.states import Endpoints


class Commands(Protocol):
    """Command lines as argument lists."""

    def syncer(self, *, endpoints: Endpoints | None) -> list[str]:
        """The syncer, on free ports or, after a restart, on those of `endpoints`."""
        ...

    def driver(self, learner: str, *, attempt: int, endpoints: Endpoints | None) -> list[str]:
        """The driver of one learner; `endpoints` are the syncer's, if the plan has one."""
        ...


@dataclass(frozen=True)
class ProductCommands:
    """The real ones."""

    folder: Path

    def syncer(self, *, endpoints: Endpoints | None) -> list[str]:
        folder = self.folder
        command = [sys.executable, "-m", "training.sync.server", "--plan", f"{folder / 'plan.json'}"]
        command += ["--endpoints", f"{folder / 'state' / 'syncer.json'}", "--events", f"{folder / 'events.jsonl'}"]
        if endpoints is not None:
            command += ["--control-port", _port(endpoints.control), "--bulk-port", _port(endpoints.bulk)]
        return command

    def driver(self, learner: str, *, attempt: int, endpoints: Endpoints | None) -> list[str]:
        folder = self.folder
        command = [sys.executable, "-m", "training.driver", "--plan", f"{folder / 'plan.json'}", "--learner", learner]
        command += ["--run-dir", f"{folder}", "--events", f"{folder / 'events.jsonl'}"]
        if endpoints is not None:
            command += ["--syncer-control", endpoints.control, "--syncer-bulk", endpoints.bulk]
        return [*command, "--attempt", f"{attempt}"]


def _port(address: str) -> str:
    return address.rpartition(":")[2]
