"""Small pictures that differ from each other, in the forms in which people bring them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from spec.shards import open_manifest, path_of
from storage.index import open_index
from storage.shard_files import in_place
from storage.tar_shards import TarShards

FORMS = ("JPEG", "PNG", "WEBP")
ENDINGS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}


def picture(number: int, *, width: int = 32, height: int = 24) -> np.ndarray:
    """Smooth blobs [height, width, 3] that no other number has."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def encoded(pixels: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    """The image's file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def image_folder(folder: Path, *, count: int) -> str:
    """Pictures of all three formats in folders `a` and `b`, most with a caption; a broken one, a cut one, a copy."""
    for number in range(count):
        form = FORMS[number % 3]
        path = folder / "ab"[number % 2] / f"{number:04d}.{ENDINGS[form]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number, width=24 + number % 9, height=24 + number % 5), form))
        if number % 4:
            path.with_suffix(".txt").write_text(f"picture {number}, été")
        if number % 4 == 3:
            path.with_suffix(".json").write_text(json.dumps({"mood": number / 7, "label": "x"}))
    (folder / "b" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    (folder / "b" / "cut.png").write_bytes(encoded(picture(99))[:300])
    (folder / "copy.png").write_bytes((folder / "b" / "0001.png").read_bytes())
    return folder.as_uri()


SHAPES = ((40, 40), (60, 30), (30, 60), (48, 36), (36, 50))
"""Width and height: squares, some twice as long as wide, and some between."""


def photographs(folder: Path, *, count: int) -> str:
    """JPEG files of several shapes, each with a caption and one of ten labels."""
    folder.mkdir(parents=True)
    for number in range(count):
        width, height = SHAPES[number % len(SHAPES)]
        path = folder / f"{number:04d}.jpg"
        path.write_bytes(encoded(picture(number, width=width, height=height), "JPEG", quality=90))
        path.with_suffix(".json").write_text(json.dumps({"caption": f"photograph {number}", "label": number % 10}))
    return folder.as_uri()


def image_tar(path: Path, *, numbers: range) -> None:
    """As WebDataset has it."""
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            members = {
                "png": encoded(picture(number)),
                "txt": f"picture {number}".encode(),
                "cls": b"%d" % (number % 3),
            }
            for ending, data in members.items():
                info = tarfile.TarInfo(f"{number:04d}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def image_parquet(path: Path, *, numbers: range) -> None:
    """With a column of bytes and a column of captions."""
    rows = [{"image": {"bytes": encoded(picture(n)), "path": f"{n}"}, "caption": f"picture {n}"} for n in numbers]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)


def read_tar_dataset(uri: str) -> list[tuple[bytes, dict[str, Any], tuple[int, int]]]:
    """Image, text, and (width, height) of the index, of all samples in the order of the index; verifies each."""
    manifest = open_manifest(uri)
    assert manifest.index is not None
    folder = path_of(uri).parent
    rows = open_index(folder / manifest.index.path, samples=manifest.index.samples)
    shards = TarShards(in_place(folder / one.path for one in [*manifest.splits.train, *manifest.splits.test]))
    found = [(*shards.read(row), (int(row["width"]), int(row["height"]))) for row in rows]
    shards.close()
    return found
