from __future__ import annotations

import pytest

from gkr.explain import explain, field_paths, lines
from spec.errors import NotFoundError


def test_a_field_has_type_default_help_and_example() -> None:
    found = explain("train.batch")
    assert (found.type, found.default, found.example) == ("whole number", "64", "64")
    assert "Samples of one inner step" in found.text
    assert any("train.batch" in line for line in lines(found))


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("groups.resources.gpu", "H200:8"),
        ("learners.groups.resources.memory", "64Gi"),
        ("services.kind", "encode"),
        ("services.encoder.kind", "encode"),
    ],
)
def test_nested_fields_are_reached_with_names_left_out_or_given(path: str, want: str) -> None:
    assert explain(path).example == want


def test_every_field_that_can_be_completed_can_be_explained() -> None:
    paths = field_paths()
    assert len(paths) > 80
    for path in paths:
        found = explain(path)
        assert found.text or found.fields, f"{path} has no help"


@pytest.mark.parametrize(
    ("wrong", "want"),
    [
        ("train.btch", "train.batch"),
        ("lr", "train.learning_rate"),
        ("groups.gpus", "groups.resources.gpu"),
        ("learner", "learners"),
    ],
)
def test_an_unknown_field_gets_the_near_ones(wrong: str, want: str) -> None:
    with pytest.raises(NotFoundError) as raised:
        explain(wrong)
    assert want in raised.value.hint


def test_without_a_field_the_file_is_explained() -> None:
    assert "learners" in dict(explain("").fields)
