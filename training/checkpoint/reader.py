"""Loading: the newest checkpoint whose every needed byte verifies, the same one on all ranks.

Promises: the live model is untouched until every rank has verified everything it needs; a checkpoint that does not
verify on one rank is passed over by all, and named with its reason. Rank 0 chooses; the ranks agree by collectives,
which is safe here because no step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec.errors import DataError, GkrError
from storage import Bucket, file_path
from training.checkpoint import store
from training.checkpoint.documents import Manifest, Part
from training.checkpoint.parts import read_part
from training.checkpoint.store import Place, shown
from training.checkpoint.writer import EXTRA, VECTORS
from training.ema import Ema
from training.optimizer import ShardedAdamW
from training.parallel import FlatRange, assign_local, broadcast_json, flat_ranges, lowest_rank_where


@dataclass(frozen=True)
class Loaded:
    """What was taken up besides weights, optimizer and average, which are in place."""

    state: dict[str, Any]
    step: int
    path: str
    """Or URI, if it is no folder of this machine."""
    skipped: list[str]
    """Newer checkpoints that did not verify, each with the reason."""
    vectors: dict[str, Tensor]
    """The caller's own, float32 on the CPU over this rank's flat ranges; one that the checkpoint lacks is missing here.
    """


def load_latest(
    bucket: Bucket, *, model: nn.Module, optimizer: ShardedAdamW, ema: Ema, vectors: Sequence[str] = ()
) -> Loaded | None:
    """Take up the newest good checkpoint, written by any number of ranks; none if nothing was ever committed.

    DataError if checkpoints were committed but none verifies (starting afresh would hide the loss), or if the newest
    one belongs to a model of other shapes.
    """
    first = dist.get_rank() == 0
    found = _committed(bucket) if first else []
    candidates = [Place(*one) for one in broadcast_json([(one.epoch, one.attempt, one.step) for one in found])]
    skipped: list[str] = []
    for place in candidates:
        manifest, reason = _shared_manifest(bucket, place=place)
        if manifest is None:
            skipped.append(reason)
            continue
        own = flat_ranges(model)
        _refuse_other_shapes(manifest, own=own, where=shown(bucket, place.key))
        wanted = [*VECTORS, *(EXTRA + name for name in vectors if EXTRA + name in manifest.vectors)]
        staged, reason = _stage(bucket, place=place, manifest=manifest, own=own, wanted=wanted)
        culprit = lowest_rank_where(bool(reason))
        if culprit is not None:
            skipped.append(broadcast_json(reason, source=culprit))
            continue
        assign_local(model, staged["model"])
        optimizer.restore(
            steps=manifest.optimizer_steps, exp_avg=staged["exp_avg"], exp_avg_sq=staged["exp_avg_sq"]
        )  # fmt: skip
        ema.assign(staged["ema"])
        return Loaded(
            state=manifest.state,
            step=manifest.step,
            path=shown(bucket, place.key),
            skipped=skipped,
            vectors={name.removeprefix(EXTRA): staged[name] for name in wanted if name.startswith(EXTRA)},
        )
    if skipped:
        raise DataError(
            "no committed checkpoint verifies: " + "; ".join(skipped),
            where=shown(bucket, "").rstrip("/"),
            hint="restore the folder from a copy, or move it away to start without a checkpoint",
        )
    return None


def _committed(bucket: Bucket) -> list[Place]:
    return [place for place in store.places(bucket) if store.is_committed(bucket, place=place)]


def _shared_manifest(bucket: Bucket, *, place: Place) -> tuple[Manifest | None, str]:
    """Rank 0's reading of the manifest, or why it cannot be trusted, on all ranks."""
    answer: tuple[Any, str] = (None, "")
    if dist.get_rank() == 0:
        try:
            answer = (store.read_manifest(bucket, place=place).model_dump(mode="json"), "")
        except GkrError as error:
            answer = (None, _reason(error, bucket=bucket, place=place))
    data, reason = broadcast_json(answer)
    return (None if data is None else Manifest.model_validate(data)), reason


def _refuse_other_shapes(manifest: Manifest, *, own: list[FlatRange], where: str) -> None:
    live = {one.name: list(one.parameter.shape) for one in own}
    wrong = sorted(name for name in live.keys() | manifest.shapes.keys() if live.get(name) != manifest.shapes.get(name))
    if wrong:
        name = wrong[0]
        raise DataError(
            f"the checkpoint holds {name!r} as {manifest.shapes.get(name)}, the model needs {live.get(name)}",
            where=where,
            hint="the model's configuration changed since; use a new run, or the old configuration",
        )


def _stage(
    bucket: Bucket, *, place: Place, manifest: Manifest, own: list[FlatRange], wanted: list[str]
) -> tuple[dict[str, Tensor], str]:
    """Verified copies of this rank's ranges, or the reason why not. One part is in memory at a time."""
    total = sum(one.length for one in own)
    staged = {name: torch.empty(total, dtype=torch.float32) for name in wanted}
    filled = 0
    for part in manifest.parts:
        pieces = _overlaps(part, own=own)
        if not pieces:
            continue
        try:
            vectors = read_part(bucket, place.key, part=part)
        except GkrError as error:
            return {}, _reason(error, bucket=bucket, place=place)
        for source, target, length in pieces:
            filled += length
            for name in wanted:
                staged[name][target : target + length] = vectors[name][source : source + length]
    if filled != total:
        return {}, f"step {place.step} (e{place.epoch}-a{place.attempt}): {total - filled} elements are in no part"
    return staged, ""


def _overlaps(part: Part, *, own: list[FlatRange]) -> list[tuple[int, int, int]]:
    """(place in the part's vectors, place in this rank's vectors, elements) of everything that both hold."""
    targets: dict[str, tuple[int, int, int]] = {}
    cursor = 0
    for one in own:
        targets[one.name] = (one.start, one.length, cursor)
        cursor += one.length
    pieces: list[tuple[int, int, int]] = []
    cursor = 0
    for name, start, length in part.ranges:
        want_start, want_length, target = targets[name]
        low, high = max(start, want_start), min(start + length, want_start + want_length)
        if low < high:
            pieces.append((cursor + low - start, target + low - want_start, high - low))
        cursor += length
    return pieces


def _reason(error: GkrError, *, bucket: Bucket, place: Place) -> str:
    """Why this checkpoint is passed over. A store that cannot be reached is no damage: the newest checkpoint may be
    well, so this attempt ends and another tries again. A file that a disk does not give back is.
    """
    if not isinstance(error, DataError) and file_path(bucket.uri) is None:
        raise error
    return f"step {place.step} (e{place.epoch}-a{place.attempt}): {error.message}"
