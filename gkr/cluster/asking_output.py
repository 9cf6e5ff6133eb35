"""How commands that ask several clusters end: the failures on stderr, and the exit code that tells of them."""

from __future__ import annotations

from typing import Any

from gkr.cluster.asking import Answers
from gkr.output import say
from spec.errors import EXIT_OK


def report_failures(answers: Answers[Any]) -> int:
    """Name the clusters that did not answer. Raises the first error if none did."""
    answers.require_one()
    for error in answers.failed.values():
        say(f"error: {error}")
    return next((error.exit_code for error in answers.failed.values()), EXIT_OK)
