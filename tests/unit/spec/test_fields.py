"""Help comes from the models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from spec.experiment import Experiment
from spec.fields import describe, help_text


def models_below(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_below(field.annotation)
    for part in get_args(annotation):
        yield from models_below(part)


def test_every_field_that_a_person_can_write_has_help() -> None:
    for model in set(models_below(Experiment)):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


@pytest.mark.parametrize(
    ("path", "want_type", "want_default"),
    [
        (("learners", "groups", "resources", "gpu"), "text", "None"),
        (("train", "batch"), "whole number", "64"),
        (("sync", "mode"), "barrier | decoupled", "'barrier'"),
        (("services", "replicas"), "whole number", "1"),
        (("version",), "1", ""),
    ],
)
def test_a_field_is_described_by_its_path(path: tuple[str, ...], want_type: str, want_default: str) -> None:
    found = describe(Experiment, path)
    assert found is not None
    assert (found.type, found.default) == (want_type, want_default)
    assert found.text


def test_a_mapping_lists_its_keys() -> None:
    found = describe(Experiment, ("learners", "groups"))
    assert found is not None
    assert [name for name, _ in found.fields] == ["name", "nodes", "ranks", "resources"]


def test_an_unknown_path_has_no_description() -> None:
    assert describe(Experiment, ("learners", "nope")) is None
    assert help_text(Experiment, ("nope",)) == ""
