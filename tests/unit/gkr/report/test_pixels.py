"""Sample files become small PNGs, and nothing but sample files does."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from gkr.report.pixels import PixelsError, data_uri, read_pixels, shrink


def decode(uri: str) -> tuple[int, int, int, bytes]:
    """Width, height, colour type and the raw rows with their filter bytes."""
    png = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, color = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    return width, height, color, zlib.decompress(data)


def test_a_grey_picture_comes_back_from_its_data_uri() -> None:
    image = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
    assert decode(data_uri(image)) == (3, 2, 0, bytes([0, 0, 1, 2, 0, 3, 4, 5]))


def test_a_colour_picture_comes_back_from_its_data_uri() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert decode(data_uri(image)) == (2, 2, 2, bytes([0, *range(6), 0, *range(6, 12)]))


@pytest.mark.parametrize(("height", "width"), [(512, 512), (65, 65), (300, 40), (7, 1000)])
def test_large_pictures_are_averaged_down(height: int, width: int) -> None:
    small = shrink(np.full((height, width, 3), 200, dtype=np.uint8), side=64)
    assert max(small.shape[:2]) <= 64
    assert (small == 200).all()


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "secret.npy", np.zeros((1, 8, 8, 1), dtype=np.uint8))
    run = tmp_path / "run"
    run.mkdir()
    (run / "link.npy").symlink_to(tmp_path / "secret.npy")
    for path in ("../secret.npy", str(tmp_path / "secret.npy"), "link.npy"):
        with pytest.raises(PixelsError, match="outside"):
            read_pixels(path, folder=run)


def test_what_is_not_a_picture_array_is_refused_with_its_reason(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros((1, 8, 8, 1)))
    np.save(tmp_path / "flat.npy", np.zeros((8, 8), dtype=np.uint8))
    np.save(tmp_path / "none.npy", np.zeros((0, 8, 8, 1), dtype=np.uint8))
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("not numpy")
    (tmp_path / "torn.npy").write_bytes((tmp_path / "flat.npy").read_bytes()[:-10])
    reasons = {
        "float.npy": "float64",
        "flat.npy": r"\[8, 8\]",
        "none.npy": "no pictures",
        "pickle.npy": "not a readable",
        "text.npy": "not a readable",
        "torn.npy": "not a readable",
        "gone.npy": "missing",
    }
    for name, reason in reasons.items():
        with pytest.raises(PixelsError, match=reason):
            read_pixels(name, folder=tmp_path)
