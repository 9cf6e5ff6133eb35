"""`--cluster` of commands that show clusters. Imported by `--help`: click and file names only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gkr.options import complete_cluster

F = TypeVar("F", bound=Callable[..., Any])


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    del ctx, param
    return tuple(name.strip() for name in (value or "").split(",") if name.strip())


def clusters_option(function: F) -> F:
    """--cluster: which ones to show; none means all that were added."""
    return click.option(
        "--cluster",
        "clusters",
        metavar="NAME[,NAME]",
        callback=_names,
        shell_complete=complete_cluster,
        help="Only these clusters. Default: all that were added.",
    )(function)
