"""What the processes that `gkr data` starts print: one JSON line per record of `spec.preparation`, the result last."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from spec.base import Record
from spec.errors import EXIT_INTERRUPTED, GkrError
from spec.preparation import PrepareError


def print_lines(work: Callable[[], Record]) -> int:
    """Do it and print its result, or why there is none; the exit code."""
    try:
        print_line(work())
    except GkrError as error:
        told = PrepareError(message=error.message, hint=error.hint, where=error.where, exit_code=error.exit_code)
        print_line(told)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # nobody waits for the result any more; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED
    return 0


def print_line(record: Record) -> None:
    """At once, so that a reader sees it and a reader that is gone is noticed."""
    sys.stdout.write(record.write_json() + "\n")
    sys.stdout.flush()
