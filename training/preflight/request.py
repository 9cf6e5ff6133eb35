"""What the checks of one node are asked: everything they need to know, taken from the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from spec.errors import NotFoundError
from spec.plan import Plan
from spec.train import AnyModelConfig, TrainConfig
from storage import file_path
from training.preflight.verdicts import MIB

_STATE_COPIES = 5  # weights, two moments, averaged weights, anchor: float32 each
DEADLINE_SECONDS = 4.0
STORE_DEADLINE_SECONDS = 45.0
"""Where data and checkpoints are in an object store: it may be slow for a while, and a shard has to come from it."""
_SLACK_BYTES = 256 * MIB  # logs, events and pictures of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest:
    """The checks of one node."""

    node: str
    checkpoints: str
    """URI of the real place of the checkpoints."""
    manifest: str
    """URI of the dataset's manifest; empty: no dataset is checked."""
    data_cache_limit: int | None = None
    """Bytes that copies of datasets may take on the node; none: as it is."""
    memory_bytes: int
    shm_bytes: int
    disk_bytes: int
    """Free space that checkpoints (in a folder) and logs will need."""
    scratch: Path | None = None
    """This node's own folder; checked like the checkpoint folder's disk."""
    ports: tuple[int, ...] = ()
    """Ports that the plan fixes; each must be free."""
    host: str = "127.0.0.1"
    """Where they will be bound."""
    train: TrainConfig | None = None
    """Our trainer; none: the two steps are not run."""
    probe_bytes: int = 16 * MIB
    """Written, synced and read back on each disk."""
    deadline_seconds: float = DEADLINE_SECONDS
    """Of all checks of the host together, which run side by side."""
    two_steps_deadline_seconds: float = 60.0

    @classmethod
    def for_node(cls, plan: Plan, *, learner: str, node: str) -> Self:
        """What the plan says of one node."""
        mine = plan.learner(learner)
        place = next((one for one in mine.nodes if one.name == node), None)
        if place is None:
            raise NotFoundError(
                f"learner {learner!r} has no node {node!r}",
                hint=f"its nodes: {', '.join(one.name for one in mine.nodes)}",
            )
        return cls(
            node=node,
            checkpoints=mine.checkpoints,
            manifest=mine.data_manifest if plan.train else "",
            data_cache_limit=mine.data_cache_limit,
            memory_bytes=place.memory,
            shm_bytes=place.shm,
            disk_bytes=checkpoint_bytes(plan.train) + _SLACK_BYTES if plan.train else _SLACK_BYTES,
            train=plan.train,
            deadline_seconds=DEADLINE_SECONDS if file_path(mine.checkpoints) else STORE_DEADLINE_SECONDS,
        )


def checkpoint_bytes(train: TrainConfig) -> int:
    """Disk that all kept checkpoints of a learner take, with the one that is being written."""
    return parameter_count(train.model) * 4 * _STATE_COPIES * (train.checkpoint.keep + 1)


def parameter_count(config: AnyModelConfig) -> int:
    """Parameters of the model, rounded up, without making it (that takes torch): enough to ask for disk space."""
    width, hidden = config.width, int(config.width * config.mlp_ratio)
    if config.kind == "lm":
        return config.depth * (4 * width**2 + 2 * width * hidden + 9 * width + hidden) + 2 * 256 * width + 256 + width
    pixels = config.channels * config.patch_size**2
    block = 4 * width**2 + 2 * width * hidden + 6 * width**2 + 17 * width + hidden  # attention, MLP, modulation
    condition = config.text_width * width + width**2 if config.conditioning == "text" else config.num_classes * width
    return config.depth * block + 2 * pixels * width + 8 * width**2 + condition + 15 * width
