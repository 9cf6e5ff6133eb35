"""Which stacks a change touches, and in which order they are brought up.

`git diff --name-only BASE...HEAD | python -m infra.review.affected` prints the stacks to preview, as JSON; with
`--waves` the order of a deployment: other environments before production, an environment's global stack before its
regions, one region before the rest. `local.*` stacks live on a test bed and are never part of either.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from infra.policy.stacks import PREFIX, SUFFIX, stack_names
from spec.stack_values import StackName, parse_stack_name

EVERYTHING = ("infra", "spec", "manifests", "Pulumi.yaml", "requirements/infra.txt", "pyproject.toml")
"""A change in one of these can change what any stack declares."""
LOCAL = "local"
PRODUCTION = "prod"
WAVES = ("other-global", "other-regions", "prod-global", "prod-first", "prod-rest")


def affected(paths: Iterable[str], *, stacks: Sequence[str]) -> list[str]:
    """Names of the stacks that the changed paths can change; a region's file also means its platform."""
    shipped = [name for name in stacks if parse_stack_name(name).environment != LOCAL]
    touched: set[str] = set()
    for path in paths:
        if any(PurePosixPath(path).is_relative_to(one) for one in EVERYTHING):
            return sorted(shipped)
        name = PurePosixPath(path).name
        if path.startswith("stacks/") and name.startswith(PREFIX) and name.endswith(SUFFIX):
            stack = name.removeprefix(PREFIX).removesuffix(SUFFIX)
            touched.update(one for one in shipped if one == stack or one == f"{stack}.platform")
    return sorted(touched)


def waves(stacks: Iterable[str]) -> dict[str, list[str]]:
    """Targets by wave. A target is a global stack or a region, which brings up its platform with it."""
    targets = sorted({_target(parse_stack_name(name)) for name in stacks})
    names = [parse_stack_name(one) for one in targets]
    found: dict[str, list[str]] = {wave: [] for wave in WAVES}
    for name in names:
        if name.environment == LOCAL:
            continue
        found[_wave(name, first=not found["prod-first"])].append(str(name))
    return found


def _wave(name: StackName, *, first: bool) -> str:
    if name.environment != PRODUCTION:
        return "other-global" if name.kind == "global" else "other-regions"
    if name.kind == "global":
        return "prod-global"
    return "prod-first" if first else "prod-rest"


def _target(name: StackName) -> str:
    return str(StackName(name.environment, name.region, "region")) if name.region else str(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read changed paths from standard input, one a line, and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m infra.review.affected", description=__doc__)
    parser.add_argument("--waves", action="store_true", help="print targets by wave instead of a list of stacks")
    parser.add_argument("--all", action="store_true", help="every stack, whatever changed")
    options = parser.parse_args(arguments)
    stacks = stack_names(Path("stacks"))
    paths = list(EVERYTHING) if options.all else [line.strip() for line in sys.stdin if line.strip()]
    found = affected(paths, stacks=stacks)
    sys.stdout.write(json.dumps(waves(found) if options.waves else found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
