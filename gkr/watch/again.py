"""Shows something once, or again and again until it is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

PERIOD_SECONDS = 2.0


def show_again(show: Callable[[], bool], *, watch: bool, output: str) -> None:
    """Call `show`, which says whether nothing more will come; with `watch` every two seconds until then.

    A person's terminal is cleared between two looks.
    """
    while True:
        if watch and output == "text" and sys.stdout.isatty():
            click.clear()
        if show() or not watch:
            return
        time.sleep(PERIOD_SECONDS)
