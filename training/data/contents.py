"""The samples of a source by number, each written where it is wanted, whatever the dataset's format.

Two formats: `raw`, pixels (or text) of one size as they lie there, and `tar`, encoded images of any size that are
cropped to the wanted one. What cannot be used although it was read raises `storage.encoded.Unusable`; what cannot be
read, or is wrong with the dataset as a whole, is a DataError. A raw dataset is verified whole when it is
opened, so damage in it is always an error. numpy and Pillow only: loader workers import this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spec.shard_bytes import Shape
from storage.encoded import EncodedImages, Unusable
from storage.shard_files import Origin, ShardFile, ShardFiles
from training.data.features import Stored, StoredRows
from training.data.plan import Source
from training.data.reader import SplitReader


class Look(NamedTuple):
    """Which part of an image is shown, and how; the middle as it is, if nothing is said."""

    across: float = 0.5
    down: float = 0.5
    mirrored: bool = False


MIDDLE = Look()


class Known(NamedTuple):
    """What is known of a sample besides its pixels."""

    id: int
    label: int
    caption: str
    embedding: NDArray[np.float32] | None = None
    """Of the caption, if it was computed ahead and is wanted."""


@dataclass(frozen=True)
class SourceFiles:
    """One split of one dataset on this machine. Travels to the worker, so plain values only."""

    where: str
    """URI of the manifest, for messages."""
    digest: str
    """Of the manifest."""
    order: str
    """What the plan knows it by: the same, unless there are several buckets."""
    samples: int
    shards: tuple[ShardFile, ...]
    """Of the split; of a tar dataset, all."""
    shape: Shape
    index: str = ""
    """Path of the index of a tar dataset."""
    index_samples: int = 0
    first_row: int = 0
    """Where in the index the split begins."""
    buckets: str = ""
    """Path of the table that gives each sample its bucket, one byte each."""
    origin: Origin | None = None
    """Where shards come from that are not on this machine."""
    embeddings: Stored | None = None
    """Of captions, computed ahead."""

    def source(self) -> Source:
        """As the plan sees it."""
        table = np.memmap(self.buckets, dtype=np.uint8, mode="r", shape=(self.samples,)) if self.buckets else None
        return Source(self.order, self.samples, table)


class Contents(Protocol):
    """Random access to a source's samples."""

    def fill(self, out: NDArray[np.uint8], sample: int, *, look: Look = MIDDLE) -> Known:
        """Write sample number `sample` into `out` [height, width, channels]."""
        ...

    def expect(self, samples: Iterable[int]) -> None:
        """Told which samples will be asked for next: what has to come from afar comes at once."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


def open_contents(files: SourceFiles) -> Contents:
    """Of either format."""
    return TarContents(files) if files.index else RawContents(files)


class RawContents:
    """Pixels or text of one size, as they are: `look` is not asked."""

    def __init__(self, files: SourceFiles) -> None:
        self._reader = SplitReader(ShardFiles(files.shards, origin=files.origin), shape=files.shape)

    def fill(self, out: NDArray[np.uint8], sample: int, *, look: Look = MIDDLE) -> Known:
        found = self._reader[sample]
        out[...] = np.frombuffer(found.pixels, dtype=np.uint8).reshape(out.shape)
        return Known(found.id, found.label, found.caption)

    def expect(self, samples: Iterable[int]) -> None:
        self._reader.expect(samples)

    def close(self) -> None:
        self._reader.close()


class TarContents:
    """Encoded images, cropped to the shape of `out`. A sample's id is its row in the index."""

    def __init__(self, files: SourceFiles) -> None:
        self._first = files.first_row
        shards = ShardFiles(files.shards, origin=files.origin)
        self._images = EncodedImages(Path(files.index), samples=files.index_samples, files=shards)
        self._embeddings = StoredRows(files.embeddings, origin=files.origin) if files.embeddings else None

    def fill(self, out: NDArray[np.uint8], sample: int, *, look: Look = MIDDLE) -> Known:
        row = self._first + sample
        text = self._images.fill(out, row, across=look.across, down=look.down)
        if look.mirrored:
            out[...] = out[:, ::-1].copy()
        embedding = self._embeddings.read(row) if self._embeddings else None
        if embedding is not None and not np.isfinite(embedding).all():
            raise Unusable("embedding")
        return Known(row, _label(text), str(text.get("caption") or ""), embedding)

    def expect(self, samples: Iterable[int]) -> None:
        rows = [self._first + sample for sample in samples]
        self._images.expect(rows)
        if self._embeddings:
            self._embeddings.expect(rows)

    def close(self) -> None:
        self._images.close()
        if self._embeddings:
            self._embeddings.close()


def _label(text: dict[str, Any]) -> int:
    label = text.get("label")
    return label if isinstance(label, int) else 0
