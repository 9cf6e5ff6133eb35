"""A dataset: a manifest that names its shards by content, and the bytes of a shard.

`services.prepare` writes it; loaders, evaluation and preflight read it. The manifest lies beside its shards and holds
the sha256 of each, so its own digest names every byte of the dataset. The bytes of a shard are described in
`spec.shard_bytes`, which loader workers import without this module; everybody else imports from here. A dataset of
encoded images (`format: tar`) has the same manifest; its shards and its index are read by `storage.tar_shards` and
`storage.index`. Only files are read here: `storage.datasets` brings the datasets of other stores to this machine.
Nothing here writes, and nothing here may import numpy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, ValidationError, model_validator

from spec.base import Record, first_fault
from spec.errors import DataError
from spec.shard_bytes import REMEDY, Sample, Shape, ShardView, pack_shard

__all__ = [
    "Feature", "Manifest", "Sample", "Shape", "Shard", "ShardView", "Split", "Splits",
    "open_manifest", "pack_shard", "parse_manifest", "path_of", "read_samples", "read_shard", "seal",
]  # fmt: skip

Split = Literal["train", "test"]
_VALUE_BYTES = 4


class Shard(Record):
    """One file of samples."""

    path: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$")
    """Relative to the manifest's folder; never outside it."""
    samples: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Splits(Record):
    """The samples by use; `test` is never trained on."""

    train: list[Shard]
    test: list[Shard]


class Feature(Record):
    """What an encoder computed for every sample, in the order of the index: train before test."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    of: Literal["caption", "image"]
    """What was encoded."""
    encoder: str = Field(min_length=1)
    """Fingerprint of the encoder's weights and settings; values of two fingerprints are never mixed."""
    dtype: Literal["float32"] = "float32"
    """Little-endian."""
    shape: list[int] = Field(min_length=1)
    """Of one sample's value."""
    files: list[Shard]
    """One file beside each shard; rows lie one behind the other, without a header."""


class Manifest(Record):
    """What a dataset consists of."""

    version: Literal[1] = 1
    name: str
    source: str
    """What it was prepared from."""
    recipe: str
    """Everything that went into its making besides the source; equal recipes give equal bytes."""
    image_height: int = Field(ge=1)
    """Of every image, or of the highest one of `format: tar`."""
    image_width: int = Field(ge=1)
    """Of every image, or of the widest one of `format: tar`."""
    image_channels: int = Field(ge=1)
    labels: list[str]
    """Name of each label, in label order."""
    splits: Splits
    # What a raw dataset does not have is not written: its manifests keep their bytes and digests.
    format: Literal["raw", "tar"] = Field(default="raw", exclude_if=lambda value: value == "raw")
    """`raw`: pixels of one size (`spec.shard_bytes`); `tar`: encoded images of any size, and an index."""
    index: Shard | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of `format: tar`: the file of `storage.index`, a row for each sample of all shards, train before test."""
    features: list[Feature] = Field(default=[], exclude_if=lambda value: not value)
    """What encoders computed ahead."""
    digest: str = ""
    """sha256 over the canonical JSON of all other fields; names the content."""

    @model_validator(mode="after")
    def _index_fits(self) -> Self:
        if (self.format == "tar") != (self.index is not None):
            raise ValueError("a dataset has an index exactly if its format is tar")
        shards = [*self.splits.train, *self.splits.test]
        if self.index is not None and self.index.samples != sum(shard.samples for shard in shards):
            raise ValueError(f"the index has {self.index.samples} samples, the shards have another number")
        for feature in self.features:
            row = math.prod(feature.shape) * _VALUE_BYTES
            wanted = [(shard.samples, shard.samples * row) for shard in shards]
            if [(file.samples, file.bytes) for file in feature.files] != wanted:
                raise ValueError(f"feature {feature.name} has not one value for each sample: training would miss some")
        return self

    @property
    def shape(self) -> Shape:
        """Pixels of one image."""
        return Shape(self.image_height, self.image_width, self.image_channels)

    def shards(self, split: Split) -> list[Shard]:
        """The files of one split, in sample order."""
        return self.splits.train if split == "train" else self.splits.test

    def count(self, split: Split) -> int:
        """Samples of one split."""
        return sum(shard.samples for shard in self.shards(split))

    def rows(self, split: Split) -> range:
        """Where one split stands in the index, which numbers the samples of both."""
        first = 0 if split == "train" else self.count("train")
        return range(first, first + self.count(split))


def seal(manifest: Manifest) -> Manifest:
    """The manifest with the digest of its content."""
    return manifest.model_copy(update={"digest": _digest_of(manifest.model_dump(mode="json"))})


def path_of(uri: str) -> Path:
    """The path that a `file:` URI names."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise DataError(
            f"{uri!r} is not a file: URI",
            hint="write file:///absolute/path/manifest.json; the datasets of other stores are fetched first",
        )
    path = Path(unquote(parts.path))
    if not path.is_absolute():
        raise DataError(f"{uri!r} is not absolute", hint="write file:///absolute/path/manifest.json")
    return path


def open_manifest(uri: str) -> Manifest:
    """Read a manifest and check that it is the document that was written."""
    path = path_of(uri)
    return parse_manifest(_read(path, what="the dataset's manifest"), where=str(path))


def parse_manifest(text: bytes, *, where: str) -> Manifest:
    """A manifest from its bytes, if it is the document that was written."""
    try:
        document: Any = json.loads(text)
        manifest = Manifest.model_validate(document)
    except ValueError as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else str(error)
        raise DataError(f"the dataset's manifest cannot be read: {reason}", where=where, hint=REMEDY) from error
    # The digest is taken over the document as found, so that fields which a newer writer added stay part of it.
    actual = _digest_of(document)
    if actual != manifest.digest:
        raise DataError(
            f"the manifest's content has digest {actual[:12]}, it claims {manifest.digest[:12]}: it was changed",
            where=where,
            hint=REMEDY,
        )
    return manifest


def read_shard(shard: Shard, *, uri: str, manifest: Manifest) -> ShardView:
    """One shard of the manifest at `uri`, read whole and compared with its digest."""
    path = path_of(uri).parent / shard.path
    if manifest.format != "raw":
        raise DataError(
            f"the shard's format is {manifest.format}; here only pixels of one size can be read",
            where=str(path),
            hint="name a dataset of format raw; `gkr data inspect` shows a dataset's format",
        )
    data = _read(path, what="a shard of the dataset")
    if len(data) != shard.bytes:
        raise DataError(
            f"the shard has {len(data)} bytes, the manifest says {shard.bytes}", where=str(path), hint=REMEDY
        )
    actual = hashlib.sha256(data).hexdigest()
    if actual != shard.sha256:
        raise DataError(
            f"the shard is corrupt: sha256 {actual[:12]}, the manifest says {shard.sha256[:12]}",
            where=str(path),
            hint=REMEDY,
        )
    view = ShardView(data, where=str(path))
    if view.head.shape != manifest.shape or len(view) != shard.samples:
        raise DataError(
            "the shard has another image shape or sample count than its manifest", where=str(path), hint=REMEDY
        )
    return view


def read_samples(uri: str, *, split: Split) -> Iterator[Sample]:
    """All samples of a split in order, each shard verified as it is reached."""
    manifest = open_manifest(uri)
    for shard in manifest.shards(split):
        yield from read_shard(shard, uri=uri, manifest=manifest)


def _read(path: Path, *, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{what} does not exist", where=str(path), hint=REMEDY) from error
    except OSError as error:
        raise DataError(
            f"{what} cannot be read: {error.strerror}", where=str(path), hint="check the path and its permissions"
        ) from error


def _digest_of(document: dict[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    ).hexdigest()
