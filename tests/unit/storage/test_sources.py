"""Folders, tar files and Parquet files give the same samples; what cannot be read is told and passed over."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from spec.errors import DataError
from storage import Bucket, sources
from storage.sources import Damage, Raw, is_read, list_source, read_source
from tests.builders.object_store import ObjectServer, environment_of

IMAGES = {f"{n:03d}": b"image %d" % n for n in range(6)}
TEXT = {name: {"caption": f"a picture of {name}", "source": "test"} for name in IMAGES}


def tarred(names: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def sample_files() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, image in IMAGES.items():
        found[f"{name}.jpg"] = image
        found[f"{name}.json"] = json.dumps({"source": "test", "text": "not this"}).encode()
        found[f"{name}.txt"] = f"a picture of {name}\n".encode()
    return found


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


def read(uri: str) -> tuple[list[Raw], list[Damage]]:
    damage: list[Damage] = []
    return list(read_source(uri, told=damage.append)), damage


def make(folder: Path, kind: str) -> None:
    if kind == "folder":
        for name, data in sample_files().items():
            path = folder / ("a" if int(name[:3]) % 2 else "b") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    elif kind == "tar":
        files = list(sample_files().items())
        (folder / "0.tar").write_bytes(tarred(dict(files[:9])))
        (folder / "1.tar").write_bytes(tarred(dict(files[9:])))
    else:
        parquet(
            folder / "all.parquet",
            [
                {"image": {"bytes": IMAGES[n], "path": n}, "prompt": TEXT[n]["caption"], "source": "test"}
                for n in IMAGES
            ],
        )


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_each_kind_gives_every_sample_once_with_its_caption(tmp_path: Path, kind: str) -> None:
    make(tmp_path, kind)
    found, damage = read(tmp_path.as_uri())
    assert damage == []
    assert sorted(one.image for one in found) == sorted(IMAGES.values())
    assert len({one.key for one in found}) == 6
    captions = {one.image: one.text["caption"] for one in found}
    assert captions == {image: TEXT[name]["caption"] for name, image in IMAGES.items()}
    assert {one.text["source"] for one in found} == {"test"}
    assert [one.key for one in read(tmp_path.as_uri())[0]] == [one.key for one in found]


def test_a_bucket_gives_what_a_folder_gives(bucket: Bucket, tmp_path: Path, server: ObjectServer) -> None:
    make(tmp_path, "tar")
    for path in tmp_path.glob("*.tar"):
        bucket.send(f"wds/{path.name}", path)
    with environment_of(server):
        assert [one.image for one in read(f"{bucket.uri}/wds")[0]] == list(IMAGES.values())
        assert [one.image for one in read(f"{bucket.uri}/wds/1.tar")[0]] == list(IMAGES.values())[3:]


def test_of_a_tar_that_is_cut_off_what_came_before_counts(tmp_path: Path) -> None:
    """Report 10 (webdataset#142): one truncated tar stopped the training."""
    make(tmp_path, "tar")
    data = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(data[: 512 * 9 + 700])
    found, (damage,) = read(tmp_path.as_uri())
    assert [one.key for one in found] == ["000", "003", "004", "005"]
    assert damage.reason == "truncated"
    assert "0.tar" in damage.where


def test_what_cannot_be_read_is_told_and_passed_over(tmp_path: Path) -> None:
    files = sample_files()
    files["001.json"] = b"{not json"
    del files["003.jpg"]
    (tmp_path / "0.tar").write_bytes(tarred(files))
    found, damage = read(tmp_path.as_uri())
    assert [one.key for one in found] == ["000", "001", "002", "004", "005"]
    assert sorted(one.reason for one in damage) == ["bad-text", "no-image"]


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_what_is_too_large_to_be_an_image_is_not_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_IMAGE_BYTES", 50)
    images = dict(IMAGES) | {"large": b"x" * 51}
    if kind == "folder":
        for name, data in images.items():
            (tmp_path / f"{name}.jpg").write_bytes(data)
    elif kind == "tar":
        (tmp_path / "0.tar").write_bytes(tarred({f"{name}.jpg": data for name, data in images.items()}))
    else:
        parquet(tmp_path / "0.parquet", [{"image": data} for data in images.values()])
    found, (damage,) = read(tmp_path.as_uri())
    assert [one.image for one in found] == list(IMAGES.values())
    assert damage.reason == "oversize"


def test_names_that_are_not_text_are_shown_as_such(tmp_path: Path) -> None:
    """They were half surrogate pairs, which ended the preparation when its journal was written."""
    bad = tarfile.TarInfo("?.jpg")
    bad.size = 5
    head = bytearray(bad.tobuf(tarfile.USTAR_FORMAT).replace(b"?.jpg", b"\xff.jpg"))
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
    (tmp_path / "0.tar").write_bytes(bytes(head) + b"image" + bytes(507) + bytes(1024))
    (one,), damage = read(tmp_path.as_uri())
    assert (one.key, one.image, damage) == (r"\xff", b"image", [])
    (tmp_path / "0.tar").unlink()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")).write_bytes(b"image")
    with pytest.raises(DataError, match=r"not UTF-8: b'\\xff.jpg'"):
        read(tmp_path.as_uri())


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    make(tmp_path, "parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really PAR1")
    parquet(tmp_path / "none.parquet", [{"caption": "no image"}])
    parquet(tmp_path / "wrong.parquet", [{"image": "a path"}])
    found, damage = read(tmp_path.as_uri())
    assert len(found) == 6
    assert sorted(one.reason for one in damage) == ["no-image", "no-image", "unreadable"]


@pytest.mark.parametrize(("files", "said"), [([], "nothing to read"), (["a.png", "b.tar"], "images and tar files")])
def test_a_source_of_no_known_kind_is_refused(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=said):
        read(tmp_path.as_uri())


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_files_can_be_passed_over(tmp_path: Path, kind: str) -> None:
    make(tmp_path, kind)
    whole, _ = read(tmp_path.as_uri())
    asked: list[str] = []

    def enter(key: str) -> bool:
        asked.append(key)
        return key >= asked[len(asked) // 2] and len(asked) > 1

    found = list(read_source(tmp_path.as_uri(), told=lambda damage: None, enter=enter))
    assert asked == [entry.key for entry in list_source(tmp_path.as_uri()) if is_read(entry.key)]
    assert 0 < len(found) < len(whole)
    assert found == whole[-len(found) :]
