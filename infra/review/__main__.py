"""`python -m infra.review preview.json`: prints the comment, exits 0, or 6 if the change may not land without a label.

`pulumi preview --json --show-sames --stack STACK | python -m infra.review -` reviews what the engine says right now.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.policy.stacks import settings_for, stack_names
from infra.review.comment import comment
from infra.review.preview import Diagnostic, read_preview
from infra.review.report import Review, review
from infra.review.reservations import by_gcloud, check_reservations
from spec.errors import EXIT_CONFIG, EXIT_OK, EXIT_REFUSED, ConfigError, GkrError
from spec.problems import RemedyError

STACKS = Path("stacks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, review, print."""
    options = _parser().parse_args(arguments)
    try:
        found = _review(options)
    except GkrError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except RemedyError as error:
        sys.stderr.write(f"error: {error}\n  hint: {error.hint}\n")
        return EXIT_CONFIG
    text = comment(found) if options.output == "text" else json.dumps(summary(found), indent=2) + "\n"
    if options.to:
        Path(options.to).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    for block in found.blocks:
        label = f" (label {block.label} allows it)" if block.label else ""
        sys.stderr.write(f"{found.stack}: blocked: {block.reason}{label}\n")
    if options.expect_no_changes and (changed(found) or found.waits):
        sys.stderr.write(f"{found.stack}: differs from what is declared\n")
        return EXIT_REFUSED
    return EXIT_OK if options.report_only else found.exit_code


def _review(options: argparse.Namespace) -> Review:
    name = str(options.preview)
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=name) from None
    preview = read_preview(text, stack=options.stack, where=name)
    if options.engine_code and not any(one.severity == "error" for one in preview.diagnostics):
        silent = Diagnostic("error", f"the engine ended with code {options.engine_code} and named no error")
        preview = replace(preview, diagnostics=(*preview.diagnostics, silent))
    if not preview.stack:
        raise ConfigError("no step names the stack", hint="say --stack ENV.REGION", where=name)
    stacks = [*stack_names(STACKS), preview.stack]
    settings = settings_for(preview.stack, stacks=stacks, applies=options.before_up)
    more = check_reservations(preview, describe=by_gcloud) if options.reservations else ()
    return review(preview, settings=settings, labels=options.label, more=more)


def changed(found: Review) -> bool:
    """Something of a cloud or cluster would change."""
    return any(count for kind, count in found.counts.items() if kind not in ("same", "read"))


def summary(found: Review) -> dict[str, object]:
    """The same for a program."""
    return {
        "stack": found.stack,
        "waits": found.waits,
        "blocked": [{"reason": one.reason, "label": one.label} for one in found.blocks],
        "counts": found.counts,
        "losses": [
            {"resource": one.step.name, "type": one.step.type, "change": one.step.kind, "why": one.weight.name.lower(),
             "gpus": one.gpus, "lost": one.text}
            for one in found.concerns()
        ],
        "gpus": [
            {"region": place.region, "gpu": place.gpu, "capacity": place.capacity, "before": count.before,
             "after": count.after}
            for place, count in found.gpus.items()
        ],
        "restarts": [
            {"resource": one.step.name, "gpus": one.gpus, "fields": [field.path for field in one.fields]}
            for one in found.restarts
        ],
        "policy": [one.document() for one in found.findings],
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.review", description=__doc__)
    parser.add_argument("preview", help="file with the engine's JSON preview, or - for standard input")
    parser.add_argument("--stack", default="", help="name of the stack, where no step says it")
    parser.add_argument("--label", action="append", default=[], help="a label of the change; may be given again")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="text is Markdown")
    parser.add_argument("--to", default="", metavar="FILE", help="write there instead of to standard output")
    parser.add_argument(
        "--before-up", action="store_true", help="the change follows at once: refuse what only examples say"
    )
    parser.add_argument(
        "--reservations", action="store_true", help="compare pools with their reservations, which gcloud is asked for"
    )
    parser.add_argument("--engine-code", type=int, default=0, help="what the engine's preview exited with")
    parser.add_argument("--expect-no-changes", action="store_true", help="exit 6 if anything would change (drift)")
    parser.add_argument("--report-only", action="store_true", help="exit 0 also if something blocks the change")
    return parser


if __name__ == "__main__":
    sys.exit(main())
