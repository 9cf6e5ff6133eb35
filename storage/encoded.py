"""Images of a dataset of encoded ones, read by their row in its index and brought to a wanted size.

Promises: what cannot be used although it was read raises `Unusable` with a word for programs, and the caller decides
what takes its place; what cannot be read, or is wrong with the dataset as a whole, is a DataError. numpy and Pillow
only: loader workers import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from storage.images import ImageProblem, decode_into
from storage.index import open_index
from storage.shard_files import ShardFiles
from storage.tar_shards import DamagedError, TarShards

T = TypeVar("T")


class Unusable(Exception):  # noqa: N818 - a property of the data, not a failure of ours
    """A sample that another has to take the place of, or that is left out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EncodedImages:
    """Random access by row. Not safe for several threads."""

    def __init__(self, index: Path, *, samples: int, files: ShardFiles) -> None:
        """`samples`: of the whole index. `files`: the shards of both splits, as the index numbers them."""
        self._rows = open_index(index, samples=samples)
        self._shards = TarShards(files)

    def fill(self, out: NDArray[np.uint8], row: int, *, across: float = 0.5, down: float = 0.5) -> dict[str, Any]:
        """Write the image of a row into `out` [height, width, channels], cropped to its shape; the sample's text."""
        try:
            image, text = self._shards.read(self._rows[row])
            decode_into(out, image, across=across, down=down)
        except DamagedError as error:
            raise Unusable("checksum") from error
        except ImageProblem as problem:
            raise Unusable(problem.reason) from problem
        return text

    def expect(self, rows: Iterable[int]) -> None:
        """Told which rows will be asked for next: what has to come from afar comes at once."""
        self._shards.expect(self._rows[row] for row in rows)

    def close(self) -> None:
        """Close all files."""
        self._shards.close()


def fill_usable(pixels: NDArray[np.uint8], *, samples: range, fill: Callable[[NDArray[np.uint8], int], T]) -> list[T]:
    """Let `fill` write the first of `samples` that can be used into the rows of `pixels`, in order, until either is at
    its end; what it said of each."""
    found: list[T] = []
    for sample in samples:
        if len(found) == len(pixels):
            break
        with suppress(Unusable):
            found.append(fill(pixels[len(found)], sample))
    return found
