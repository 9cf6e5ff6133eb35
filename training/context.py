"""What a rank knows only at run time: its place, attempt, epoch and addresses.

Read from the environment here and nowhere else. The agent writes the same names with `to_environment`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from spec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeContext:
    """Place of one rank in one attempt. Field `x_y` is the environment variable GKR_X_Y."""

    plan: str
    """Path of plan.json."""
    learner: str
    node: str
    node_dir: str
    """Folder of this node: progress pages, events of ranks, the service directory, caches."""
    rank: int
    local_rank: int
    world_size: int
    attempt: int
    epoch: int
    master_addr: str
    master_port: int
    syncer_control: str
    """host:port"""
    syncer_bulk: str
    last_position: int
    """Where the attempt before this one ended; what the restart falls short of it is lost."""

    @property
    def folder(self) -> Path:
        return Path(self.node_dir)

    @property
    def source(self) -> str:
        """The writer's name in events."""
        return f"rank/{self.learner}/{self.rank}"

    def to_environment(self) -> dict[str, str]:
        """The variables that `from_environment` reads back to the same value."""
        return {f"GKR_{name.upper()}": str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RuntimeContext:
        """Read all variables, or say at once which are missing."""
        names = list(cls.__dataclass_fields__)
        missing = [f"GKR_{name.upper()}" for name in names if f"GKR_{name.upper()}" not in environment]
        if missing:
            raise ConfigError(
                f"not started by an agent: {', '.join(missing)} not set",
                hint="ranks are started by `gkr launch`; to run one by hand, set the variables of training/context.py",
            )
        whole = {"rank", "local_rank", "world_size", "attempt", "epoch", "master_port", "last_position"}
        values = {name: environment[f"GKR_{name.upper()}"] for name in names}
        return cls(**{name: int(text) if name in whole else text for name, text in values.items()})  # type: ignore[arg-type]
