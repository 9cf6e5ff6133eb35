"""A dataset in memory, ready to be put anywhere: the bytes of its shards under names that are their content's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from spec.errors import RefusedError
from spec.shards import Manifest, Sample, Shape, Shard, Splits, pack_shard, seal


@dataclass(frozen=True)
class Content:
    """What a manifest says besides its shards."""

    name: str
    source: str
    recipe: str
    shape: Shape
    labels: Sequence[str]


@dataclass(frozen=True)
class Samples:
    """Both splits, in order."""

    train: list[Sample]
    test: list[Sample]


@dataclass(frozen=True)
class File:
    """One shard."""

    name: str
    samples: int
    data: bytes
    sha256: str


@dataclass(frozen=True)
class Packed:
    """All of a dataset."""

    manifest: Manifest
    folder: str
    """Of the shards, beside the manifest."""
    files: list[File]


def pack(content: Content, *, samples: Samples, shard_samples: int) -> Packed:
    """The same samples give the same bytes and names."""
    files = {
        "train": _files(samples.train, name="train", shape=content.shape, size=shard_samples),
        "test": _files(samples.test, name="test", shape=content.shape, size=shard_samples),
    }
    every = [*files["train"], *files["test"]]
    folder = f"shards-{hashlib.sha256(''.join(file.sha256 for file in every).encode()).hexdigest()[:16]}"
    manifest = Manifest(
        name=content.name,
        source=content.source,
        recipe=content.recipe,
        image_height=content.shape.height,
        image_width=content.shape.width,
        image_channels=content.shape.channels,
        labels=list(content.labels),
        splits=Splits(train=_shards(files["train"], folder), test=_shards(files["test"], folder)),
    )
    return Packed(manifest=seal(manifest), folder=folder, files=every)


def refuse_other(manifest: Manifest, *, content: Content, where: str) -> None:
    """RefusedError if this is not the dataset that was to be made."""
    if (manifest.source, manifest.recipe) != (content.source, content.recipe):
        raise RefusedError(
            f"another dataset is there: {manifest.source!r} by {manifest.recipe!r}",
            where=where,
            hint="name another --manifest, or remove that folder if nothing trains on it",
        )


def _files(samples: Sequence[Sample], *, name: str, shape: Shape, size: int) -> list[File]:
    files: list[File] = []
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        data = pack_shard(part, shape=shape)
        files.append(File(f"{name}-{start // size:05d}.shard", len(part), data, hashlib.sha256(data).hexdigest()))
    return files


def _shards(files: Sequence[File], folder: str) -> list[Shard]:
    return [
        Shard(path=f"{folder}/{file.name}", samples=file.samples, bytes=len(file.data), sha256=file.sha256)
        for file in files
    ]
