"""Embeddings: no hole, no mixture, whatever the encoder does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from services.client import LocalClient, ServiceClient
from services.directory import write_directory
from services.prepare import encoded as module
from services.prepare.embed import CaptionEmbedder, LatentEmbedder
from services.prepare.encoded import Job, advance
from services.prepare.encoders import embedders_of, service_of
from services.prepare.examine import Kept
from services.server import Server
from services.service import Call, Reply
from spec.errors import ConfigError, DataError, GkrError, RefusedError
from spec.preparation import PrepareRules
from spec.services import Directory, Replica
from spec.shards import open_manifest, path_of
from storage.images import decode_into
from tests.builders.encoder_doubles import WIDTH, EncoderDouble, embedding_of, latents_of
from tests.builders.pictures import encoded, image_folder, picture, read_tar_dataset

RULES = PrepareRules.model_validate({"embed": "captions", "held_out": 0.2, "shard_bytes": "8Ki"})


def values_of(uri: str, *, place: int = 0, shape: tuple[int, ...] = (WIDTH,)) -> np.ndarray:
    """All values [samples, *shape] of a feature of a dataset."""
    manifest = open_manifest(uri)
    feature = manifest.features[place]
    assert tuple(feature.shape) == shape
    shards = [*manifest.splits.train, *manifest.splits.test]
    assert [file.samples for file in feature.files] == [shard.samples for shard in shards]
    parts = [np.fromfile(path_of(uri).parent / file.path, dtype="<f4") for file in feature.files]
    return np.concatenate(parts).reshape(-1, *shape)


def assert_no_hole(uri: str) -> None:
    samples, values = read_tar_dataset(uri), values_of(uri)
    assert len(samples) == len(values)
    for (_, text, _), value in zip(samples, values, strict=True):
        assert np.array_equal(value, embedding_of(text.get("caption", "")))


def test_report_17_an_encoder_out_of_memory_leaves_no_holes(tmp_path: Path) -> None:
    """https://github.com/bghira/SimpleTuner/issues/859: the encoder runs out of memory while caching, the job goes on,
    and training dies much later on a missing entry. Here the batch is retried smaller, what fails alone is dropped
    where everybody can see it, and each sample of the dataset has its embedding."""
    source = tmp_path / "source"
    image_folder(source, count=30)
    (source / "a" / "0006.txt").write_text("a huge caption")
    (source / "b" / "0015.txt").write_text("another huge caption")
    double, uri = EncoderDouble(most=5), (tmp_path / "made" / "manifest.json").as_uri()
    report = advance(Job(source.as_uri(), uri, RULES), embedders=double.embedders())
    assert_no_hole(uri)
    assert report.train + report.test == 28
    assert report.dropped["not-encoded"] == 2
    told = report.examples["not-encoded"][0]
    assert "0006.jpg: caption_embedding: the encoder failed on it: " in told
    assert "out of memory on 1 captions" in told
    assert double.failed <= 14, "what was too much once is not asked again and again"


def test_an_encoder_that_fails_on_everything_ends_the_preparation_and_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP", 8)
    monkeypatch.setattr(module, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr("services.prepare.embed.MAX_FAILED_IN_A_ROW", 10)
    source = image_folder(tmp_path / "source", count=30)
    job = Job(source, (tmp_path / "made" / "manifest.json").as_uri(), RULES)
    double = EncoderDouble()
    embedders = double.embedders()
    assert not advance(job, embedders=embedders, seconds=0).done
    double.most = 0
    with pytest.raises(DataError, match="failed on 10 samples one after the other") as caught:
        advance(job, embedders=embedders)
    assert "start again" in caught.value.hint
    assert not path_of(job.manifest).exists()
    double.most = 1000
    report = advance(job, embedders=embedders)
    assert_no_hole(job.manifest)
    assert "not-encoded" not in report.dropped, "what a broken encoder failed on is asked again"
    assert len(values_of(job.manifest)) == 30


def test_one_bad_caption_does_not_make_all_others_slow() -> None:
    double = EncoderDouble()
    samples = [Kept("", b"", "png", 1, 1, {"caption": f"picture {number}"}, b"", 0) for number in range(640)]
    samples[77].text["caption"] = "a huge one"
    (embedder,) = double.embedders()
    found = [one for start in range(0, 640, 64) for one in embedder.embed(samples[start : start + 64])]
    assert [number for number, one in enumerate(found) if isinstance(one, str)] == [77]
    assert len(double.asked) < 80
    assert not embedder.failing


def test_latents_lie_beside_embeddings_and_belong_to_their_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and started again on the way, by an autoencoder with room for five images."""
    monkeypatch.setattr(module, "GROUP", 8)
    source = tmp_path / "source"
    image_folder(source, count=30)
    (source / "tiny.png").write_bytes(encoded(picture(50, width=30, height=11)))
    rules = RULES.model_copy(update={"latents": "32x24"})
    job = Job(source.as_uri(), (tmp_path / "made" / "manifest.json").as_uri(), rules)
    double = EncoderDouble(most=5)
    embedders = [*double.embedders(), LatentEmbedder(LocalClient(double), width=32, height=24)]
    while not (report := advance(job, embedders=embedders, seconds=0)).done:
        pass
    assert report.encoders == {"caption_embedding": "encoder-1", "latents": "autoencoder-1"}
    assert (report.dropped["small"], report.train + report.test) == (1, 30)
    assert_no_hole(job.manifest)
    latents = values_of(job.manifest, place=1, shape=(3, 3, 4))
    for (image, _, _), value in zip(read_tar_dataset(job.manifest), latents, strict=True):
        pixels = np.empty((1, 24, 32, 3), np.uint8)
        decode_into(pixels[0], image)
        assert np.array_equal(value, latents_of(pixels)[0])


def test_two_fingerprints_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP", 8)
    source = image_folder(tmp_path / "source", count=30)
    job = Job(source, (tmp_path / "made" / "manifest.json").as_uri(), RULES)
    double = EncoderDouble()
    double.fingerprints = ["encoder-1"] * 3 + ["encoder-2"]
    with pytest.raises(RefusedError, match="encoder encoder-2, before with encoder-1"):
        advance(job, embedders=double.embedders())
    assert not path_of(job.manifest).exists()
    first = EncoderDouble()
    advance(job, embedders=first.embedders())
    with pytest.raises(RefusedError, match="another dataset is there"):
        advance(job, embedders=double.embedders())
    assert open_manifest(job.manifest).features[0].encoder == "encoder-1"


def test_over_the_wire_it_is_the_same(tmp_path: Path) -> None:
    """An internal error of the replica is a refusal here, and halves the batch too."""
    source = image_folder(tmp_path / "source", count=20)
    double = EncoderDouble(most=7)
    with Server(double, queue_depth=4) as server:
        replica = Replica(service="encoder", kind="encode", index=0, endpoint=server.endpoint, incarnation=1)
        write_directory(tmp_path / "directory.json", directory=Directory(epoch=1, replicas=[replica]))
        with closing(ServiceClient(tmp_path / "directory.json", service="encoder", identity="prepare")) as client:
            uri = (tmp_path / "made" / "manifest.json").as_uri()
            report = advance(Job(source, uri, RULES), embedders=[CaptionEmbedder(client)])
    assert double.failed > 0
    assert "not-encoded" not in report.dropped
    assert_no_hole(uri)


@pytest.mark.parametrize("written", [True, False])
def test_a_service_that_the_directory_does_not_name_is_not_waited_for(tmp_path: Path, *, written: bool) -> None:
    replica = Replica(service="judge", kind="evaluate", index=0, endpoint="tcp://127.0.0.1:1", incarnation=1)
    path = tmp_path / "directory.json"
    if written:
        write_directory(path, directory=Directory(epoch=1, replicas=[replica]))
    there = "judge" if written else "none"
    with (
        pytest.raises(ConfigError, match=f"no replica of encoder answers; there are {there}"),
        embedders_of(RULES, directory=path),
    ):
        pass
    with pytest.raises(ConfigError, match="no replica of preparer answers"):
        service_of("preparer", directory=path, source="a", uri="b", rules=RULES)


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    class Broken(EncoderDouble):
        def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
            (reply,) = super().compute(method, calls)
            if isinstance(reply, Reply) and "picture 3, été" in calls[0].args.captions:
                reply.tensors["embeddings"][0, 0] = np.nan
            return [reply]

    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.png").write_bytes(encoded(picture(number)))
        (folder / f"{number}.txt").write_text(f"picture {number}, été")
    uri = (tmp_path / "made" / "manifest.json").as_uri()
    report = advance(Job(folder.as_uri(), uri, RULES), embedders=Broken().embedders())
    assert report.dropped == {"not-encoded": 1}
    assert_no_hole(uri)
