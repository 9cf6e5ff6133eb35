"""One rank: the process that trains. Forked by the node's zygote; everything it needs to know comes from its
environment and the plan.

Its last act on an error is to write down what happened (`reason-<job>.json` in the node's folder), so that the driver
can tell a person's error from a victim's and name the place. The exit code alone would not do.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import training.trainer as trainer
from spec.errors import GkrError
from spec.plan import Plan
from training.context import RuntimeContext
from training.files import replace_text

PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Train until the syncer says that the shared model is final; returns the exit code."""
    context = RuntimeContext.from_environment()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        plan = Plan.read_json(Path(context.plan).read_text())
        trainer.train(plan, context=context)
    except BaseException as error:  # noqa: BLE001 - the boundary of this process
        traceback.print_exc()
        write_reason(context, error)
        # Peers that wait in a collective must not wait for this one's orderly shutdown.
        os._exit(error.exit_code if isinstance(error, GkrError) else 1)
    return 0


def write_reason(context: RuntimeContext, error: BaseException) -> None:
    """For the driver, see `training.classify`."""
    reason: dict[str, Any] = {
        "type": type(error).__name__,
        "family": _family(error),
        "message": _words(error),
        "where": _place(error),
        "exit_code": getattr(error, "exit_code", None),
    }
    path = context.folder / f"reason-rank-{context.rank}.json"
    replace_text(path, json.dumps(reason))


def _family(error: BaseException) -> str:
    """The class of the contract that it is one of, for an error of ours."""
    return next((one.__name__ for one in type(error).__mro__ if one.__module__ == GkrError.__module__), "")


def _words(error: BaseException) -> str:
    """One line; for an error of ours with its remedy."""
    if isinstance(error, GkrError):
        place = f"{error.where}: " if error.where else ""
        return f"{place}{error.message}; {error.hint}" if error.hint else f"{place}{error.message}"
    return str(error) or type(error).__name__


def _place(error: BaseException) -> str:
    """File and line of the innermost frame that is this project's or the person's, not a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    if not own:
        return ""
    path = Path(own[-1].filename)
    shown = path.relative_to(PACKAGE_ROOT) if path.is_relative_to(PACKAGE_ROOT) else path
    return f"{shown}:{own[-1].lineno}"
