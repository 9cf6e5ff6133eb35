"""Every shipped document loads, and a broken one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec.load import load_recipe
from spec.nodes import Source
from spec.problems import DocumentError
from spec.train import ModelConfig
from tests.builders.experiments import ROOT, load

EXPERIMENTS = sorted((ROOT / "recipes").glob("*.yaml"))
TRAIN = sorted((ROOT / "recipes" / "train").glob("*.yaml"))


def test_there_are_shipped_documents() -> None:
    assert {path.name for path in EXPERIMENTS} >= {"digits.yaml", "portrait-2b.yaml", "text.yaml"}
    assert {path.name for path in TRAIN} >= {"digits.yaml", "portrait-2b.yaml", "docstrings.yaml"}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_shipped_experiment_loads_and_is_named_like_its_file(path: Path) -> None:
    assert load(path.read_text(encoding="utf-8")).value.name == path.stem


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path) -> None:
    recipe = load_recipe(Source(path.read_text(encoding="utf-8"), path.name))
    assert {one.origin for one in recipe.origins()} == {"recipe", "default"}


def test_a_recipe_with_a_wrong_key_is_refused_at_its_own_line() -> None:
    with pytest.raises(DocumentError, match=r'r\.yaml:2:1: error: unknown key "bach" at the top level'):
        load_recipe(Source("samples: 5\nbach: 3\n", "r.yaml"))


def test_what_the_file_says_outranks_the_recipe_key_by_key() -> None:
    text = "version: 1\nname: a\ngroups: [{nodes: 1}]\ntrain: {recipe: digits, model: {width: 96}}\n"
    train = load(text).value.train
    assert train is not None
    assert isinstance(train.model, ModelConfig)
    assert (train.model.width, train.model.text_width, train.batch) == (96, 384, 64)
