"""Wire forms of displacements: float32, bfloat16, and int8 in blocks with one scale each (cross-region.md 1.7, 8.8).

Lossy forms are for displacements only, never for weights: a displacement is small beside the weights, so its rounding
is smaller still. Error as a share of the displacement's norm, Gaussian values: fp32 0, bf16 0.17 %, int8 0.7 %.
Promises sizes that follow from the element count alone, so that they can be checked before memory is taken; the same
bytes from the same values everywhere (little endian); and that a value that is not finite never decodes to a finite
one, so that the receiver can refuse it. bf16 and fp32 decode each element by itself; an int8 block is 256 elements of
the encoded array, wherever they lie in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt

from training.sync.layout import Floats

Codec = Literal["fp32", "bf16", "int8"]
Bytes = npt.NDArray[np.uint8]

BLOCK = 256
"""Elements that share a scale in int8."""
_STEPS = 127
_CHUNK = 1 << 16
"""Elements at a time: with their temporaries they stay in a core's cache. A multiple of BLOCK."""


def encoded_bytes(count: int, codec: Codec) -> int:
    """Size of the wire form of `count` elements."""
    match codec:
        case "fp32":
            return 4 * count
        case "bf16":
            return 2 * count
        case "int8":
            return 4 * _blocks(count) + count
    assert_never(codec)


def encode(array: Floats, codec: Codec, *, out: Bytes | None = None) -> Bytes:
    """The wire form of a one-dimensional float32 array. `out`: exactly `encoded_bytes` to write into.

    fp32 without `out` is a view of the array. bf16 rounds to nearest, ties to even; above its largest number it gives
    infinity. int8 writes the blocks' scales (float32, largest magnitude / 127), then the values.
    """
    values = np.ascontiguousarray(array, dtype="<f4")
    if codec == "fp32" and out is None:
        return values.view(np.uint8)
    target = np.empty(encoded_bytes(len(values), codec), np.uint8) if out is None else out
    _check_size(target.nbytes, count=len(values), codec=codec)
    match codec:
        case "fp32":
            target[:] = values.view(np.uint8)
        case "bf16":
            _encode_bf16(values, target.view("<u2"))
        case "int8":
            cut = 4 * _blocks(len(values))
            _encode_int8(values, target[:cut].view("<f4"), target[cut:].view(np.int8))
        case _:
            assert_never(codec)
    return target


def decode(data: memoryview | Bytes, out: Floats, codec: Codec, *, first: int = 0, count: int | None = None) -> None:
    """Write elements `first` to `first + len(out)` of the `count` encoded ones (default: all of them) to `out`."""
    total = len(out) if count is None else count
    wire = np.frombuffer(data, np.uint8)
    _check_size(wire.nbytes, count=total, codec=codec)
    last = first + len(out)
    if not 0 <= first <= last <= total:
        raise ValueError(f"elements {first} to {last} do not lie inside the {total} that were encoded")
    match codec:
        case "fp32":
            out[:] = wire.view("<f4")[first:last]
        case "bf16":
            _decode_bf16(wire.view("<u2")[first:last], out)
        case "int8":
            cut = 4 * _blocks(total)
            _decode_int8(wire[:cut].view("<f4"), wire[cut:].view(np.int8)[first:last], out, first=first)
        case _:
            assert_never(codec)


def measure_error(array: Floats, data: memoryview | Bytes, codec: Codec) -> float:
    """Error of the wire form of an array as a share of the norm, of the leading elements that fit a core's cache."""
    some = array[:_CHUNK]
    if codec == "fp32" or not some.any():
        return 0.0
    back = np.empty_like(some)
    decode(data, back, codec, count=len(array))
    return float(np.linalg.norm(back - some) / np.linalg.norm(some))


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _check_size(found: int, *, count: int, codec: Codec) -> None:
    wanted = encoded_bytes(count, codec)
    if found != wanted:
        raise ValueError(f"{count} elements in {codec} are {wanted} bytes, not {found}")


def _encode_bf16(values: Floats, target: npt.NDArray[np.uint16]) -> None:
    bits = values.view("<u4")
    scratch = np.empty(min(_CHUNK, len(values)), np.uint32)
    for start in range(0, len(values), _CHUNK):
        source = bits[start : start + _CHUNK]
        half = scratch[: len(source)]
        np.right_shift(source, 16, out=half)
        half &= 1
        half += 0x7FFF
        half += source
        half >>= 16
        target[start : start + _CHUNK] = half
        unknown = np.isnan(values[start : start + _CHUNK])
        if unknown.any():  # rounding may carry a NaN's bits into an infinity or a zero: keep it a (quiet) NaN
            target[start : start + _CHUNK][unknown] = (source[unknown] >> 16) | 0x40


def _decode_bf16(halves: npt.NDArray[np.uint16], out: Floats) -> None:
    bits = out.view("<u4")
    for start in range(0, len(out), _CHUNK):
        piece = bits[start : start + _CHUNK]
        piece[:] = halves[start : start + _CHUNK]
        piece <<= 16


def _encode_int8(values: Floats, scales: Floats, target: npt.NDArray[np.int8]) -> None:
    scratch = np.empty(min(_CHUNK, len(values)), np.float32)
    for start, stop in _pieces(0, len(values)):
        rows = values[start:stop].reshape(-1, min(BLOCK, stop - start))
        steps = scratch[: stop - start].reshape(rows.shape)
        scale = scales[start // BLOCK :][: len(rows)]
        np.abs(rows, out=steps).max(axis=1, out=scale)
        scale /= _STEPS
        # A block that is too small to have a scale becomes zeros. One with a value that is not finite keeps its scale,
        # which is not finite either: all of it decodes to NaN.
        usable = np.isfinite(scale) & (scale > 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            np.divide(rows, scale[:, None], out=steps)
        np.rint(steps, out=steps)
        np.clip(steps, -_STEPS, _STEPS, out=steps)
        steps[~usable] = 0
        target[start:stop] = steps.reshape(-1)


def _decode_int8(scales: Floats, values: npt.NDArray[np.int8], out: Floats, *, first: int) -> None:
    for start, stop in _pieces(first, first + len(out)):
        rows = out[start - first : stop - first].reshape(-1, min(BLOCK, stop - start))
        scale = scales[start // BLOCK :][: len(rows), None]
        with np.errstate(invalid="ignore", over="ignore"):  # of blocks that were not finite, or all but
            np.multiply(values[start - first : stop - first].reshape(rows.shape), scale, out=rows, dtype=np.float32)


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Intervals of the encoded array that are whole blocks, or lie inside one."""
    while first < last:
        whole = min(last - first, _CHUNK) // BLOCK * BLOCK
        stop = min(last, first + (-first % BLOCK or whole or last - first))
        yield first, stop
        first = stop
