"""Which sample stands at which position of a learner's endless order: a pure function, so a cursor is all the state.

Position p lies in epoch p // n; each epoch is a permutation of the n samples of its own, keyed by (manifest digest,
seed, learner, epoch). The permutation is a Feistel network over the smallest even number of bits that covers n,
walked along its cycle until it falls inside [0, n): any position is found in constant time and memory, at the
millionth sample as at the first. World size, worker count and prefetch never enter here. numpy only: loader workers
import this module.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def sample_ids(
    manifest_digest: str, *, n: int, seed: int, learner: str, positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Index in [0, n) of the sample at each position (>= 0), in the order of `positions`, which may span epochs."""
    if n < 1:
        raise ValueError(f"n is {n}; a dataset needs at least one sample")
    epochs, places = np.divmod(positions, n)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        keys = _round_keys(manifest_digest, seed, learner, int(epoch))
        indices[chosen] = _permute(places[chosen].astype(np.uint64), n=n, keys=keys).astype(np.int64)
    return indices


def _permute(values: NDArray[np.uint64], *, n: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    out = _feistel(values, half_bits=half_bits, keys=keys)
    outside = out >= n
    while outside.any():  # the domain is below 4n, so a cycle re-enters [0, n) after a few steps; it always does
        out[outside] = _feistel(out[outside], half_bits=half_bits, keys=keys)
        outside = out >= n
    return out


def _feistel(values: NDArray[np.uint64], *, half_bits: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right, key=key) & mask)
    return (left << bits) | right


def mix(values: NDArray[np.uint64], *, key: np.uint64) -> NDArray[np.uint64]:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014); wraps around by design."""
    mixed = (values + _GOLDEN) ^ key
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT_3)


@lru_cache(maxsize=64)
def _round_keys(manifest_digest: str, seed: int, learner: str, epoch: int) -> tuple[np.uint64, ...]:
    text = f"order/1\0{manifest_digest}\0{seed}\0{learner}\0{epoch}".encode()
    return tuple(np.frombuffer(blake2b(text, digest_size=8 * _ROUNDS).digest(), dtype="<u8"))
