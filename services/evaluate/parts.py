"""What was measured of one run's images: a part per call, kept in a folder or bucket until the total is asked for.

Promises: a part counts once however often it is sent, because its name is (shard, sequence) and a file is never
overwritten; other images under a used name are refused; parts of two feature spaces are never added. A part holds
features on the grid of `services.evaluate.sums`, so the total is exact whichever replica made which part, and a
replica that dies takes nothing with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from spec.errors import DataError, RefusedError
from storage import Bucket, ExistsError

_SUFFIX = ".safetensors"
_AGAIN = "delete the run's folder and send its images again"


@dataclass(frozen=True)
class Part:
    """What is kept of some images."""

    features: NDArray[np.int32]
    """[images, width] on the grid."""
    right: NDArray[np.uint8]
    """[images], 1 where the classifier sees the label."""
    alike: NDArray[np.int32]
    """[images], or [0] if it was not asked for: cosine of image and caption on the grid."""

    def __len__(self) -> int:
        return len(self.features)


class Parts:
    """The parts of one run in one folder. `space` names what features were measured with."""

    def __init__(self, bucket: Bucket, *, space: str) -> None:
        self._bucket, self._space = bucket, space

    def add(self, part: Part, *, shard: int, sequence: int) -> bool:
        """Keep a part; False if this very part was kept before. RefusedError if its name holds other images."""
        key = f"{shard:06d}-{sequence:09d}{_SUFFIX}"
        space = np.frombuffer(hashlib.sha256(self._space.encode()).digest(), dtype=np.uint8)
        data = save({"features": part.features, "right": part.right, "alike": part.alike, "space": space})
        try:
            self._bucket.create(key, data)
        except ExistsError as error:
            if self._bucket.get(key).data == data:
                return False
            raise RefusedError(
                f"sequence {sequence} of shard {shard} was sent before with other images, or was measured by another"
                " classifier: counting both would count images twice",
                where=f"{self._bucket.uri}/{key}",
                hint="number the calls of a shard from 0, and give each new set of images a new run",
            ) from error
        return True

    def read(self) -> Iterator[Part]:
        """All parts; DataError if one is damaged, or was measured in another feature space."""
        space = hashlib.sha256(self._space.encode()).digest()
        for entry in self._bucket.list():
            where = f"{self._bucket.uri}/{entry.key}"
            try:
                found = load(self._bucket.get(entry.key).data)
                part = Part(found["features"], found["right"], found["alike"])
                own = found["space"].tobytes()
            except (SafetensorError, KeyError) as error:
                raise DataError(f"a part of an evaluation is damaged: {error}", where=where, hint=_AGAIN) from error
            if own != space:
                raise DataError(
                    "a part of an evaluation was measured with another classifier than this replica's: adding it up"
                    " would mix two feature spaces",
                    where=where,
                    hint=f"{_AGAIN}; replicas on like machines train the same classifier",
                )
            yield part
