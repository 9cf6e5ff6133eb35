"""What inspection tells about datasets of both formats, and the sheet that it draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from services.prepare.__main__ import prepare
from services.prepare.encoded import Job, advance
from services.prepare.inspect import inspect, main
from services.prepare.sheet import TILE
from spec.errors import DataError
from spec.preparation import PrepareRules, facts_of
from spec.shards import open_manifest, path_of
from tests.builders.encoder_doubles import EncoderDouble
from tests.builders.pictures import encoded, image_folder, picture

RULES = PrepareRules.model_validate(
    {"held_out": 0.2, "shard_bytes": "8Ki", "embed": "captions", "labels": "folders", "duplicates": "keep"}
)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    source = tmp_path / "source"
    image_folder(source, count=20)
    (source / "a" / "again.jpg").write_bytes(encoded(picture(1, width=25, height=25), "JPEG", quality=50))
    uri = (tmp_path / "pictures" / "manifest.json").as_uri()
    advance(Job(source.as_uri(), uri, RULES), embedders=EncoderDouble().embedders())
    return uri


def test_it_tells_sizes_duplicates_captions_labels_and_features(dataset: str, tmp_path: Path) -> None:
    found = inspect(dataset, to=tmp_path / "sheet", samples=1000, tiles=12)
    assert (found.train + found.test, found.looked_at, found.damaged) == (22, 22, 0)
    assert (found.format, sorted(found.labels)) == ("tar", ["a", "b"])
    assert (found.duplicates, found.near_duplicates) == (1, 1), "the copy, and the same picture saved once more"
    assert (found.width.least, found.width.most) == (24, 32)
    assert sum(one.count for one in found.aspects) == 22
    assert found.captions == 15
    (feature,) = found.features
    assert (feature.encoder, feature.shape, feature.not_finite) == ("encoder-1", [6], 0)
    assert ("labels", ", ".join(found.labels)) in facts_of(found)


def test_the_sheet_shows_the_pictures(dataset: str, tmp_path: Path) -> None:
    found = inspect(dataset, to=tmp_path / "sheet", samples=1000, tiles=12)
    sheet = np.asarray(Image.open(tmp_path / "sheet" / "sheet.png").convert("RGB")).astype(int)
    first = np.asarray(Image.fromarray(_first_picture(dataset)).resize((TILE, TILE), Image.Resampling.NEAREST))
    centre = sheet[8 + TILE // 2 - 20 : 8 + TILE // 2 + 20, 8 + TILE // 2 - 20 : 8 + TILE // 2 + 20]
    wanted = first[TILE // 2 - 20 : TILE // 2 + 20, TILE // 2 - 20 : TILE // 2 + 20].astype(int)
    assert np.abs(centre - wanted).mean() < 30
    page = Path(found.sheet).read_text()
    assert "data:image/png;base64," in page
    assert found.digest in page
    assert "http" not in page


def _first_picture(dataset: str) -> np.ndarray:
    from tests.builders.pictures import read_tar_dataset

    image = read_tar_dataset(dataset)[0][0]
    import io

    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))


def test_damage_is_counted_and_a_short_file_of_features_is_an_error(dataset: str, tmp_path: Path) -> None:
    manifest = open_manifest(dataset)
    folder = path_of(dataset).parent
    path = folder / manifest.splits.train[0].path
    data = bytearray(path.read_bytes())
    data[600] ^= 255
    path.write_bytes(data)
    assert inspect(dataset, to=None, samples=1000, tiles=1).damaged == 1
    values = folder / manifest.features[0].files[0].path
    values.write_bytes(values.read_bytes()[:-4])
    with pytest.raises(DataError, match="values need"):
        inspect(dataset, to=None, samples=1, tiles=1)


def test_the_digits_can_be_inspected_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    prepare(uri, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=5)
    assert main([uri, "--samples", "50", "--to", f"{tmp_path / 'sheet'}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["format"], told["looked_at"], told["train"]) == ("inspection", "raw", 50, 1077)
    assert told["width"] == {"least": 8.0, "median": 8.0, "most": 8.0}
    assert told["captions"] == 50


def test_what_is_not_there_is_a_line_with_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([(tmp_path / "manifest.json").as_uri()]) == DataError.exit_code
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["exit_code"]) == ("error", 100)
    assert "does not exist" in told["message"]


def test_a_page_that_cannot_be_written_is_an_error_with_its_place(
    dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([dataset, "--to", str(tmp_path / "file" / "page")]) != 0
    told = json.loads(capsys.readouterr().out)
    assert (told["where"], told["message"]) == (f"{tmp_path}/file/page", "Not a directory")
