"""The child process of check M1: forked by a node's zygote, or `python -m training.preflight.job` by hand."""

from __future__ import annotations

import os
import sys
import traceback

from spec.errors import GkrError
from training.preflight.measurements import TwoSteps
from training.preflight.two_steps import two_steps
from training.preflight.two_steps_job import read_question, write_answer


def main() -> int:
    """Run the two steps and write what became of them."""
    question = read_question(os.environ)
    try:
        measured = TwoSteps(losses=two_steps(question.train, manifest_uri=question.manifest))
    except GkrError as error:
        measured = TwoSteps(problem=f"{error.where}: {error.message}".removeprefix(": "), hint=error.hint)
    except Exception as error:  # noqa: BLE001 - the boundary of this process: the check fails with the place of the error
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        measured = TwoSteps(
            problem=f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})",
            hint="the model of this experiment does not run: check train.model and the code",
        )
    write_answer(question.folder, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
