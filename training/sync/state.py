"""The durable state of one fragment as one file: Theta, B, A and the averaged weights as safetensors, everything else
as JSON in its metadata.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from spec.errors import DataError
from training.sync.layout import Floats, Layout, fingerprint_weights
from training.sync.messages import Ledger
from training.sync.outer import OuterState
from training.sync.tensors import Point, Written, hash_file, no_point, write_tensors

_ARRAYS = ("theta", "momentum", "accumulated", "average")


@dataclass(frozen=True, kw_only=True)
class FragmentState:
    """The arrays of one fragment, all equally long."""

    outer: OuterState
    average: Floats
    """What is published: the mean of the learners' averaged weights, or an average over versions."""


class StateNote(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON beside the arrays."""

    ledger: Ledger
    epoch: int
    rounds_accumulated: float
    """f of the outer optimizer."""
    shapes: dict[str, list[int]]
    event: str
    """The `sync_merged` event of this version, so that a crash between commit and event does not lose it."""
    fragment: int = 0
    fragments: int = 1
    buffers: dict[str, list[int]] = {}
    format: int = 2

    @property
    def layout(self) -> Layout:
        """What the whole model looks like."""
        return Layout.from_shapes(self.shapes, buffers=self.buffers, fragments=self.fragments)


def write_state(state: FragmentState, *, note: StateNote, folder: Path, point: Point = no_point) -> Written:
    """Write one fragment's state under a new name; nobody refers to it before HEAD does."""
    name = f"{state_prefix(note.fragment, note.ledger.fragments[note.fragment].version)}{note.epoch:06d}.safetensors"
    outer = state.outer
    return write_tensors(
        {
            "theta": outer.theta,
            "momentum": outer.momentum,
            "accumulated": outer.accumulated,
            "average": state.average,
        },
        metadata={"note": msgspec.json.encode(note).decode()},
        temporary=folder / f"{name}.tmp",
        name=lambda _: folder / name,
        label="state",
        point=point,
    )


def state_prefix(fragment: int, version: int) -> str:
    """How the names of a fragment's states of one version begin; the epoch of their writer follows."""
    return f"state-{fragment:02d}-{version:08d}-"


def read_state(path: Path, *, sha256: str) -> tuple[FragmentState, StateNote]:
    """Read a state back; refuses bytes that are not exactly those that were committed."""
    remedy = "restore the file from a backup; earlier states here are older rounds that learners would disagree with"
    if not path.exists():
        raise DataError("the committed state is missing", where=str(path), hint=remedy)
    found = hash_file(path)
    if found != sha256:
        raise DataError(
            f"the committed state is damaged: sha256 {found[:12]}, committed {sha256[:12]}",
            where=str(path),
            hint=remedy,
        )
    try:
        with safe_open(path, framework="np") as file:
            note = msgspec.json.decode(file.metadata()["note"], type=StateNote)
            arrays: dict[str, Floats] = {name: file.get_tensor(name) for name in _ARRAYS}
    except (SafetensorError, msgspec.DecodeError, KeyError) as error:
        raise DataError(f"the committed state cannot be read: {error}", where=str(path), hint=remedy) from error
    layout, theta = note.layout, arrays["theta"]
    length = layout.fragment_range(note.fragment)[1]
    if layout.fingerprint != note.ledger.fingerprint or any(len(array) != length for array in arrays.values()):
        raise DataError("the committed state does not fit its own layout", where=str(path), hint=remedy)
    if fingerprint_weights(np.ascontiguousarray(theta)) != note.ledger.fragments[note.fragment].theta_sha256:
        raise DataError(
            "the committed weights do not have the fingerprint in their ledger", where=str(path), hint=remedy
        )
    outer = OuterState(
        theta=theta,
        momentum=arrays["momentum"],
        accumulated=arrays["accumulated"],
        rounds_accumulated=note.rounds_accumulated,
    )
    return FragmentState(outer=outer, average=arrays["average"]), note


def map_weights(path: Path) -> Floats:
    """Only Theta of an earlier state of a fragment, left in the file: learners ask for it in many small pieces."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        first, end = json.loads(file.read(size))["theta"]["data_offsets"]
        return np.memmap(file, "<f4", mode="r", offset=8 + size + first, shape=((end - first) // 4,))
