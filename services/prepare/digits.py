"""The 1,797 handwritten digits that scikit-learn ships (8 x 8 pixels, 17 grey levels), split and captioned.

Held out are 72 scans of each digit, chosen by a hash of their numbers: 720 in all, two halves of 360 with equal
counts of every digit. The split's order goes round the digits, so every prefix of it is balanced too. Everything here
is deterministic.
"""

from __future__ import annotations

import importlib
import importlib.util
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.prepare.caption import DIGITS, describe, scale_of
from services.prepare.measure import measure
from services.prepare.packing import Samples
from spec.errors import ConfigError
from spec.shards import Sample, Shape

NAME = "digits"
SHAPE = Shape(8, 8, 1)
RECIPE = "digits/1: 72 of each digit held out, captions by terciles of weight, slant and size"
LABELS = DIGITS
HELD_OUT_PER_DIGIT = 72
_FULL_INK = 16


def load() -> Samples:
    """Read, split, measure and caption all scans."""
    scans, labels = _read()
    train, test = split(labels)
    strokes = [measure(scan / _FULL_INK) for scan in scans]
    scale = scale_of([strokes[number] for number in train])
    pixels = np.rint(scans * (255 / _FULL_INK)).astype(np.uint8)

    def sample(number: int) -> Sample:
        label = int(labels[number])
        caption = describe(strokes[number], label=label, sample=number, scale=scale)
        return Sample(id=number, label=label, caption=caption, pixels=pixels[number].tobytes())

    return Samples(train=[sample(number) for number in train], test=[sample(number) for number in test])


def split(labels: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Numbers of the training scans (ascending) and of the held-out ones (round the digits)."""
    held: list[list[int]] = []
    for digit in range(len(DIGITS)):
        numbers = np.flatnonzero(labels == digit).tolist()
        held.append(sorted(numbers, key=_lot)[:HELD_OUT_PER_DIGIT])
    test = [held[digit][turn] for turn in range(HELD_OUT_PER_DIGIT) for digit in range(len(DIGITS))]
    return sorted(set(range(len(labels))) - set(test)), test


def _lot(number: int) -> bytes:
    return blake2b(f"held-out/1\0{number}".encode(), digest_size=16).digest()


def _read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "the source sklearn-digits needs the package scikit-learn",
            hint="install the extra that brings it: pip install 'gkr[services]'",
        )
    # The file is read as it lies in the package: importing sklearn.datasets takes seconds, mostly for scipy.
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if path.exists():
        table = np.loadtxt(path, delimiter=",")
        return table[:, :-1].reshape(-1, SHAPE.height, SHAPE.width), table[:, -1].astype(np.int64)
    datasets: Any = importlib.import_module("sklearn.datasets")
    digits = datasets.load_digits()
    return np.asarray(digits.images, dtype=np.float64), np.asarray(digits.target, dtype=np.int64)
