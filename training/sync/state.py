"""The syncer's durable state as one file: Theta, B, A as safetensors, everything else as JSON in its metadata."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from spec.errors import DataError
from training.sync.layout import Floats, Layout, fingerprint_weights
from training.sync.messages import Ledger
from training.sync.outer import OuterState
from training.sync.tensors import Point, Written, hash_file, no_point, write_tensors


class StateNote(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON beside the arrays."""

    ledger: Ledger
    epoch: int
    rounds_accumulated: float
    """f of the outer optimizer."""
    shapes: dict[str, list[int]]
    event: str
    """The `sync_merged` event of this version, so that a crash between commit and event does not lose it."""
    format: int = 1


def write_state(outer: OuterState, *, note: StateNote, folder: Path, point: Point = no_point) -> Written:
    """Write one state under a new name; nobody refers to it before HEAD does."""
    name = f"state-{note.ledger.version:08d}-{note.epoch:06d}.safetensors"
    return write_tensors(
        {"theta": outer.theta, "momentum": outer.momentum, "accumulated": outer.accumulated},
        metadata={"note": msgspec.json.encode(note).decode()},
        temporary=folder / f"{name}.tmp",
        name=lambda _: folder / name,
        label="state",
        point=point,
    )


def read_state(path: Path, *, sha256: str) -> tuple[OuterState, StateNote]:
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
            arrays: dict[str, Floats] = {name: file.get_tensor(name) for name in ("theta", "momentum", "accumulated")}
    except (SafetensorError, msgspec.DecodeError, KeyError) as error:
        raise DataError(f"the committed state cannot be read: {error}", where=str(path), hint=remedy) from error
    layout = Layout.from_shapes(note.shapes)
    theta = arrays["theta"]
    if layout.fingerprint != note.ledger.fingerprint or any(len(array) != layout.total for array in arrays.values()):
        raise DataError("the committed state does not fit its own layout", where=str(path), hint=remedy)
    if fingerprint_weights(np.ascontiguousarray(theta)) != note.ledger.theta_sha256:
        raise DataError(
            "the committed weights do not have the fingerprint in their ledger", where=str(path), hint=remedy
        )
    outer = OuterState(
        theta=theta,
        momentum=arrays["momentum"],
        accumulated=arrays["accumulated"],
        rounds_accumulated=note.rounds_accumulated,
    )
    return outer, note


def read_weights(path: Path) -> Floats:
    """Only Theta of an earlier state."""
    with safe_open(path, framework="np") as file:
        return file.get_tensor("theta")
