"""`gkr why RUN`: what a run waits for, with numbers, and who has to do something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gkr.options import output_option, run_argument

if TYPE_CHECKING:
    from gkr.cluster.explain_facts import Verdict


@click.command(name="why")
@run_argument
@click.option("--learner", help="Only this learner; `syncer` is one too.")
@output_option()
def command(*, run: str | None, learner: str | None, output: str) -> int:
    """Explain what RUN waits for: not admitted, no place, no image, starting, or what it does.

    One verdict for each learner, with evidence and one thing to do. `-o json` gives level, remedy and numbers.
    """
    from gkr.backend import find_run
    from gkr.cluster.explain_run_reading import explain_run
    from gkr.cluster.why import lines
    from gkr.output import result, result_json, say
    from spec.errors import EXIT_OK, EXIT_UNREACHABLE, NotFoundError

    found = find_run(run)
    verdicts, failed = explain_run(found, learner=learner)
    if not verdicts and not failed:
        raise NotFoundError(f'run {found.name} has no learner "{learner}"', hint="`gkr describe` lists them")
    if output == "json":
        result_json({"run": found.name, "verdicts": [_fields(one, verdict) for one, verdict in verdicts.items()]})
    else:
        result("\n".join(line for one, verdict in verdicts.items() for line in lines(one, verdict, run=found.name)))
    for error in failed.values():
        say(f"error: {error}")
    return EXIT_UNREACHABLE if failed else EXIT_OK


def _fields(learner: str, verdict: Verdict) -> dict[str, object]:
    return {
        "learner": learner,
        "level": int(verdict.level),
        "level_name": verdict.level.name.lower(),
        "verdict": verdict.text,
        "remedy": verdict.remedy,
        "evidence": list(verdict.evidence),
        "action": verdict.action,
        "numbers": dict(verdict.numbers),
    }
