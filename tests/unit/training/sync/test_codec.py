"""Wire forms: sizes, exact rounding, error bounds, and that nothing that is not finite gets through as finite."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.sync.codec import BLOCK, Codec, decode, encode, encoded_bytes, measure_error
from training.sync.layout import Floats

CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")
LENGTHS = [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, (1 << 16) - 1, 1 << 16, (1 << 16) + BLOCK + 1]
LARGEST_BF16 = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])

any_floats = arrays.arrays(np.float32, st.integers(0, 700), elements=st.floats(width=32))
usual_floats = arrays.arrays(
    np.float32, st.integers(0, 700), elements=st.floats(-LARGEST_BF16, LARGEST_BF16, width=32, allow_nan=False)
)


def draw(count: int, *, scale: float = 1e-3) -> Floats:
    return (scale * np.random.default_rng(count).standard_normal(count)).astype(np.float32)


def there_and_back(values: Floats, codec: Codec) -> Floats:
    out = np.empty_like(values)
    decode(memoryview(encode(values, codec).tobytes()), out, codec)
    return out


def relative_error(values: Floats, codec: Codec) -> float:
    difference = there_and_back(values, codec).astype(np.float64) - values
    return float(np.linalg.norm(difference) / np.linalg.norm(values.astype(np.float64)))


@pytest.mark.parametrize("count", LENGTHS)
def test_sizes_follow_from_the_count(count: int) -> None:
    want = {"fp32": 4 * count, "bf16": 2 * count, "int8": count + 4 * math.ceil(count / BLOCK)}
    for codec in CODECS:
        assert encoded_bytes(count, codec) == want[codec]
        assert encode(draw(count), codec).nbytes == want[codec]
        assert len(there_and_back(draw(count), codec)) == count


@given(any_floats)
def test_fp32_keeps_every_bit(values: Floats) -> None:
    assert there_and_back(values, "fp32").tobytes() == values.tobytes()


@given(usual_floats)
def test_bf16_is_the_nearest_one_and_ties_go_to_even(values: Floats) -> None:
    """Against a search: of the two neighbours that the upper half of the bits offers, the nearer one."""
    found = there_and_back(values, "bf16")
    below = (values.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    above = ((values.view(np.uint32) & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    to_below, to_above = np.abs(values - below), np.abs(above - values)
    even = (values.view(np.uint32) >> 16) & 1 == 0
    want = np.where((to_below < to_above) | ((to_below == to_above) & even), below, above)
    np.testing.assert_array_equal(found, want)


@given(usual_floats)
def test_int8_errs_by_half_a_step_of_its_block(values: Floats) -> None:
    found = there_and_back(values, "int8").astype(np.float64)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        step = np.abs(block).max() / 127
        # The scale itself is a float32: its rounding counts where it is subnormal.
        assert np.abs(found[start : start + BLOCK] - block).max() <= step * (0.5 + 1e-5) + 128 * 1.5e-45


def test_what_a_codec_costs_is_measured_on_the_leading_elements() -> None:
    values = draw((1 << 16) + 5)
    for codec in CODECS:
        want = relative_error(values, codec)
        assert measure_error(values, encode(values, codec), codec) == pytest.approx(want, rel=0.02)
        assert measure_error(np.zeros(3, np.float32), encode(np.zeros(3, np.float32), codec), codec) == 0


def test_errors_on_gaussian_values_are_what_the_reference_says() -> None:
    values = draw(200_000)
    assert relative_error(values, "fp32") == 0
    assert relative_error(values, "bf16") < 0.0018
    assert relative_error(values, "int8") < 0.0075


@settings(max_examples=200)
@given(any_floats)
def test_what_is_not_finite_never_becomes_finite(values: Floats) -> None:
    for codec in CODECS:
        found = there_and_back(values, codec)
        assert not np.isfinite(found[~np.isfinite(values)]).any()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000])
def test_each_kind_of_nan_and_infinity_is_seen(bits: int) -> None:
    values = draw(3 * BLOCK)
    values[BLOCK + 5 : BLOCK + 6].view(np.uint32)[:] = bits
    for codec in CODECS:
        found = there_and_back(values, codec)
        assert not np.isfinite(found[BLOCK + 5])
        assert np.isfinite(found[:BLOCK]).all()
        assert np.isfinite(found[2 * BLOCK :]).all()


def test_zeros_and_the_smallest_numbers() -> None:
    for codec in CODECS:
        assert not there_and_back(np.zeros(BLOCK + 3, np.float32), codec).any()
        tiny = np.full(BLOCK + 3, 1e-45, np.float32)
        assert np.abs(there_and_back(tiny, codec)).max() <= 1e-43


def test_above_its_range_bf16_gives_infinity() -> None:
    assert np.isinf(there_and_back(np.array([3.4e38], np.float32), "bf16")).all()
    assert there_and_back(np.array([LARGEST_BF16, -LARGEST_BF16], np.float32), "bf16").tolist() == [
        LARGEST_BF16,
        -LARGEST_BF16,
    ]


@given(st.data())
def test_any_part_decodes_to_what_the_whole_says(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from(LENGTHS[1:]))
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    for codec in CODECS:
        wire, part = encode(draw(count), codec), np.empty(last - first, np.float32)
        decode(wire.data, part, codec, first=first, count=count)
        assert part.tobytes() == there_and_back(draw(count), codec)[first:last].tobytes()


def test_a_buffer_can_be_given_and_need_not_be_aligned() -> None:
    for codec in CODECS:
        values = draw(1000)
        room = np.empty(encoded_bytes(1000, codec), np.uint8)
        assert encode(values, codec, out=room) is room
        assert room.tobytes() == encode(values, codec).tobytes()
        shifted, out = b"x" + room.tobytes(), np.empty(1000, np.float32)
        decode(memoryview(shifted)[1:], out, codec)
        assert out.tobytes() == there_and_back(values, codec).tobytes()


def test_wrong_sizes_are_refused() -> None:
    for codec in CODECS:
        wire = encode(draw(100), codec)
        with pytest.raises(ValueError, match="100 elements in"):
            decode(wire.data[:-1], np.empty(100, np.float32), codec)
        with pytest.raises(ValueError, match="do not lie inside"):
            decode(wire.data, np.empty(50, np.float32), codec, first=60, count=100)
        with pytest.raises(ValueError, match="elements in"):
            encode(draw(100), codec, out=np.empty(3, np.uint8))
