"""`gkr data` as a person uses it: real processes over a real folder of images."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gkr.preparing import manifest_uri
from services.prepare.store import exclusive
from spec.shards import open_manifest, path_of
from storage.cache import Cache
from storage.datasets import held_shards, local_manifest
from tests.builders import local_runs
from tests.builders.object_store import environment_of, serve_objects
from tests.builders.pictures import encoded, image_folder, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset

OPTIONS = ("--held-out", "0.2", "--shard-bytes", "8Ki")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    image_folder(tmp_path / "pictures", count=20)
    return tmp_path


def test_prepare_inspect_and_prepare_again(place: Path) -> None:
    tried = local_runs.gkr("data", "prepare", "pictures", *OPTIONS, "--dry-run", cwd=place)
    assert (tried.returncode, (place / "data").exists()) == (0, False), tried.stderr
    made = local_runs.gkr("data", "prepare", "pictures", *OPTIONS, cwd=place)
    assert made.returncode == 0, made.stderr
    digest = open_manifest((place / "data" / "pictures" / "manifest.json").as_uri()).digest
    assert f"dataset {digest[:12]} at file://" in made.stdout
    assert "duplicate  1      file://" in made.stdout
    assert made.stdout.splitlines()[0].removeprefix("kept") == tried.stdout.splitlines()[0].removeprefix("would keep")
    again = local_runs.gkr("data", "prepare", "pictures", *OPTIONS, "-o", "json", cwd=place)
    told = json.loads(again.stdout)
    assert (told["reused"], told["digest"], told["found"]) == (True, digest, 23)

    seen = local_runs.gkr("data", "inspect", "data/pictures", cwd=place)
    assert seen.returncode == 0, seen.stderr
    assert "shards of format tar" in seen.stdout
    assert (place / "inspect" / "pictures" / "sheet.png").stat().st_size > 1000
    assert f"page: {place / 'inspect' / 'pictures' / 'index.html'}" in seen.stdout
    told = json.loads(local_runs.gkr("data", "inspect", "data/pictures", "-o", "json", cwd=place).stdout)
    assert (told["digest"], told["train"] + told["test"]) == (digest, 20)


def test_the_cache_is_shown_limited_and_pruned(tmp_path: Path) -> None:
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(12)]
    here = make_tar_dataset(tmp_path / "pictures", train=some, per_shard=4)
    with serve_objects(tmp_path) as server, environment_of(server):
        bucket = server.open()
        for path in path_of(here).parent.iterdir():
            bucket.send(path.name, path)
        uri = f"{bucket.uri}/manifest.json"
        local = local_manifest(uri, cache=tmp_path / "cache", splits=())
        with held_shards(uri, shards=open_manifest(here).splits.train[:2], local=local):
            pass
    ask = ("data", "cache", "--folder", "cache")
    shown = local_runs.gkr(*ask, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "pictures  " in shown.stdout
    assert "3 of 4" in shown.stdout, "two shards and the index"
    told = json.loads(local_runs.gkr(*ask, "--limit", "1Gi", "-o", "json", cwd=tmp_path).stdout)
    assert told["limit_bytes"] == Cache(tmp_path / "cache").limit_bytes == 2**30
    assert told["counts"]["fetched_bytes"] == told["bytes"] == told["datasets"][0]["bytes"]
    told = json.loads(local_runs.gkr(*ask, "--prune", "0Gi", "-o", "json", cwd=tmp_path).stdout)
    assert told["copies"] == 1, "this process holds the index, which it asked for as a whole"
    refused = local_runs.gkr(*ask, "--limit", "5", cwd=tmp_path)
    assert (refused.returncode, "5 has no unit" in refused.stderr) == (3, True)


def test_interrupted_it_leaves_nobody_behind_and_the_next_one_goes_on(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", count=400)
    process = local_runs.start("gkr", "data", "prepare", "pictures", cwd=tmp_path)
    try:
        work = tmp_path / "data" / "pictures"
        local_runs.wait_until(lambda: any(work.glob(".prepare-work-*/train-*.tar")), "the first shard")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=local_runs.DEADLINE_SECONDS)
    finally:
        local_runs.end(process)
    assert (process.returncode, "Traceback" in said) == (130, False), said
    with exclusive(work, timeout_seconds=0):
        assert not (work / "manifest.json").exists()
    assert local_runs.gkr("data", "prepare", "pictures", cwd=tmp_path).returncode == 0
    assert open_manifest((work / "manifest.json").as_uri()).count("train") > 380


@pytest.mark.parametrize(
    ("line", "want", "code"),
    [
        (("prepare", "nowhere"), "there is nothing to read", 100),
        (("prepare", "pictures", "--min-side", "0"), "--min-side: 0 is refused: Input should be greater", 3),
        (("prepare", "pictures", "--shard-bytes", "5"), "has no unit", 3),
        (("prepare", "pictures", "--to", "pictures/made"), "inside its source", 3),
        (("prepare", "pictures", "--by", "preparer"), "--by preparer needs --services", 3),
        (("prepare", "pictures", "--services", "none.json", "--by", "x"), "--services: there is no file none.json", 3),
        (("prepare", "pictures", "--latents", "64x64"), "latents need an autoencoder", 3),
        (("prepare", "pictures", "--latents", "64"), "--latents: 64 is refused: expected WIDTHxHEIGHT", 3),
        (("cache", "--folder", "pictures"), "there is no cache in", 102),
        (("inspect", "nowhere"), "manifest does not exist", 100),
        (("inspect", "nowhere", "--samples", "0"), "look at 1 image at least", 3),
    ],
)
def test_what_a_person_can_get_wrong(place: Path, line: tuple[str, ...], want: str, code: int) -> None:
    ended = local_runs.gkr("data", *line, cwd=place)
    assert (ended.returncode, ended.stdout) == (code, ""), ended.stderr
    assert want in ended.stderr
    assert "hint:" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (place / "pictures" / "objects").exists()


def test_an_error_can_be_read_by_programs(place: Path) -> None:
    ended = local_runs.gkr("data", "inspect", "nowhere", "-o", "json", cwd=place)
    assert json.loads(ended.stderr)["error"]["exit_code"] == 100


def test_a_source_that_is_built_in_has_a_name(tmp_path: Path) -> None:
    made = local_runs.gkr("data", "prepare", "sklearn-digits", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "kept 1077 images to train on and 720 held out" in made.stdout


def test_a_dataset_is_named_by_folder_manifest_or_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    want = (tmp_path / "a" / "manifest.json").as_uri()
    assert manifest_uri("a") == manifest_uri("a/") == manifest_uri("a/manifest.json") == manifest_uri(want) == want
    assert manifest_uri("s3://bucket/a") == "s3://bucket/a/manifest.json"
