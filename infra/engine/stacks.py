"""One stack in one place: preview, up, down and outputs, with what the engine said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from pulumi import automation
from pulumi.automation import errors

from infra.engine.command import Engine
from infra.engine.events import Record, plain
from infra.engine.place import Place
from infra.facts import SECRETS
from infra.programs import Program, program
from infra.review import Preview, read_preview
from spec.errors import GkrError, NotFoundError, RefusedError
from spec.stack import PROJECT, AnyStack

Say = Callable[[str], None]
_QUICK_SECONDS = 300.0
"""For what only looks at the state."""
_STOCK_OUT = ("RESOURCE_POOL_EXHAUSTED", "does not have enough resources available", "GCE_STOCKOUT")


@dataclass(frozen=True)
class Stack:
    """One stack. `environment`: what its program reads, such as folders of charts."""

    name: str
    config: AnyStack
    place: Place
    say: Say
    seconds: float
    """Of one run of the engine."""
    environment: Mapping[str, str]
    declare: Callable[[str, AnyStack], Program] = program
    """What the engine runs."""
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Secret configuration that this machine adds: Secret to its keys and values."""

    def preview(self) -> tuple[Preview, dict[str, Any]]:
        """What would change, and the engine's JSON; a preview that failed has its errors in its diagnostics."""
        record, made = Record(say=self.say), self.declare(self.name, self.config)
        stack = self._open(create=True)
        with _environment(self.environment):
            try:
                stack.preview(on_event=record.take, program=made, suppress_progress=True)
            except errors.CommandError as error:
                if not record.errors():
                    raise self._failed(error, record, action="preview") from None
        digest = record.digest()
        return read_preview(json.dumps(digest), stack=self.name), digest

    def up(self) -> dict[str, int]:
        """Make it so; number of resources by what was done."""
        record = Record(say=self.say)
        stack = self._open(create=True)
        with _environment(self.environment):
            try:
                stack.up(on_event=record.take, program=self.declare(self.name, self.config), suppress_progress=True,
                         show_secrets=False)  # fmt: skip
            except errors.CommandError as error:
                raise self._failed(error, record, action="up") from None
        return record.counts

    def down(self) -> dict[str, int]:
        """Delete everything that is not kept on purpose."""
        record = Record(say=self.say)
        stack = self._open(create=False)
        try:
            stack.destroy(on_event=record.take, suppress_progress=True, show_secrets=False)
        except errors.CommandError as error:
            raise self._failed(error, record, action="down") from None
        return record.counts

    def outputs(self) -> dict[str, Any] | None:
        """What it says to others, secrets masked; None if it was never brought up."""
        try:
            stack = self._open(create=False, seconds=_QUICK_SECONDS)
        except NotFoundError:
            return None
        found = {name: "[secret]" if one.secret else one.value for name, one in stack.outputs().items()}
        return found or None

    def secret(self, name: str) -> str:
        """One output in clear text; empty if there is none."""
        try:
            found = self._open(create=False, seconds=_QUICK_SECONDS).outputs().get(name)
        except NotFoundError:
            return ""
        return str(found.value) if found else ""

    def state(self) -> dict[str, Any]:
        """The state as the engine keeps it: what is secret is encrypted in it."""
        engine = Engine(self.place.home, seconds=_QUICK_SECONDS)
        arguments = ["stack", "export", "--stack", self.name]
        found = engine.run(arguments, str(self.place.work(self.name)), self.place.environment())
        return cast("dict[str, Any]", json.loads(found.stdout)["deployment"])

    def _open(self, *, create: bool, seconds: float = 0.0) -> automation.Stack:
        work = self.place.work(self.name)
        work.mkdir(parents=True, exist_ok=True)
        runtime = automation.ProjectRuntimeInfo("python")
        workspace = automation.LocalWorkspace(
            work_dir=str(work),
            env_vars=self.place.environment(),
            pulumi_command=Engine(self.place.home, seconds=seconds or self.seconds),
            # Against Google Cloud the repository's own Pulumi.yaml says it, with the folder of stack files.
            project_settings=automation.ProjectSettings(PROJECT, runtime=runtime) if self.place.double else None,
            program=self.declare(self.name, self.config),
        )
        try:
            if not create:
                return automation.Stack.select(self.name, workspace)
            found = automation.Stack.create_or_select(self.name, workspace)
        except errors.StackNotFoundError:
            raise NotFoundError(
                f"stack {self.name} was never brought up here", hint=f"run: make up STACK={self.name}"
            ) from None
        if self.secrets:
            value = json.dumps(self.secrets, sort_keys=True)
            found.set_config(f"{PROJECT}:{SECRETS}", automation.ConfigValue(value, secret=True))
        return found

    def _failed(self, error: errors.CommandError, record: Record, *, action: str) -> GkrError:
        """The engine's error as one of ours: what it said, and what helps."""
        said = record.errors() or [plain(str(error))[-2000:]]
        text = "\n".join(said)
        message = f"{action} of {self.name} failed:\n{text}"
        if isinstance(error, errors.ConcurrentUpdateError):
            hint = f"somebody else changes this stack right now; if nobody does: pulumi cancel --stack {self.name}"
            return RefusedError(f"{self.name} is locked", hint=hint)
        if "protect" in text and ("marked for protection" in text or "is protected" in text):
            hint = "take the protection off in a change of its own, have it reviewed, then run this again"
            return RefusedError(message, hint=hint)
        if any(one in text for one in _STOCK_OUT):
            hint = f"what was made is in the state; when there are machines again: make up STACK={self.name}"
            return RefusedError(message, hint=hint)
        return GkrError(message, hint=f"what was done is in the state; run make {action} STACK={self.name} to go on")


@contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """Set for the program, which reads what differs between machines from there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
