"""`python -m infra.policy preview.json`: what the rules say about the resources of a preview; exits 6 on a refusal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.policy.resource import Resource
from infra.policy.rules import RULES, check
from infra.policy.stacks import settings_for, stack_names
from infra.review.preview import read_preview
from spec.errors import EXIT_CONFIG, EXIT_OK, EXIT_REFUSED, ConfigError, GkrError
from spec.problems import RemedyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, check, print one finding after another."""
    parser = argparse.ArgumentParser(prog="python -m infra.policy", description=__doc__)
    parser.add_argument("preview", nargs="?", help="file with the engine's JSON preview, or - for standard input")
    parser.add_argument("--stack", default="", help="name of the stack, where no step says it")
    parser.add_argument("--rule", action="append", default=[], choices=sorted(RULES), help="only this rule")
    parser.add_argument("--list", action="store_true", help="print every rule")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    if options.list or options.preview is None:
        rules = {name: (rule.__doc__ or "").splitlines()[0] for name, rule in RULES.items()}
        _print(rules, [f"{name:22} {text}" for name, text in rules.items()], output=options.output)
        return EXIT_OK
    try:
        stack, resources = _resources(options.preview, stack=options.stack)
        found = check(
            resources, settings=settings_for(stack, stacks=[*stack_names(Path("stacks")), stack]), only=options.rule
        )
    except GkrError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except RemedyError as error:
        sys.stderr.write(f"error: {error}\n  hint: {error.hint}\n")
        return EXIT_CONFIG
    _print([one.document() for one in found], [str(one) for one in found], output=options.output)
    return EXIT_REFUSED if any(one.severity == "refuse" for one in found) else EXIT_OK


def _print(document: object, lines: Sequence[str], *, output: str) -> None:
    text = json.dumps(document, indent=2) if output == "json" else "\n".join(lines)
    sys.stdout.write(f"{text}\n" if text else "")


def _resources(name: str, *, stack: str) -> tuple[str, list[Resource]]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=name) from None
    preview = read_preview(text, stack=stack, where=name)
    return preview.stack, preview.resources()


if __name__ == "__main__":
    sys.exit(main())
