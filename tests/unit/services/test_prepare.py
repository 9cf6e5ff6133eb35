"""The digits become one dataset, whole or not at all, however often and by however many it is prepared."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.prepare import digits, store
from services.prepare.__main__ import main, prepare
from services.prepare.packing import Content
from services.prepare.store import exclusive
from spec.errors import ConfigError, DataError, RefusedError
from spec.events import Prepared, read_events
from spec.shards import Split, open_manifest, path_of, read_samples
from storage.datasets import local_manifest, read_manifest
from tests.builders.object_store import ObjectServer, environment_of, serve_objects

SOURCE = "sklearn-digits"
SPLITS: tuple[Split, ...] = ("train", "test")
CONTENT = Content("digits", SOURCE, "whatever", digits.SHAPE, digits.LABELS)


def made(folder: Path, *, shard_samples: int = 256) -> str:
    uri = (folder / "digits" / "manifest.json").as_uri()
    prepare(uri, source=SOURCE, shard_samples=shard_samples, lock_timeout_seconds=5)
    return uri


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("dataset"))


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".prepare.lock")


def test_every_scan_is_in_exactly_one_split(dataset: str) -> None:
    train = [sample.id for sample in read_samples(dataset, split="train")]
    test = [sample.id for sample in read_samples(dataset, split="test")]
    assert (len(train), len(test)) == (1077, 720)
    assert sorted(train + test) == list(range(1797))


def test_both_halves_of_the_held_out_scans_hold_every_digit_equally(dataset: str) -> None:
    labels = [sample.label for sample in read_samples(dataset, split="test")]
    for half in (labels[:360], labels[360:]):
        assert Counter(half) == dict.fromkeys(range(10), 36)


def test_pixels_are_the_scans_over_the_whole_range_of_a_byte(dataset: str) -> None:
    """Scan 0 as scikit-learn's documentation prints its first rows, 0 to 16."""
    samples = {sample.id: sample for split in SPLITS for sample in read_samples(dataset, split=split)}
    want = [0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0]
    assert list(samples[0].pixels[:16]) == [round(grey * 255 / 16) for grey in want]
    assert [samples[number].label for number in range(10)] == list(range(10))
    assert {max(sample.pixels) for sample in samples.values()} <= set(range(200, 256))


def test_captions_name_the_digit_and_describe_the_stroke(dataset: str) -> None:
    names = open_manifest(dataset).labels
    captions = [(sample.caption, names[sample.label]) for sample in read_samples(dataset, split="train")]
    assert all(name in caption.replace("medium-weight", "") for caption, name in captions)
    for words in (("thin", "medium-weight", "bold"), ("leaning left", "upright", "leaning right")):
        share = [sum(word in caption for caption, _ in captions) / len(captions) for word in words]
        assert share == pytest.approx([1 / 3] * 3, abs=0.01)


def test_preparing_twice_in_two_places_gives_the_same_digest(dataset: str, tmp_path: Path) -> None:
    assert open_manifest(made(tmp_path)).digest == open_manifest(dataset).digest


def test_another_shard_size_is_another_dataset_with_the_same_samples(dataset: str, tmp_path: Path) -> None:
    other = made(tmp_path, shard_samples=1000)
    assert open_manifest(other).digest != open_manifest(dataset).digest
    assert list(read_samples(other, split="train")) == list(read_samples(dataset, split="train"))


def test_a_second_preparer_reuses_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events.jsonl"
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    arguments = ["--source", SOURCE, "--manifest", uri, "--events", str(events), "--learner", "east"]
    assert main(arguments) == 0
    before = path_of(uri).stat().st_mtime_ns
    assert main(arguments) == 0
    assert path_of(uri).stat().st_mtime_ns == before
    told = [event for event in read_events(events.read_text().splitlines()) if isinstance(event, Prepared)]
    assert [(event.reused, event.samples, event.learner) for event in told] == [
        (False, 1797, "east"),
        (True, 1797, "east"),
    ]
    out, err = capsys.readouterr()
    assert out.split() == [open_manifest(uri).digest] * 2
    assert "reused 1797 samples" in err


def test_preparers_that_start_together_make_one_dataset(tmp_path: Path) -> None:
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    command = [sys.executable, "-m", "services.prepare", "--source", SOURCE, "--manifest", uri]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert {out.strip() for out, _ in ended} == {open_manifest(uri).digest}
    assert sorted("reused" in err for _, err in ended) == [False, True]
    assert len(visible(tmp_path / "digits")) == 2


def test_a_killed_preparer_leaves_no_half_dataset_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    """The child kills itself between its last shard and the manifest, the worst place there is."""
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    child = (
        "import os, signal, sys\n"
        "from services.prepare import store\n"
        "from services.prepare.__main__ import main\n"
        "store._commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"main(['--source', {SOURCE!r}, '--manifest', {uri!r}])\n"
    )
    ended = subprocess.run([sys.executable, "-c", child], capture_output=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not path_of(uri).exists()
    (tmp_path / "digits" / ".prepare-1234").mkdir()  # and as if one had been killed earlier still
    (tmp_path / "digits" / ".prepare-1234" / "train-00000.shard").write_bytes(b"half")
    made(tmp_path)
    assert len(list(read_samples(uri, split="train"))) == 1077
    assert len(visible(tmp_path / "digits")) == 2


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(store, "_write_durable", full)
    with pytest.raises(DataError, match="No space left") as caught:
        made(tmp_path)
    assert "free space" in caught.value.hint
    assert visible(tmp_path / "digits") == []


def test_waiting_for_another_preparer_has_a_deadline(tmp_path: Path) -> None:
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    with exclusive(tmp_path / "digits", timeout_seconds=1), pytest.raises(DataError, match="another process"):
        prepare(uri, source=SOURCE, shard_samples=256, lock_timeout_seconds=0)


def test_another_dataset_in_the_same_place_is_not_overwritten(tmp_path: Path) -> None:
    uri = made(tmp_path)
    with pytest.raises(RefusedError, match="another dataset is there"):
        made(tmp_path, shard_samples=100)
    assert open_manifest(uri).count("train") == 1077


def test_a_damaged_dataset_is_not_reused(tmp_path: Path) -> None:
    uri = made(tmp_path)
    shard = path_of(uri).parent / open_manifest(uri).splits.test[1].path
    data = bytearray(shard.read_bytes())
    data[-1] ^= 4
    shard.write_bytes(data)
    with pytest.raises(DataError, match="corrupt"):
        made(tmp_path)


def test_a_path_through_a_file_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("not a folder")
    with pytest.raises(DataError, match="cannot be written") as caught:
        made(tmp_path)
    assert str(tmp_path / "digits") in caught.value.where


def test_what_a_person_got_wrong_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    uri = (tmp_path / "manifest.json").as_uri()
    assert main(["--source", "mnist", "--manifest", uri]) == ConfigError.exit_code
    assert main(["--source", SOURCE, "--manifest", uri, "--shard-samples", "0"]) == ConfigError.exit_code
    assert main(["--source", SOURCE, "--manifest", "ftp://host/manifest.json"]) == ConfigError.exit_code
    _, err = capsys.readouterr()
    assert "unknown source 'mnist'" in err
    assert "hint: sources are: sklearn-digits, python-docstrings; or a URI" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serve_objects(tmp_path_factory.mktemp("store")) as one, environment_of(one):
        yield one


def test_a_bucket_holds_the_same_dataset_as_a_folder(dataset: str, server: ObjectServer, tmp_path: Path) -> None:
    uri = f"{server.uri()}/digits/manifest.json"
    manifest, reused = prepare(uri, source=SOURCE, shard_samples=256, lock_timeout_seconds=5)
    assert not reused
    assert manifest == read_manifest(uri) == open_manifest(dataset)
    assert prepare(uri, source=SOURCE, shard_samples=256, lock_timeout_seconds=5) == (manifest, True)
    local = local_manifest(uri, cache=tmp_path)
    for split in SPLITS:
        assert list(read_samples(local, split=split)) == list(read_samples(dataset, split=split))
    with pytest.raises(RefusedError, match="another dataset is there"):
        prepare(uri, source=SOURCE, shard_samples=100, lock_timeout_seconds=5)


def test_preparers_of_one_bucket_that_start_together_make_one_dataset(server: ObjectServer) -> None:
    uri = f"{server.uri()}/digits/manifest.json"
    command = [sys.executable, "-m", "services.prepare", "--source", SOURCE, "--manifest", uri]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    assert {out.strip() for out, _ in ended} == {read_manifest(uri).digest}
    assert sorted("reused" in err for _, err in ended) == [False, True]


def test_a_damaged_or_lost_shard_in_a_bucket_is_not_reused(server: ObjectServer) -> None:
    uri = f"{server.uri()}/digits/manifest.json"
    manifest, _ = prepare(uri, source=SOURCE, shard_samples=256, lock_timeout_seconds=5)
    bucket, key = server.open(uri.rpartition("/")[0]), manifest.splits.test[1].path
    bucket.put(key, b"x")
    with pytest.raises(DataError, match="corrupt"):
        prepare(uri, source=SOURCE, shard_samples=256, lock_timeout_seconds=5)
    bucket.delete([key])
    with pytest.raises(DataError, match="does not exist"):
        prepare(uri, source=SOURCE, shard_samples=256, lock_timeout_seconds=5)
