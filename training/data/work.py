"""From datasets, a model and a place in the world to what a loader works with: its plan, and its workers' work.

Everything that can be refused is refused here, before a process is started. Tables that give each sample its bucket are
made once per machine, beside the copies of datasets, and named by everything that decides them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec.buckets import Bucket
from spec.errors import ConfigError, DataError
from spec.plan import LearnerPlan
from spec.shard_bytes import REMEDY
from spec.shards import Manifest, Split, open_manifest, path_of
from spec.train import AnyModelConfig, ModelConfig
from storage.datasets import default_cache, local_manifest, origin_of, shard_files
from storage.folder import appearing
from storage.index import open_index
from storage.shard_files import HASHED_BYTES
from training.data.buckets import bucket_codes, join_rare
from training.data.contents import SourceFiles
from training.data.features import CAPTION_EMBEDDING, Stored, StoredRows, agreed
from training.data.mixture import Mixture, Segment
from training.data.plan import Plan, Start, window_of
from training.data.worker import TimeDistribution, Work

_COUNTED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Order:
    """What decides which samples a learner gets, and when."""

    manifests: Sequence[str]
    """URIs, one per source."""
    seed: int
    learner: str
    batch: int
    """Samples of the learner's batch, where `buckets` do not say."""
    split: Split = "train"
    mixture: Sequence[Segment] = ()
    """Weights of the sources from positions on; default: equal."""
    buckets: Sequence[Bucket] = ()
    """Sizes of images; default: the model's."""
    starts: Sequence[Start] = ()
    """From a checkpoint: where windows begin."""


@dataclass(frozen=True)
class Delivery:
    """How samples are handed over."""

    model: AnyModelConfig
    time_distribution: TimeDistribution = "uniform"
    is_plain: bool = False
    """Images stay uint8 and bring no noise: the trainer makes both on its device."""
    crop: bool = True
    flip: bool = False


class Planned(NamedTuple):
    """A learner's plan and its workers' work."""

    plan: Plan
    work: Work
    largest: int
    """Bytes of a rank's largest part of a batch."""
    joined: NDArray[np.int16]
    """Which bucket each bucket's samples go to."""
    encoder: str
    """Fingerprint of what computed the embeddings that batches bring; empty: they bring none."""


def mixture_of(learner: LearnerPlan) -> list[Segment]:
    """The weights of a learner's datasets, as the plan of the run has them."""
    return [Segment(0, tuple(learner.data_weights))] if learner.data_weights else []


def plan_work(order: Order, *, delivery: Delivery, world_size: int, cache: Path | None) -> Planned:
    """Open all datasets. ConfigError or DataError for what cannot be trained on."""
    model = delivery.model
    height, width, channels = model.sample_shape
    buckets = list(order.buckets) or [Bucket(width, height, order.batch)]
    for bucket in buckets:
        _check_batch(bucket.batch, world_size=world_size, is_only=not order.buckets)
    sources = [_open(uri, order=order, model=model, cache=cache) for uri in order.manifests]
    encoder = agreed([(one.where, one.embeddings) for one in sources], width=model.embedding_width)
    sources = [_with_embeddings(one) if encoder else replace(one, embeddings=None) for one in sources]
    joined = np.arange(len(buckets), dtype=np.int16)
    if len(buckets) > 1:
        sources, joined = _with_tables(sources, buckets=buckets, folder=(cache or default_cache()) / "buckets")
    mixture = Mixture(order.mixture or [Segment(0, (1,) * len(sources))])
    plan = Plan(
        [one.source() for one in sources],
        mixture=mixture,
        seed=order.seed,
        learner=order.learner,
        batches=[bucket.batch for bucket in buckets],
        window=window_of(sum(one.samples for one in sources), batch=max(one.batch for one in buckets)),
        starts=order.starts,
    )
    work = Work(
        sources=tuple(sources),
        sizes=tuple((bucket.width, bucket.height) for bucket in buckets),
        channels=channels,
        seed=order.seed,
        learner=order.learner,
        condition_dropout=model.condition_dropout if isinstance(model, ModelConfig) else 0.0,
        time_distribution=delivery.time_distribution,
        is_text=model.kind == "lm",
        is_plain=delivery.is_plain and model.kind != "lm",
        crop=delivery.crop,
        flip=delivery.flip,
        embedding=(model.embedding_width or 0) if encoder else 0,
    )
    largest = max(work.form(number, -(-one.batch // world_size)).bytes for number, one in enumerate(buckets))
    return Planned(plan, work, largest, joined, encoder)


def check_shape(manifest: Manifest, *, model: AnyModelConfig, where: str) -> None:
    """ConfigError unless the dataset's samples can be brought to the model's shape."""
    if manifest.format == "tar":
        if model.kind == "lm" or model.channels not in (1, 3):
            wanted = "text" if model.kind == "lm" else f"images of {model.channels} channels"
            raise ConfigError(
                f"the dataset holds encoded images, which become 1 or 3 channels; the model is for {wanted}",
                where=where,
                hint="set train.model.channels: 3, or take another dataset",
            )
        return
    have, want = (manifest.image_height, manifest.image_width, manifest.image_channels), model.sample_shape
    if have != want:
        change = (
            f"train.model.context: {have[1] - 1}"
            if model.kind == "lm"
            else f"train.model.image_size: {have[0]} and train.model.channels: {have[2]}"
        )
        raise ConfigError(
            f"samples are {' x '.join(map(str, have))} in the dataset, {' x '.join(map(str, want))} in the model",
            where=where,
            hint=f"set {change}, or take another dataset",
        )


def open_source(uri: str, *, split: Split, cache: Path | None) -> tuple[Manifest, SourceFiles]:
    """One split of a dataset; its index is on this machine, its shards come as they are read."""
    local = local_manifest(uri, cache=cache, splits=())
    manifest = open_manifest(local)
    return manifest, files_of(manifest, uri=uri, local=local, split=split)


def files_of(manifest: Manifest, *, uri: str, local: str, split: Split) -> SourceFiles:
    """One split of a dataset whose manifest and index are at `local`; who reads its shards brings them there."""
    folder = path_of(local).parent
    # The index numbers the shards of both splits.
    shards = manifest.shards(split) if manifest.index is None else [*manifest.splits.train, *manifest.splits.test]
    files = SourceFiles(
        where=uri,
        digest=manifest.digest,
        order=manifest.digest,
        samples=manifest.count(split),
        shards=shard_files(shards, folder=folder),
        shape=manifest.shape,
        origin=origin_of(uri, local=local),
    )
    if not files.samples:
        raise DataError(f"the dataset has no samples in its split {split}", where=uri, hint="take another dataset")
    if manifest.index is None:
        return files
    path = folder / manifest.index.path
    open_index(path, samples=manifest.index.samples)
    if manifest.index.bytes <= HASHED_BYTES and hashlib.sha256(path.read_bytes()).hexdigest() != manifest.index.sha256:
        raise DataError("the dataset's index is not the one that was written", where=str(path), hint=REMEDY)
    return replace(
        files,
        index=str(path),
        index_samples=manifest.index.samples,
        first_row=manifest.rows(split).start,
        embeddings=_embeddings_of(manifest, folder=folder),
    )


def _embeddings_of(manifest: Manifest, *, folder: Path) -> Stored | None:
    feature = next((one for one in manifest.features if one.name == CAPTION_EMBEDDING), None)
    if feature is None:
        return None
    return Stored(feature.encoder, math.prod(feature.shape), shard_files(feature.files, folder=folder))


def _with_embeddings(files: SourceFiles) -> SourceFiles:
    """The same, if no file of them is missing."""
    if files.origin is None and files.embeddings is not None:
        with closing(StoredRows(files.embeddings, origin=None)) as rows:
            rows.check_sizes()
    return files


def _open(uri: str, *, order: Order, model: AnyModelConfig, cache: Path | None) -> SourceFiles:
    manifest, files = open_source(uri, split=order.split, cache=cache)
    if manifest.format == "tar" or not order.buckets:
        check_shape(manifest, model=model, where=uri)
    elif _own_bucket(files, order.buckets) is None or files.shape.channels != model.sample_shape[2]:
        shape = files.shape
        raise ConfigError(
            f"samples are {shape.height} x {shape.width} x {shape.channels}, and no bucket of the model has this shape",
            where=uri,
            hint="add such a bucket, or prepare the dataset from encoded images",
        )
    return files


def _own_bucket(files: SourceFiles, buckets: Sequence[Bucket]) -> int | None:
    """Of pixels of one size."""
    sizes = [(one.width, one.height) for one in buckets]
    own = (files.shape.width, files.shape.height)
    return sizes.index(own) if own in sizes else None


def _with_tables(
    sources: list[SourceFiles], *, buckets: Sequence[Bucket], folder: Path
) -> tuple[list[SourceFiles], NDArray[np.int16]]:
    """The sources with the bucket of each sample; buckets too rare for one batch are joined with others, as told."""
    sizes = ",".join(f"{one.width}x{one.height}" for one in buckets)
    made = [
        _table(
            one,
            text=f"{one.digest} {one.first_row} {sizes}",
            folder=folder,
            make=lambda one=one: codes_of(one, buckets),
        )
        for one in sources
    ]
    counts = np.sum([_count(_table_of(one), of=len(buckets)) for one in made], axis=0)
    target = join_rare(counts.tolist(), buckets=buckets, least=max(one.batch for one in buckets))
    if (target == np.arange(len(buckets))).all():
        return made, target
    joined = target.astype(np.uint8)
    return [
        _table(one, text=f"{one.order} {joined.tolist()}", folder=folder, make=lambda one=one: joined[_table_of(one)])
        for one in made
    ], target


def codes_of(files: SourceFiles, buckets: Sequence[Bucket]) -> NDArray[np.uint8]:
    """The bucket of each sample, by its size alone."""
    if not files.index:
        return np.full(files.samples, _own_bucket(files, buckets), dtype=np.uint8)
    rows = open_index(Path(files.index), samples=files.index_samples)
    return bucket_codes(rows[files.first_row : files.first_row + files.samples], buckets=buckets)


def _table(files: SourceFiles, *, text: str, folder: Path, make: Callable[[], NDArray[np.uint8]]) -> SourceFiles:
    order = hashlib.sha256(f"buckets/1 {text}".encode()).hexdigest()
    path = folder / f"{order}.u8"
    if not path.exists() or path.stat().st_size != files.samples:  # a crash of the machine may leave it cut off
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as temporary:
            make().tofile(temporary)
    return replace(files, order=order, buckets=str(path))


def _count(table: NDArray[np.integer], *, of: int) -> NDArray[np.int64]:
    """How often each of `of` codes occurs; in pieces, since numpy makes each code eight bytes to count it."""
    counts = np.zeros(of, dtype=np.int64)
    for start in range(0, len(table), _COUNTED_AT_ONCE):
        counts += np.bincount(table[start : start + _COUNTED_AT_ONCE], minlength=of)
    return counts


def _table_of(files: SourceFiles) -> NDArray[np.integer]:
    table = files.source().buckets
    assert table is not None
    return table


def _check_batch(batch: int, *, world_size: int, is_only: bool) -> None:
    """With several sizes of batches ranks share them as evenly as can be: the mean over a batch is that of its rows."""
    if batch < world_size:
        raise ConfigError(
            f"a batch of {batch} cannot be shared by {world_size} ranks",
            hint=f"set train.batch to at least {world_size}",
        )
    if is_only and batch % world_size:
        raise ConfigError(
            f"a batch of {batch} does not divide by {world_size} ranks; some would wait for the others at every step",
            hint=f"set train.batch to {batch + world_size - batch % world_size}",
        )
