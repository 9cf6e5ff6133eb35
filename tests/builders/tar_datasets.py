"""Datasets of encoded images, written directly, so that a test decides what each sample is, damage included."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec.shards import Feature, Manifest, Shard, Splits, seal
from storage.index import ITEM, write_index
from storage.tar_shards import TarShardWriter


class Picture(NamedTuple):
    """An encoded image of a tar dataset."""

    data: bytes
    width: int
    height: int
    ending: str = "png"


def make_tar_dataset(
    folder: Path, *, train: Sequence[Picture], test: Sequence[Picture] = (), per_shard: int = 20,
    embeddings: NDArray[np.float32] | None = None, encoder: str = "encoder-1",
) -> str:  # fmt: skip
    """URI of the manifest of a new dataset of encoded images, each with the caption `picture NUMBER`.

    `embeddings`: of all captions, as if the encoder with this fingerprint had computed them ahead.
    """
    folder.mkdir()
    rows = np.zeros(len(train) + len(test), dtype=ITEM)
    shards: dict[str, list[Shard]] = {"train": [], "test": []}
    number = 0
    for split, pictures in (("train", train), ("test", test)):
        for start in range(0, len(pictures), per_shard):
            path = folder / f"{split}-{start:04d}.tar"
            with path.open("wb") as file:
                writer = TarShardWriter(file)
                for one in pictures[start : start + per_shard]:
                    text = {"caption": f"picture {number}", "label": number % 7}
                    placed = writer.add(f"{number:06d}", image=one.data, ending=one.ending, text=text)
                    at = len(shards["train"]) + len(shards["test"])
                    rows[number] = (placed.offset, at, placed.image_bytes, placed.text_bytes, placed.crc32,
                                    one.width, one.height)  # fmt: skip
                    number += 1
                size = writer.finish()
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            shards[split].append(Shard(path=path.name, samples=writer.samples, bytes=size, sha256=sha256))
    sha256 = write_index(folder / "index.bin", rows=rows)
    manifest = Manifest(
        name="pictures", source="made up", recipe="blobs", image_height=int(rows["height"].max()),
        image_width=int(rows["width"].max()), image_channels=3, labels=[str(one) for one in range(7)],
        splits=Splits(**shards), format="tar",
        index=Shard(path="index.bin", samples=number, bytes=number * ITEM.itemsize, sha256=sha256),
        features=[] if embeddings is None else [_feature(folder, embeddings, shards=shards, encoder=encoder)],
    )  # fmt: skip
    path = folder / "manifest.json"
    path.write_text(seal(manifest).write_json())
    return path.as_uri()


def _feature(folder: Path, rows: NDArray[np.float32], *, shards: dict[str, list[Shard]], encoder: str) -> Feature:
    files: list[Shard] = []
    first = 0
    for shard in [*shards["train"], *shards["test"]]:
        data = rows[first : first + shard.samples].tobytes()
        path = folder / f"{shard.path}.f32"
        path.write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        files.append(Shard(path=path.name, samples=shard.samples, bytes=len(data), sha256=sha256))
        first += shard.samples
    return Feature(name="caption_embedding", of="caption", encoder=encoder, shape=[rows.shape[1]], files=files)
