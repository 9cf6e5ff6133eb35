"""Embeddings of captions that were computed when the dataset was prepared: one row for each sample, beside its shard.

Promises: all rows of a learner come from one encoder, whose fingerprint is told; a dataset of which a file of rows is
missing or has another size is refused before training begins. A file is compared with its digest when it is first
touched, unless it is very large or lies in another store. numpy only: loader workers import this module.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from spec.errors import ConfigError, DataError
from spec.shard_bytes import REMEDY
from storage.shard_files import HASHED_BYTES, Origin, ShardFile, ShardFiles

CAPTION_EMBEDDING = "caption_embedding"
"""Name of the feature in the manifest."""
_COMMAND = "gkr data prepare ... --embed captions --encoder ..."
_VALUE = np.dtype("<f4")


@dataclass(frozen=True)
class Stored:
    """Embeddings of all captions of a dataset. Travels to the worker, so plain values only."""

    encoder: str
    """Fingerprint."""
    width: int
    files: tuple[ShardFile, ...]
    """In the order of the index."""


class StoredRows:
    """Random access to the rows."""

    def __init__(self, stored: Stored, *, origin: Origin | None) -> None:
        self._files = ShardFiles(stored.files, origin=origin)
        self._row_bytes = stored.width * _VALUE.itemsize
        self._ends = list(accumulate(one.samples for one in stored.files))
        self._verified = set[int]()

    def read(self, row: int) -> NDArray[np.float32]:
        """The embedding of one row of the index, [width]. DataError if it is not there."""
        place = self._place(row)
        try:
            return self._read(*place)
        except DataError:
            if not self._files.renew(place[0]):
                raise
            return self._read(*place)

    def expect(self, rows: Iterable[int]) -> None:
        """Told which rows will be read next."""
        self._files.expect(self._place(row) for row in rows)

    def check_sizes(self) -> None:
        """DataError if a file is missing or has another size than the manifest says."""
        for number, file in enumerate(self._files.shards):
            size = self._files.size(number)
            if size != file.bytes:
                raise self._damaged(number, f"has {size} bytes, the manifest says {file.bytes}")

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _place(self, row: int) -> tuple[int, int, int]:
        """Number of the file, offset and size in it."""
        number = bisect_right(self._ends, row)
        return number, (row - (self._ends[number - 1] if number else 0)) * self._row_bytes, self._row_bytes

    def _read(self, number: int, offset: int, size: int) -> NDArray[np.float32]:
        if number not in self._verified:
            self._verify(number)
        data = self._files.read(number, offset=offset, size=size)
        if len(data) != size:
            raise self._damaged(number, "ends before its last row")
        return np.frombuffer(data, dtype=_VALUE)

    def _verify(self, number: int) -> None:
        file = self._files.shards[number]
        if file.bytes <= HASHED_BYTES and self._files.is_whole(number):
            data = self._files.read(number, offset=0, size=file.bytes)
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise self._damaged(number, "is not the one that was written")
        self._verified.add(number)

    def _damaged(self, number: int, what: str) -> DataError:
        path = self._files.shards[number].path
        return DataError(f"a file of embeddings {what}: samples would be trained without", where=path, hint=REMEDY)


def agreed(found: Sequence[tuple[str, Stored | None]], *, width: int | None) -> str:
    """Fingerprint of the encoder whose stored embeddings training takes; empty if it has to ask for them.

    `found`: URI and embeddings of each dataset. `width`: features that the model needs; none if it needs no embeddings.
    ConfigError if datasets that are mixed disagree, or the model needs other ones.
    """
    stored = [(uri, one) for uri, one in found if one is not None]
    if width is None or not stored:
        return ""
    first_uri, first = stored[0]
    for uri, one in stored:
        if one.encoder != first.encoder:
            raise ConfigError(
                f"its embeddings are of encoder {one.encoder[:12]}, those of {first_uri} of {first.encoder[:12]};"
                " values of two encoders are never mixed",
                where=uri,
                hint=f"prepare one of them again, under another name: {_COMMAND}",
            )
        if one.width != width:
            raise ConfigError(
                f"its embeddings have {one.width} features, the model needs {width}",
                where=uri,
                hint=f"set train.model.text_width to {one.width}, or prepare it again with another --encoder",
            )
    return first.encoder if len(stored) == len(found) else ""


def check_encoder(stored: str, *, asked: str, where: str) -> None:
    """ConfigError if the dataset's embeddings are not of the encoder that the experiment's service answers with."""
    if stored != asked:
        raise ConfigError(
            f"the dataset's embeddings are of encoder {stored[:12]}, the experiment's encoding service is {asked[:12]}:"
            " the model would learn from the one and be asked by the other",
            where=where,
            hint="give the service the `model` that the dataset was prepared with, or prepare the dataset again, under"
            f" another name: {_COMMAND}",
        )
