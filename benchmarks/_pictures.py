"""Pictures to measure loaders with: as much texture as a photograph has, so that they take as long to decode."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from tests.builders.tar_datasets import Picture, make_tar_dataset

DIFFERENT = 64
PER_SHARD = 128


def make_photos(folder: Path, *, sizes: Sequence[tuple[int, int]], count: int) -> str:
    """URI of the manifest of a tar dataset; sizes take turns, and every DIFFERENT pictures come again."""
    random = np.random.default_rng(0)
    photos = [photo(random, width, height) for width, height in itertools.islice(itertools.cycle(sizes), DIFFERENT)]
    return make_tar_dataset(folder, train=(photos * -(-count // DIFFERENT))[:count], per_shard=PER_SHARD)


def photo(random: Generator, width: int, height: int) -> Picture:
    """A JPEG of 1.9 bits per pixel: smooth with some noise."""
    small = Image.fromarray(random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=85)
    return Picture(file.getvalue(), width, height, "jpg")
