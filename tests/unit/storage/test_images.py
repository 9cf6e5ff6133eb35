"""Images of every kind: turned, transparent, deep, grey, four-coloured, cut off, damaged, too large."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from storage.images import ImageProblem, decode_into, size_of


def encoded(pixels: Any, form: str = "PNG", **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def decoded(data: bytes, width: int, height: int, channels: int = 3, **where: Any) -> np.ndarray:
    out = np.full((height, width, channels), 77, dtype=np.uint8)
    decode_into(out, data, **where)
    return out


def halves(width: int = 40, height: int = 20) -> np.ndarray:
    """Left half red, right half blue."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    return pixels


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95})])
def test_the_three_formats(form: str, options: dict[str, Any]) -> None:
    data = encoded(halves(), form, **options)
    found = decoded(data, 40, 20)
    limit = 12 if form == "JPEG" else 0
    assert np.abs(found[:, :15].astype(int) - [255, 0, 0]).max() <= limit
    assert np.abs(found[:, 25:].astype(int) - [0, 0, 255]).max() <= limit
    assert size_of(data) == (40, 20)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_and_size_follow_exif(orientation: int) -> None:
    """Report 16 (kohya-ss/sd-scripts#1316): images turned only by EXIF went into the wrong bucket, unturned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(halves(64, 32), "JPEG", quality=95, exif=exif.tobytes(), subsampling=0)
    turned = orientation >= 5
    assert size_of(data) == ((32, 64) if turned else (64, 32))
    found = decoded(data, *((32, 64) if turned else (64, 32)))
    red_first = orientation in (1, 4, 5, 6)
    first = found[:24] if turned else found[:, :24]
    assert (first[..., 0].mean() > 200) == red_first
    assert (first[..., 2].mean() < 50) == red_first


def test_transparency_is_laid_on_white() -> None:
    pixels = np.zeros((8, 8, 4), dtype=np.uint8)
    pixels[:4, :, 3] = 255
    for data in (encoded(pixels), encoded(pixels, "WEBP", lossless=True)):
        found = decoded(data, 8, 8)
        assert found[0].max() == 0
        assert found[7].min() == 255
    grey = Image.fromarray(pixels).convert("LA")
    assert decoded(encoded(grey), 8, 8)[7].min() == 255
    palette = Image.fromarray(np.tile([[0], [1]], (4, 8)).astype(np.uint8))
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert decoded(encoded(palette, transparency=1), 8, 8)[1].min() == 255


def test_sixteen_bits_become_eight() -> None:
    deep = np.tile(np.linspace(0, 65535, 32).astype(np.uint16), (32, 1))
    found = decoded(encoded(deep), 32, 32)
    assert np.abs(found[0, :, 0].astype(int) - np.linspace(0, 255, 32)).max() <= 1
    assert (found[..., 0] == found[..., 2]).all()


def test_grey_and_one_bit_and_grey_wanted() -> None:
    grey = np.full((9, 9), 100, dtype=np.uint8)
    assert (decoded(encoded(grey), 9, 9) == 100).all()
    assert (decoded(encoded(Image.fromarray(grey > 50)), 9, 9) == 255).all()
    assert np.abs(decoded(encoded(halves()), 40, 20, 1)[0, 0].astype(int) - 76).max() <= 1


def test_four_colours_become_three() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    found = decoded(encoded(image, "JPEG", quality=95), 16, 16).astype(int)
    assert np.abs(found - [255, 0, 0]).max() <= 10


def test_the_crop_lies_where_it_is_asked_for() -> None:
    data = encoded(halves(40, 20))
    assert decoded(data, 20, 20, across=0)[:, 1:-1, 0].min() == 255
    assert decoded(data, 20, 20, across=1)[:, 1:-1, 2].min() == 255
    middle = decoded(data, 20, 20)
    assert middle[:, 1, 0].min() == middle[:, -2, 2].min() == 255


@pytest.mark.parametrize(("size", "place"), [((57, 20), {"across": 0.37}), ((40, 33), {"down": 0.71})])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_crop_that_needs_no_scaling_has_the_images_own_pixels(
    size: tuple[int, int], place: dict[str, float], channels: int
) -> None:
    """Where it would begin between two pixels, it begins at the nearest."""
    whole = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    pixels = whole if channels == 3 else whole[:, :, 0]
    found = decoded(encoded(pixels), 40, 20, channels, **place)
    left, top = round(17 * place.get("across", 0)), round(13 * place.get("down", 0))
    assert np.array_equal(found, pixels[top : top + 20, left : left + 40].reshape(20, 40, channels))


def test_a_large_jpeg_is_reduced_while_it_is_decoded_and_looks_the_same() -> None:
    generator = np.random.default_rng(0)
    smooth = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((1600, 1200))
    exact = np.asarray(smooth.resize((128, 96), Image.Resampling.LANCZOS)).astype(int)
    found = decoded(encoded(smooth, "JPEG", quality=95), 128, 96).astype(int)
    assert np.abs(found - exact).mean() < 2


def problem(data: bytes, **where: Any) -> str:
    with pytest.raises(ImageProblem) as found:
        decoded(data, 16, 16, **where)
    assert found.value.message
    return found.value.reason


def test_what_cannot_be_used_says_why() -> None:
    """Report 11 (huggingface/datasets#6470): the caller gets a word, not an end of the stream."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert problem(b"") == "empty"
    assert problem(b"GIF89a" + bytes(40)) == "format"
    assert problem(b"hello") == "format"
    for form in ("PNG", "JPEG", "WEBP"):
        data = encoded(noise, form)
        assert problem(data[: len(data) // 2]) in ("truncated", "damaged")
    assert problem(encoded(noise[:4, :4])) == "small"
    frames = [Image.fromarray(noise), Image.fromarray(255 - noise)]
    assert problem(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])) == "animated"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    assert problem(bomb) == "bomb"
    with pytest.raises(ImageProblem, match="3600000000 pixels"):
        size_of(bomb)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 12_000, 12_000, 8, 2, 0, 0, 0))
    with pytest.raises(ImageProblem, match="12000 x 12000"):
        size_of(bomb[:8] + header + bomb[8 + len(header) :])


@given(data=st.data(), form=st.sampled_from(["PNG", "JPEG", "WEBP"]))
@settings(deadline=None, max_examples=150)
def test_damage_never_raises_anything_else(data: st.DataObject, form: str) -> None:
    good = bytearray(encoded(np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8), form))
    for _ in range(data.draw(st.integers(1, 6))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for broken in (bytes(good), bytes(good[:cut])):
        with contextlib.suppress(ImageProblem):
            decoded(broken, 16, 16)
