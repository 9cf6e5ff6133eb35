"""Stacks in the real engine, with the Google Cloud double, in a folder of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.engine import tools
from infra.engine.place import Place
from infra.engine.stacks import Stack
from infra.programs import Program, program
from infra.review import Preview, Review, review
from infra.review.preview import Step
from spec.stack import AnyStack
from tests.builders.gcp_double.cloud import Cloud
from tests.builders.stack_files import shipped

SECONDS = 150.0
"""Of one run of the engine in a test."""


@dataclass
class World:
    """A backend, and a folder that stands for Google Cloud."""

    place: Place
    said: list[str] = field(default_factory=list[str])
    """Progress of everything that ran."""

    @property
    def cloud(self) -> Cloud:
        """What the double made."""
        return Cloud(self.place.cloud)

    def stack(
        self, name: str, *changes: str, declare: Callable[[str, AnyStack], Program] = program, **environment: str
    ) -> Stack:
        """A shipped stack with changes as `--set` takes them."""
        config = shipped(name, *changes).value
        return Stack(name, config, self.place, self.said.append, SECONDS, environment, declare)

    def preview(self, name: str, *changes: str, labels: tuple[str, ...] = (), **options: Any) -> Review:
        """The review of what the changes would do to a stack."""
        return self.reviewed(self.stack(name, *changes, **options).preview()[0], labels=labels)

    def reviewed(self, preview: Preview, *, labels: tuple[str, ...] = ()) -> Review:
        """The review of a preview."""
        from infra.policy.stacks import settings_for
        from tests.builders.stack_files import NAMES

        return review(preview, settings=settings_for(preview.stack, stacks=NAMES), labels=labels)


def world(folder: Path, *, platform: bool = False) -> World:
    """A new one, in which nothing is up."""
    place = Place(folder, double=True)
    tools.prepare(place, platform=platform)
    return World(place)


def step(found: Review | Preview, name: str, *, kind: str = "NodePool") -> Step:
    """The step of one resource."""
    preview = found.preview if isinstance(found, Review) else found
    steps = [one for one in preview.steps if one.name == name and one.type.endswith(f":{kind}")]
    assert len(steps) == 1, f"{len(steps)} steps of {kind} {name}; {[(one.kind, one.name) for one in preview.steps]}"
    return steps[0]


def declares(run: Callable[[], object]) -> Callable[[str, AnyStack], Program]:
    """A program of a test's own in place of a stack's."""

    async def declared() -> None:
        run()

    return lambda _name, _config: declared


@contextlib.contextmanager
def changed(target: object, name: str, value: object) -> Generator[None]:
    """Code of ours as a change to the repository would leave it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield
