"""A Pulumi program run without an engine: what it registered, and what it exported.

    recorded = record(program("prod.us-east5", config), stack="prod.us-east5", answers=answers)
    recorded.one("gcp:container/nodePool:NodePool", "h200-a").inputs["nodeCount"]

Promises: every registration with its parents, inputs and the options that decide what the engine may do to it
(protection, order of deletion, time limits); numbers as the program meant them. Does not run a provider's checks nor
its diff: that is for the tests with the real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from pulumi.runtime import mocks, rpc, settings
from pulumi.runtime.stack import run_in_stack

REFERENCE = "pulumi:pulumi:StackReference"
ROOT = "pulumi:pulumi:Stack"
SECRET = "[secret]"
"""In place of a secret value."""
DEADLINE_SECONDS = 30

Answer = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Name and inputs of a resource -> outputs that only the cloud would know."""


@dataclass(frozen=True)
class Recorded:
    """One registered resource."""

    type: str
    name: str
    parents: tuple[str, ...]
    """Names from below the stack down to the direct parent, as `type name`."""
    inputs: dict[str, Any]
    custom: bool
    protect: bool
    retain_on_delete: bool
    delete_before_replace: bool
    ignore_changes: tuple[str, ...]
    aliases: tuple[str, ...]
    timeouts: tuple[str, str, str]
    """Of create, update, delete; empty texts where the provider's own hold."""
    depends_on: tuple[str, ...]
    """Names of resources, components resolved to what they contain by the SDK."""
    provider: str
    secret_inputs: tuple[str, ...]


@dataclass
class RecordedStack:
    """Everything one program registered, in the order of registration."""

    resources: list[Recorded] = field(default_factory=list[Recorded])
    outputs: dict[str, Any] = field(default_factory=dict[str, Any])
    secret_outputs: list[str] = field(default_factory=list[str])

    def of(self, kind: str) -> list[Recorded]:
        """All of one type."""
        return [one for one in self.resources if one.type == kind]

    def one(self, kind: str, name: str) -> Recorded:
        """The resource of that type and name."""
        found = [one for one in self.of(kind) if one.name == name]
        assert len(found) == 1, f"{len(found)} of {kind} {name}; there are {[one.name for one in self.of(kind)]}"
        return found[0]


def record(
    program: Callable[[], Awaitable[None] | None],
    *,
    stack: str,
    answers: Mapping[str, Answer] | None = None,
    references: Mapping[str, Mapping[str, Any]] | None = None,
    lookups: Mapping[str, Mapping[str, Any]] | None = None,
    preview: bool = False,
) -> RecordedStack:
    """Run a program. `answers` by type; `references`: outputs of the stacks it refers to, by stack name; `lookups`: the
    cloud's answers, by token. A look-up that is not among them fails: each makes every preview depend on the cloud.
    """
    found = RecordedStack()
    monitor = _Monitor(found, _Answers(answers or {}, references or {}, lookups or {}))

    async def run() -> None:
        # As `set_mocks` does, but without its root resource: `run_in_stack` makes that, in the loop that runs here.
        settings.reset_options()
        cast("Any", settings.SETTINGS).outputs.clear()
        features = set(monitor.GetDeploymentInfo(None).supportedFeatures)
        settings.configure(
            mocks.MockSettings(
                monitor=monitor, monitor_features=features, engine=mocks.MockEngine(None), project="gkr", stack=stack,
                dry_run=preview, organization="organization", callbacks=None,
            )
        )  # fmt: skip
        await asyncio.wait_for(run_in_stack(program), timeout=DEADLINE_SECONDS)

    asyncio.run(run())
    return found


class _Answers(mocks.Mocks):
    def __init__(
        self,
        answers: Mapping[str, Answer],
        references: Mapping[str, Mapping[str, Any]],
        lookups: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._answers, self._references, self._lookups = answers, references, lookups

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        assert args.token in self._lookups, f"the program looks {args.token} up, and no answer was given"
        return dict(self._lookups[args.token]), []

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        if args.typ == REFERENCE:
            name = args.inputs["name"].split("/")[-1]
            assert name in self._references, f"no outputs were given for stack {name}"
            return args.name, {
                "name": args.inputs["name"],
                "outputs": dict(self._references[name]),
                "secretOutputNames": [],
            }
        answer = self._answers.get(args.typ)
        known = {"name": args.inputs.get("name", args.name), **args.inputs}
        return f"{args.name}-id", {**known, **(answer(args.name, args.inputs) if answer else {})}


class _Monitor(mocks.MockMonitor):
    def __init__(self, found: RecordedStack, answers: _Answers) -> None:
        super().__init__(answers)
        self._found = found
        self._chains: dict[str, tuple[str, ...]] = {}

    def make_urn(self, parent: str, type_: str, name: str) -> str:
        urn = super().make_urn(parent, type_, name)
        if type_ != ROOT and urn not in self._chains:
            self._chains[urn] = (*self._chains.get(parent, ()), f"{type_} {name}")
        return urn

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802  (the protocol's name)
        response = super().RegisterResource(request)
        _close_loop()
        if request.type not in (ROOT, REFERENCE):
            self._found.resources.append(self._recorded(request, response.urn))
        return response

    def ReadResource(self, request: Any) -> Any:  # noqa: N802  (the protocol's name)
        try:
            return super().ReadResource(request)
        finally:
            _close_loop()

    def Invoke(self, request: Any) -> Any:  # noqa: N802  (the protocol's name)
        try:
            return super().Invoke(request)
        finally:
            _close_loop()

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802  (the protocol's name)
        if ROOT in request.urn.split("::")[2].split("$")[-1:]:
            raw = rpc.deserialize_properties(request.outputs, keep_unknowns=True)
            self._found.outputs = {key: _plain(value) for key, value in raw.items()}
            self._found.secret_outputs = [key for key, value in raw.items() if _holds_secret(value)]
        return super().RegisterResourceOutputs(request)

    def _recorded(self, request: Any, urn: str) -> Recorded:
        inputs = rpc.deserialize_properties(request.object, keep_unknowns=True)
        times = request.customTimeouts
        return Recorded(
            type=request.type,
            name=request.name,
            parents=self._chains[urn][:-1],
            inputs={key: _plain(value) for key, value in inputs.items()},
            custom=request.custom,
            protect=request.protect,
            retain_on_delete=request.retainOnDelete,
            delete_before_replace=request.deleteBeforeReplace,
            ignore_changes=tuple(request.ignoreChanges),
            aliases=tuple(one.urn or one.spec.name for one in request.aliases),
            timeouts=(times.create, times.update, times.delete),
            depends_on=tuple(sorted({one.split("::")[-1] for one in request.dependencies})),
            provider=request.provider.split("::")[-2] if request.provider else "",
            secret_inputs=tuple(key for key, value in inputs.items() if _holds_secret(value)),
        )


def _close_loop() -> None:
    """The SDK's mocks leave an event loop open in every thread of the executor."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return
    with suppress(RuntimeError):
        asyncio.get_event_loop().close()
        asyncio.set_event_loop(None)


def _plain(value: Any) -> Any:
    """Whole numbers as such (the wire has only floats), and no secret in clear text."""
    if rpc.is_rpc_secret(value):
        return SECRET
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _holds_secret(value: Any) -> bool:
    if rpc.is_rpc_secret(value):
        return True
    if isinstance(value, dict):
        return any(_holds_secret(one) for one in value.values())
    return isinstance(value, list) and any(_holds_secret(one) for one in value)
