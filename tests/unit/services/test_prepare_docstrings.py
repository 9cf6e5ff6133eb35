"""The text of the docstrings source: cut without gaps, split without overlap, the same at every call."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from services.prepare import docstrings
from services.prepare.packing import Samples
from spec.errors import ConfigError


@pytest.fixture(scope="module")
def samples() -> Samples:
    return docstrings.load()


def test_it_is_the_text_of_the_standard_library(samples: Samples) -> None:
    text = b"".join(sample.pixels[:-1] for sample in samples.train)
    assert len(text) > 1_000_000
    for module in (b"Record of phased-in incompatible language changes", b"Heap queue algorithm"):
        assert text.count(module) == 1
    assert {len(sample.pixels) for sample in (*samples.train, *samples.test)} == {docstrings.CONTEXT + 1}


def test_about_a_sixteenth_is_held_out_in_runs(samples: Samples) -> None:
    train, test = ({sample.id for sample in split} for split in (samples.train, samples.test))
    assert train | test == set(range(len(train) + len(test)))
    assert not train & test
    assert 0.04 < len(test) / len(train) < 0.09
    assert len({number // docstrings.RUN for number in test}) == -(-len(test) // docstrings.RUN)


def test_neighbouring_windows_share_one_byte_and_no_byte_is_left_out() -> None:
    text = bytes(range(256)) * 20
    cut = docstrings.split(text)
    windows = [one.pixels for one in sorted((*cut.train, *cut.test), key=lambda one: one.id)]
    assert all(one[-1] == other[0] for one, other in pairwise(windows))
    assert b"".join(one[:-1] for one in windows) == text[: len(windows) * docstrings.CONTEXT]
    assert len(text) - len(windows) * docstrings.CONTEXT <= docstrings.CONTEXT


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text('"""All there is."""')
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": str(tmp_path)}.__getitem__)
    with pytest.raises(ConfigError, match="only 13 bytes of docstrings"):
        docstrings.load()
