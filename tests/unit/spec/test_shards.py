"""A dataset's bytes either read back exactly or are refused with place and remedy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.errors import DataError
from spec.shard_bytes import HEADER_BYTES, INDEX_ENTRY_BYTES
from spec.shards import (
    Feature,
    Manifest,
    Sample,
    Shape,
    Shard,
    ShardView,
    Splits,
    open_manifest,
    pack_shard,
    path_of,
    read_samples,
    seal,
)

SHAPE = Shape(2, 3, 1)


def a_sample(number: int) -> Sample:
    return Sample(id=number, label=number % 10, caption=f"the {number}th, été", pixels=bytes([number % 256] * 6))


def a_dataset(folder: Path) -> str:
    """Five samples in two shards for training, one for testing; gives the manifest's URI."""
    files = {"train-0.shard": [a_sample(i) for i in range(3)], "train-1.shard": [a_sample(i) for i in (3, 4)]}
    files["test-0.shard"] = [a_sample(9)]
    shards: dict[str, Shard] = {}
    for name, samples in files.items():
        data = pack_shard(samples, shape=SHAPE)
        (folder / name).write_bytes(data)
        shards[name] = Shard(path=name, samples=len(samples), bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = Manifest(
        name="tiny",
        source="made up",
        recipe="by hand",
        image_height=2,
        image_width=3,
        image_channels=1,
        labels=[str(i) for i in range(10)],
        splits=Splits(train=[shards["train-0.shard"], shards["train-1.shard"]], test=[shards["test-0.shard"]]),
    )
    path = folder / "manifest.json"
    path.write_text(seal(manifest).write_json())
    return path.as_uri()


SAMPLES = st.lists(
    st.builds(
        Sample,
        id=st.integers(0, 2**64 - 1),
        label=st.integers(0, 2**32 - 1),
        caption=st.text(st.characters(codec="utf-8"), max_size=40),
        pixels=st.binary(min_size=6, max_size=6),
    ),
    max_size=5,
)


@given(samples=SAMPLES)
@settings(deadline=None, max_examples=60)
def test_what_was_packed_reads_back_exactly(samples: list[Sample]) -> None:
    view = ShardView(pack_shard(samples, shape=SHAPE), where="memory")
    assert list(view) == samples
    assert view.head.shape == SHAPE


def test_the_same_samples_always_give_the_same_bytes() -> None:
    samples = [a_sample(i) for i in range(4)]
    assert pack_shard(samples, shape=SHAPE) == pack_shard(list(samples), shape=SHAPE)


@given(data=st.binary(max_size=200))
@settings(deadline=None, max_examples=60)
def test_bytes_that_are_no_shard_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        ShardView(data, where="memory")


def test_every_truncation_is_refused() -> None:
    data = pack_shard([a_sample(i) for i in range(2)], shape=SHAPE)
    for length in range(len(data)):
        with pytest.raises(DataError) as caught:
            list(ShardView(data[:length], where="some/shard"))
        assert caught.value.where == "some/shard"
        assert "prepare" in caught.value.hint


def test_every_flipped_bit_is_noticed_without_the_manifest() -> None:
    data = pack_shard([a_sample(i) for i in range(2)], shape=SHAPE)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError):
            list(ShardView(bytes(damaged), where="memory"))


def test_a_shard_of_a_newer_layout_names_both_versions() -> None:
    data = bytearray(pack_shard([a_sample(1)], shape=SHAPE))
    data[8] = 9
    with pytest.raises(DataError, match=r"layout version 9, this reader knows 1"):
        ShardView(bytes(data), where="memory")


def test_a_sample_of_another_shape_is_not_packed() -> None:
    with pytest.raises(DataError, match="6 pixel bytes"):
        pack_shard([a_sample(1)], shape=Shape(3, 3, 1))


def test_a_dataset_reads_back_by_split_and_in_order(tmp_path: Path) -> None:
    uri = a_dataset(tmp_path)
    manifest = open_manifest(uri)
    assert (manifest.count("train"), manifest.count("test")) == (5, 1)
    assert [sample.id for sample in read_samples(uri, split="train")] == [0, 1, 2, 3, 4]
    assert [sample.id for sample in read_samples(uri, split="test")] == [9]


def test_the_digest_names_the_content_and_nothing_else(tmp_path: Path) -> None:
    manifest = open_manifest(a_dataset(tmp_path))
    assert seal(manifest) == manifest
    other = manifest.splits.train[0].model_copy(update={"sha256": "0" * 64})
    changed = manifest.model_copy(update={"splits": Splits(train=[other], test=manifest.splits.test)})
    assert seal(changed).digest != manifest.digest


def test_a_manifest_from_a_newer_writer_is_read_and_still_verified(tmp_path: Path) -> None:
    uri = a_dataset(tmp_path)
    path = path_of(uri)
    document = json.loads(path.read_text())
    del document["digest"]
    document["license"] = "CC0"
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    document["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(document))
    assert open_manifest(uri).digest == document["digest"]


def test_a_missing_manifest_names_its_place_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_manifest((tmp_path / "manifest.json").as_uri())
    assert caught.value.where == str(tmp_path / "manifest.json")
    assert "services.prepare" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 7, "name": 3}'])
def test_a_manifest_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(DataError, match="manifest"):
        open_manifest(path.as_uri())


def test_a_manifest_changed_by_hand_is_refused(tmp_path: Path) -> None:
    uri = a_dataset(tmp_path)
    path = path_of(uri)
    path.write_text(path.read_text().replace("tiny", "tidy"))
    with pytest.raises(DataError, match="was changed"):
        open_manifest(uri)


def test_a_manifest_cannot_name_files_outside_its_folder() -> None:
    for path in ("/etc/hostname", "../other/train.shard", "a/../../b", ""):
        with pytest.raises(ValueError, match="path"):
            Shard(path=path, samples=1, bytes=1, sha256="0" * 64)


def test_a_missing_shard_names_its_place(tmp_path: Path) -> None:
    uri = a_dataset(tmp_path)
    (tmp_path / "train-1.shard").unlink()
    with pytest.raises(DataError, match="does not exist") as caught:
        list(read_samples(uri, split="train"))
    assert caught.value.where.endswith("train-1.shard")


def test_a_truncated_shard_says_how_many_bytes_are_there(tmp_path: Path) -> None:
    uri = a_dataset(tmp_path)
    path = tmp_path / "train-1.shard"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=f"has {size - 5} bytes, the manifest says {size}"):
        list(read_samples(uri, split="train"))


def test_one_flipped_bit_in_a_shard_is_found_by_its_digest(tmp_path: Path) -> None:
    uri = a_dataset(tmp_path)
    path = tmp_path / "train-0.shard"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 3 * INDEX_ENTRY_BYTES + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="corrupt") as caught:
        list(read_samples(uri, split="train"))
    assert caught.value.where.endswith("train-0.shard")


def test_a_shard_that_may_not_be_read_is_said_so(tmp_path: Path) -> None:
    uri = a_dataset(tmp_path)
    (tmp_path / "train-0.shard").unlink()
    (tmp_path / "train-0.shard").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_samples(uri, split="train"))


@pytest.mark.parametrize("uri", ["gs://bucket/manifest.json", "manifest.json", "file://host/a.json", "file:a.json"])
def test_only_absolute_file_uris_are_taken(uri: str) -> None:
    with pytest.raises(DataError, match="file"):
        path_of(uri)


def test_a_uri_with_escapes_names_the_real_path(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "manifest.json"
    assert path_of(path.as_uri()) == path


def test_a_raw_manifest_has_the_bytes_and_the_digest_that_it_had_before_there_were_encoded_images(
    tmp_path: Path,
) -> None:
    manifest = open_manifest(a_dataset(tmp_path))
    written = json.loads(manifest.write_json())
    assert not {"format", "index", "features"} & set(written)
    assert manifest.digest == "900d4b24534b1cd9026848f9c89b436038d3e39a1ffa7143e8fa3087a9fd54d7"
    assert (manifest.format, manifest.index, manifest.features) == ("raw", None, [])


def tar_manifest(**more: object) -> Manifest:
    """Of three samples in two shards."""
    shards = [a_file("a.tar", samples=2), a_file("b.tar", samples=1)]
    fields: dict[str, object] = {
        "name": "tiny", "source": "made up", "recipe": "by hand", "image_height": 2, "image_width": 3,
        "image_channels": 3, "labels": [], "splits": Splits(train=shards, test=[]), "format": "tar",
        "index": a_file("index", samples=3), **more,
    }  # fmt: skip
    return Manifest.model_validate(fields)


def a_file(path: str, *, samples: int, size: int = 1) -> Shard:
    return Shard(path=path, samples=samples, bytes=size, sha256="0" * 64)


def test_encoded_images_have_an_index_of_all_samples() -> None:
    tar_manifest()
    for more in ({"index": None}, {"format": "raw"}, {"index": a_file("index", samples=4)}):
        with pytest.raises(ValueError, match="index"):
            tar_manifest(**more)


def test_report_17_a_dataset_with_a_hole_in_its_embeddings_cannot_be_opened() -> None:
    """https://github.com/bghira/SimpleTuner/issues/859: training dies later on a missing entry of the cache. A manifest
    whose values are not one for each sample is refused before anything starts."""

    def features(*files: Shard) -> list[Feature]:
        return [Feature(name="caption_embedding", of="caption", encoder="x", shape=[5], files=list(files))]

    tar_manifest(features=features(a_file("a.f32", samples=2, size=40), a_file("b.f32", samples=1, size=20)))
    for files in (
        [a_file("a.f32", samples=2, size=40)],
        [a_file("a.f32", samples=1, size=20), a_file("b.f32", samples=1, size=20)],
        [a_file("a.f32", samples=2, size=20), a_file("b.f32", samples=1, size=20)],
    ):
        with pytest.raises(ValueError, match="not one value for each sample"):
            tar_manifest(features=features(*files))
