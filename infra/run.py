"""`python -m infra.run preview|up|down|clusters STACK`: what `make preview`, `up`, `down` and `train STACK=` call.

A region means its platform too, unless --only says otherwise; `up` shows the preview's review first and goes on only if
nothing blocks it; `clusters` makes the clusters of stacks known to `gkr` and prints their names. Results go to stdout,
progress to stderr. With --cloud double nothing reaches Google: the provider is a test double, its state is apart from
everything real, and a banner says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from infra.engine import clusters, tools
from infra.engine.place import Place, place
from infra.engine.rendering import rendered
from infra.engine.stacks import Stack
from infra.engine.targets import Only, below, load, members, shipped
from infra.outputs import KUBECONFIG_OUTPUT, PLATFORM_OUTPUT
from infra.policy.stacks import settings_for
from infra.programs import program
from infra.review.__main__ import summary
from infra.review.comment import comment
from infra.review.preview import Preview
from infra.review.report import Review, review
from infra.review.reservations import by_gcloud, check_reservations
from spec.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REFUSED, ConfigError, GkrError
from spec.problems import DocumentError
from spec.stack import parse_stack_name

BANNER = """\
+--------------------------------------------------------------------------------+
|  CLOUD=double: a TEST DOUBLE answers in place of Google Cloud.                  |
|  Nothing is created, changed or billed there, and its state is kept apart.      |
+--------------------------------------------------------------------------------+
"""
DEADLINE_MINUTES = 200.0
"""A pool of GPU machines may take two hours, and stacks wait for several."""


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    action: str
    target: str
    only: Only
    double: bool
    output: str
    labels: tuple[str, ...]
    overrides: tuple[str, ...]
    seconds: float
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Progress."""
        sys.stderr.write(f"{time.monotonic() - self.started:6.1f} s  {text}\n")
        sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, do it, and turn what a person can mend into one message and the exit code."""
    options = _parser().parse_args(arguments)
    request = Request(
        options.action, options.stack, cast("Only", options.only), options.cloud == "double", options.output,
        tuple(options.label), tuple(options.set), options.deadline_minutes * 60,
    )  # fmt: skip
    if request.double:
        sys.stderr.write(BANNER)
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        return run(request)
    except DocumentError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except GkrError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        again = f"make {request.action} STACK={request.target}"
        sys.stderr.write(f"interrupted; what was done is in the state, and {again} goes on from there\n")
        return EXIT_INTERRUPTED


def _interrupted(*_: object) -> None:
    """A request to end is an interrupt, or the engine would go on without anybody who listens to it."""
    raise KeyboardInterrupt


def run(request: Request) -> int:
    """Prepare the engine, then the action on every stack of the target."""
    if request.action == "clusters":
        return _clusters(request)
    names = members(request.target, only=request.only)
    where = place(double=request.double)
    tools.prepare(where, platform=any(name.endswith(".platform") for name in names))
    if request.action == "preview":
        return _preview(request, names, where)
    return _up(request, names, where) if request.action == "up" else _down(request, names, where)


def open_stack(request: Request, name: str, where: Place) -> Stack:
    """A stack with its configuration; that of a local environment is completed with what this machine has."""
    local = tools.local(name, double=request.double, say=request.say)
    own = request.overrides if name in members(request.target, only=request.only) else ()
    config = load(name, overrides=(*local.overrides, *own)).value
    declare = program if local.cluster else rendered(program, folder=where.folder / "rendered")
    return Stack(name, config, where, request.say, request.seconds, local.environment, declare, local.secrets)


def _preview(request: Request, names: list[str], where: Place) -> int:
    found: list[tuple[Review, Preview]] = []
    with tempfile.TemporaryDirectory(prefix="gkr-preview-") as scratch:
        for name in names:
            stack = open_stack(request, name, where)
            missing = _missing(request, stack, where)
            if missing and not request.double:
                if len(names) > 1 and missing[-1] in names:
                    request.say(f"{name}: can be previewed once {missing[-1]} is up")
                    continue
                raise _not_up(name, missing)
            if missing:
                aside = Path(scratch) / "stacks"
                where = where if where.folder == aside else where.copied(aside)
                _bring_up(request, missing, where)
                stack = open_stack(request, name, where)
            request.say(f"{name}: preview")
            preview, _ = stack.preview()
            found.append((_review(request, name, preview), preview))
    _print(request, [one for one, _ in found])
    return max((one.exit_code for one, _ in found), default=EXIT_OK)


def _up(request: Request, names: list[str], where: Place) -> int:
    done: list[dict[str, Any]] = []
    for name in names:
        stack = open_stack(request, name, where)
        tools.refuse_other_use(name, is_up=lambda one=stack: one.outputs() is not None)
        missing = _missing(request, stack, where)
        if missing and not request.double:
            raise _not_up(name, missing)
        _bring_up(request, missing, where)
        request.say(f"{name}: preview")
        preview, _ = stack.preview()
        found = _review(request, name, preview)
        if found.blocks:
            _print(request, [found])
            return EXIT_REFUSED
        request.say(f"{name}: {_counted(found.counts)}; going on")
        done.append({"stack": name, "done": stack.up(), "outputs": stack.outputs() or {}})
        request.say(f"{name}: up")
    _report(request, done)
    return EXIT_OK


def _down(request: Request, names: list[str], where: Place) -> int:
    done: list[dict[str, Any]] = []
    users = _users(request, names, where)
    if users:
        raise ConfigError(
            f"{', '.join(users)} build on {request.target} and are up", hint=f"first: make down STACK={users[0]}"
        )
    for name in reversed(names):
        stack = open_stack(request, name, where)
        if stack.outputs() is None and name != request.target:
            request.say(f"{name}: is not up")
            continue
        request.say(f"{name}: down")
        done.append({"stack": name, "done": stack.down()})
        if name.endswith(".platform"):
            clusters.forget(name.removesuffix(".platform"), where=where)
    _report(request, done)
    return EXIT_OK


def _clusters(request: Request) -> int:
    """Names of the clusters, for `gkr launch --cluster`; each is in the person's list then."""
    found: list[str] = []
    for target in request.target.split(","):
        if target not in shipped():
            found.append(clusters.of_region(target))
            continue
        stacks = members(target)
        if len(stacks) != 2:
            raise ConfigError(f"{target} has no cluster to train on", hint="name the stack of a region")
        where = place(double=request.double or parse_stack_name(target).environment == tools.LOCAL)
        tools.prepare(where, platform=False)
        opened = [Stack(one, load(one).value, where, request.say, request.seconds, {}) for one in stacks]
        facts = [stack.outputs() for stack in opened]
        missing = [one for one, outputs in zip(stacks, facts, strict=True) if outputs is None]
        if missing:
            double = " CLOUD=double" if where.double else ""
            raise ConfigError(f"{', '.join(missing)} not up yet", hint=f"first: make up STACK={target}{double}")
        told = (facts[1] or {})[PLATFORM_OUTPUT]
        cluster = clusters.Cluster(target, told, opened[0].secret(KUBECONFIG_OUTPUT))
        request.say(clusters.take(cluster, where=where))
        found.append(cluster.name)
    sys.stdout.write(",".join(dict.fromkeys(found)) + "\n")
    return EXIT_OK


def _users(request: Request, names: Sequence[str], where: Place) -> list[str]:
    """Stacks that are up and read from one that would go."""
    readers = [one for one in shipped() if one not in names and set(below(load(one).value)) & set(names)]
    return [one for one in readers if Stack(one, load(one).value, where, request.say, request.seconds, {}).outputs()]


def _missing(request: Request, stack: Stack, where: Place) -> list[str]:
    """What it builds on and is not up, lowest first."""
    return [one for one in below(stack.config) if open_stack(request, one, where).outputs() is None]


def _bring_up(request: Request, names: Sequence[str], where: Place) -> None:
    """What a stack builds on, with the double, which costs nothing."""
    for name in names:
        request.say(f"{name}: is not up; bringing it up{' aside' if where.reads_only else ''} with the double")
        quiet = open_stack(request, name, where)
        replace(quiet, say=_silent).up()


def _silent(text: str) -> None:
    del text


def _not_up(name: str, missing: Sequence[str]) -> ConfigError:
    return ConfigError(f"{name} builds on {', '.join(missing)}, not up yet", hint=f"first: make up STACK={missing[0]}")


def _review(request: Request, name: str, preview: Preview) -> Review:
    applies = request.action == "up" and not request.double
    asks = not request.double and shutil.which("gcloud") is not None
    more = check_reservations(preview, describe=by_gcloud) if asks else ()
    settings = settings_for(name, stacks=shipped(), applies=applies)
    return review(preview, settings=settings, labels=request.labels, more=more)


def _print(request: Request, found: Sequence[Review]) -> None:
    if request.output == "json":
        sys.stdout.write(json.dumps([summary(one) for one in found], indent=2) + "\n")
        return
    for one in found:
        sys.stdout.write(comment(one) + "\n")
    for one in found:
        for block in one.blocks:
            remedy = f" (once a person has looked: LABEL={block.label})" if block.label else ""
            sys.stderr.write(f"{one.stack}: blocked: {block.reason}{remedy}\n")


def _report(request: Request, done: Sequence[dict[str, Any]]) -> None:
    if request.output == "json":
        sys.stdout.write(json.dumps(list(done), indent=2) + "\n")
        return
    for one in done:
        sys.stdout.write(f"{one['stack']}: {_counted(one['done'])}\n")


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing to do"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.run", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("action", choices=("preview", "up", "down", "clusters"))
    parser.add_argument("stack", help="such as prod.us-east5; for clusters several, with commas between")
    parser.add_argument("--cloud", choices=("google", "double"), default="google")
    parser.add_argument("--only", choices=("", "region", "platform"), default="")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--label", action="append", default=[], help="allowed by a person: allow-loss, allow-policy")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a configured value")
    parser.add_argument("--deadline-minutes", type=float, default=DEADLINE_MINUTES, help="of one run of the engine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
