"""Folders, tar files and Parquet files become one dataset, the same whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from services.prepare import encoded as module
from services.prepare.encoded import Job, advance, dry_run
from spec.errors import ConfigError, DataError, RefusedError
from spec.preparation import PrepareProgress, PrepareRules
from spec.shards import open_manifest, path_of, read_shard
from storage import open_bucket
from tests.builders.object_store import ObjectServer, environment_of, serve_objects
from tests.builders.pictures import encoded, image_folder, image_parquet, image_tar, picture, read_tar_dataset

COUNT = 40
RULES = PrepareRules.model_validate({"held_out": 0.2, "shard_bytes": "8Ki"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return image_folder(tmp_path_factory.mktemp("source"), count=COUNT)


@pytest.fixture(scope="module")
def dataset(source: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = manifest_in(tmp_path_factory.mktemp("dataset"))
    assert advance(Job(source, uri, RULES)).done
    return uri


def manifest_in(folder: Path) -> str:
    return (folder / "pictures" / "manifest.json").as_uri()


def content(uri: str) -> dict[str, str]:
    """Digest of each file of a dataset."""
    folder = path_of(uri).parent
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".prepare.lock", "preparation.json")
    }


def test_images_are_kept_as_they_are_with_their_captions_and_sizes(source: str, dataset: str) -> None:
    manifest = open_manifest(dataset)
    samples = read_tar_dataset(dataset)
    assert len(samples) == COUNT == manifest.count("train") + manifest.count("test")
    by_key = {text["key"]: (image, text, size) for image, text, size in samples}
    for number in range(COUNT):
        key = f"{'ab'[number % 2]}/{number:04d}"
        image, text, size = by_key[key]
        files = list((path_of(source)).glob(f"{key}.*"))
        assert image in [path.read_bytes() for path in files]
        assert text.get("caption") == (f"picture {number}, été" if number % 4 else None)
        assert size == (24 + number % 9, 24 + number % 5)
        assert ("mood" in text) == (number % 4 == 3)
    assert (manifest.format, manifest.labels) == ("tar", ["x"])
    assert (manifest.image_width, manifest.image_height) == (32, 28)


def test_shards_are_ordinary_tar_files_and_have_about_the_size_that_was_asked_for(dataset: str) -> None:
    shards = open_manifest(dataset).splits.train
    assert len(shards) > 3
    for shard in shards:
        with tarfile.open(path_of(dataset).parent / shard.path) as archive:
            names = archive.getnames()
        assert [name.rpartition(".")[0] for name in names[::2]] == [name.rpartition(".")[0] for name in names[1::2]]
        assert shard.bytes < 8192 + 4096


def test_what_was_dropped_is_told_with_place_and_reason(source: str, dataset: str, tmp_path: Path) -> None:
    report = advance(Job(source, manifest_in(tmp_path), RULES))
    assert report.dropped == {"damaged": 1, "truncated": 1, "duplicate": 1}
    assert (report.found, report.train + report.test, report.captions) == (COUNT + 3, COUNT, COUNT * 3 // 4)
    assert report.examples["duplicate"] == [f"{source}/copy.png: its pixels are those of {source}/b/0001.png"]
    told = [json.loads(line) for line in (path_of(dataset).parent / "dropped.jsonl").read_text().splitlines()]
    assert Counter(one["reason"] for one in told) == report.dropped
    stored = json.loads((path_of(dataset).parent / "preparation.json").read_text())
    assert stored["dropped"] == report.dropped


def test_the_same_source_gives_the_same_bytes_and_is_then_reused(source: str, dataset: str, tmp_path: Path) -> None:
    uri = manifest_in(tmp_path)
    first = advance(Job(source, uri, RULES))
    assert content(uri) == content(dataset)
    again = advance(Job(source, uri, RULES))
    assert (first.reused, again.reused, again.digest) == (False, True, open_manifest(dataset).digest)
    assert again.dropped == first.dropped


def test_folders_tar_files_and_parquet_files_give_the_same_images(tmp_path: Path) -> None:
    for name in ("folder", "tar", "parquet"):
        (tmp_path / name).mkdir()
    for number in range(12):
        (tmp_path / "folder" / f"{number:04d}.png").write_bytes(encoded(picture(number)))
    image_tar(tmp_path / "tar" / "0.tar", numbers=range(7))
    image_tar(tmp_path / "tar" / "1.tar", numbers=range(7, 12))
    image_parquet(tmp_path / "parquet" / "all.parquet", numbers=range(12))
    found = {}
    for name in ("folder", "tar", "parquet"):
        uri = (tmp_path / f"{name}-made" / "manifest.json").as_uri()
        assert advance(Job((tmp_path / name).as_uri(), uri)).train > 0
        found[name] = sorted(image for image, _, _ in read_tar_dataset(uri))
    assert found["folder"] == found["tar"] == found["parquet"] == sorted(encoded(picture(n)) for n in range(12))
    assert open_manifest((tmp_path / "tar-made" / "manifest.json").as_uri()).labels == ["0", "1", "2"]


def test_rules_drop_by_size_aspect_and_caption_and_name_labels_by_folder(source: str, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    wide = tmp_path / "more" / "wide.png"
    wide.write_bytes(encoded(picture(7, width=90, height=30)))
    long = PrepareRules(max_aspect=2.9, held_out=0)
    with pytest.raises(DataError, match="1 aspect"):
        advance(Job((tmp_path / "more").as_uri(), manifest_in(tmp_path), long))
    rules = PrepareRules(min_side=25, need_caption=True, labels="folders", held_out=0)
    uri = (tmp_path / "strict" / "manifest.json").as_uri()
    report = advance(Job(source, uri, rules))
    # The shorter side is 24 where a remainder is 0; every fourth has no caption, nor have the three extras.
    small = sum(1 for n in range(COUNT) if n % 4 and not (n % 9 and n % 5))
    assert report.dropped == {"no-caption": COUNT // 4 + 3, "small": small}
    assert open_manifest(uri).labels == ["a", "b"]
    assert report.test == 0


def test_what_looks_alike_is_dropped_on_demand(tmp_path: Path) -> None:
    """Report of every image collection: the same photograph again, saved once more, or smaller."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        pixels = picture(number, width=200, height=150)
        (folder / f"{number}.png").write_bytes(encoded(pixels))
        (folder / f"{number}-again.jpg").write_bytes(encoded(pixels, "JPEG", quality=60))
        small = np.asarray(Image.fromarray(pixels).resize((100, 75), Image.Resampling.LANCZOS))
        (folder / f"{number}-small.webp").write_bytes(encoded(small, "WEBP", quality=80))
    (folder / "white.png").write_bytes(encoded(np.full((20, 20, 3), 255, np.uint8)))
    (folder / "black.png").write_bytes(encoded(np.zeros((20, 20, 3), np.uint8)))
    exact = dry_run(Job(folder.as_uri(), manifest_in(tmp_path), PrepareRules()))
    near = dry_run(Job(folder.as_uri(), manifest_in(tmp_path), PrepareRules(duplicates="near")))
    assert exact.dropped == {}
    assert near.dropped == {"near-duplicate": 12}, "two flat images do not look alike only because they are flat"


def test_a_dry_run_tells_the_same_and_writes_nothing(source: str, dataset: str, tmp_path: Path) -> None:
    told = dry_run(Job(source, manifest_in(tmp_path), RULES))
    manifest = open_manifest(dataset)
    assert (told.train, told.test) == (manifest.count("train"), manifest.count("test"))
    assert told.dropped == {"damaged": 1, "truncated": 1, "duplicate": 1}
    assert told.dry_run
    assert list(tmp_path.iterdir()) == []


def test_in_small_pieces_it_gives_the_same_bytes(
    source: str, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP", 7)
    uri, goes, seen = manifest_in(tmp_path), 0, list[PrepareProgress]()
    while not advance(Job(source, uri, RULES), seconds=0, told=seen.append).done:
        goes += 1
    assert goes == 6
    assert content(uri) == content(dataset)
    assert [one.found for one in seen] == [7, 14, 21, 28, 35, 42, 43]
    assert seen[-1].files == seen[-1].files_total == COUNT + 3


KILLED = """
import os, signal, sys
from services.prepare import encoded, journal, output
from spec.preparation import PrepareRules
from storage import folder, tar_shards

source, uri, name, wanted = sys.argv[1:]
encoded.GROUP, encoded.CHECKPOINT_SECONDS = 7, 0
count = 0

def counted(owner, method):
    real = getattr(owner, method)
    def call(*arguments, **options):
        global count
        count += name in ("any", method)
        if count >= int(wanted):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    setattr(owner, method, call)

counted(tar_shards.TarShardWriter, "add")
counted(journal.Journal, "commit")
counted(output.Output, "forget")
for method in ("send", "put", "create"):
    counted(folder.Folder, method)
encoded.advance(encoded.Job(source, uri, PrepareRules.model_validate({"held_out": 0.2, "shard_bytes": "8Ki"})))
"""


def go_until_killed(source: str, uri: str, method: str, count: int) -> int:
    command = [sys.executable, "-c", KILLED, source, uri, method, str(count)]
    return subprocess.run(command, timeout=90, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


@pytest.mark.parametrize(
    ("method", "count"),
    [("commit", 1), ("commit", 4), ("forget", 3), ("send", 1), ("send", 4), ("put", 1), ("create", 1)],
)
def test_a_kill_anywhere_and_a_new_start_give_the_same_bytes(
    source: str, dataset: str, tmp_path: Path, method: str, count: int
) -> None:
    uri = manifest_in(tmp_path)
    assert go_until_killed(source, uri, method, count) == -signal.SIGKILL
    assert not path_of(uri).exists()
    assert advance(Job(source, uri, RULES)).done
    assert content(uri) == content(dataset)


def test_kill_after_kill_it_ends_with_the_same_bytes(source: str, dataset: str, tmp_path: Path) -> None:
    uri, chance = manifest_in(tmp_path), random.Random(5)
    codes = []
    while not codes or codes[-1] == -signal.SIGKILL:
        codes.append(go_until_killed(source, uri, "any", chance.randrange(12, 40)))
        assert len(codes) < 12, codes
    assert codes[-1] == 0
    assert len(codes) > 2
    assert content(uri) == content(dataset)


def test_a_preparation_whose_files_are_lost_says_how_to_begin_again(source: str, dataset: str, tmp_path: Path) -> None:
    uri = manifest_in(tmp_path)
    assert go_until_killed(source, uri, "commit", 4) == -signal.SIGKILL
    (work,) = path_of(uri).parent.glob(".prepare-work-*")
    (work / "train.rows").unlink()
    with pytest.raises(DataError, match=f"remove {work} and start again"):
        advance(Job(source, uri, RULES))
    shutil.rmtree(work)
    assert advance(Job(source, uri, RULES)).done
    assert content(uri) == content(dataset)


def test_a_full_disk_is_said_and_with_room_it_goes_on(source: str, dataset: str, tmp_path: Path) -> None:
    uri = manifest_in(tmp_path)
    options = ["--source", source, "--manifest", uri, "--rules", RULES.model_dump_json()]
    limited = f'ulimit -f 4; exec {sys.executable} -m services.prepare "$@"'  # files of at most 4 KiB
    done = subprocess.run(
        ["bash", "-c", limited, "-", *options], capture_output=True, text=True, check=False, timeout=90
    )
    assert (done.returncode, done.stdout) == (100, "")
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr
    assert "free space" in done.stderr
    assert advance(Job(source, uri, RULES)).done
    assert content(uri) == content(dataset)


def test_a_source_that_changed_is_another_dataset(tmp_path: Path) -> None:
    uri, source = manifest_in(tmp_path / "made"), tmp_path / "source"
    address = image_folder(source, count=8)
    advance(Job(address, uri))
    (source / "new.png").write_bytes(encoded(picture(77)))
    with pytest.raises(RefusedError, match="another dataset is there"):
        advance(Job(address, uri))


def test_a_lost_shard_is_not_reused(source: str, tmp_path: Path) -> None:
    uri = manifest_in(tmp_path)
    advance(Job(source, uri, RULES))
    path = path_of(uri).parent / open_manifest(uri).splits.train[0].path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="the manifest says"):
        advance(Job(source, uri, RULES))


def test_a_reader_of_pixels_refuses_encoded_images(dataset: str) -> None:
    manifest = open_manifest(dataset)
    with pytest.raises(DataError, match="format is tar"):
        read_shard(manifest.splits.train[0], uri=dataset, manifest=manifest)


def test_what_cannot_be_prepared_says_why(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside its source"):
        advance(Job(source, f"{source}/made/manifest.json"))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(DataError, match="no image is left to train on: 1 format"):
        advance(Job((tmp_path / "none").as_uri(), manifest_in(tmp_path)))


def test_labels_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captions in a column named label: an error that says so, not a manifest with a million names."""
    from services.prepare import output

    monkeypatch.setattr(output, "MOST_LABELS", 3)
    for number in range(5):
        (tmp_path / "many" / f"{number}").mkdir(parents=True)
        (tmp_path / "many" / f"{number}" / "one.png").write_bytes(encoded(picture(number)))
    with pytest.raises(DataError, match="more than 3 labels"):
        advance(Job((tmp_path / "many").as_uri(), manifest_in(tmp_path), PrepareRules(labels="folders")))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serve_objects(tmp_path_factory.mktemp("store")) as one, environment_of(one):
        yield one


def test_from_bucket_to_bucket_it_gives_the_same_shards(
    source: str, dataset: str, server: ObjectServer, tmp_path: Path
) -> None:
    there = open_bucket(f"{server.uri()}/source")
    for path in path_of(source).rglob("*.*"):
        there.send(str(path.relative_to(path_of(source))), path)
    uri = f"{server.uri()}/pictures/manifest.json"
    report = advance(Job(there.uri, uri, RULES, work=tmp_path / "work"))
    bucket = open_bucket(uri.rpartition("/")[0])
    want = open_manifest(dataset)
    for shard in [*want.splits.train, *want.splits.test]:
        assert bucket.digest(shard.path) == (shard.bytes, shard.sha256)
    assert report.done
    assert list((tmp_path / "work").rglob("*.tar")) == []
    assert advance(Job(there.uri, uri, RULES, work=tmp_path / "work")).reused


def test_an_archive_that_breaks_off_gives_what_came_before(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    image_tar(source / "0.tar", numbers=range(9))
    whole = (source / "0.tar").read_bytes()
    (source / "0.tar").write_bytes(whole[: len(whole) // 2])
    image_tar(source / "1.tar", numbers=range(20, 23))
    report = advance(Job(source.as_uri(), manifest_in(tmp_path), PrepareRules(held_out=0)))
    assert report.dropped == {"truncated": 1}
    assert 3 < report.train < 12
