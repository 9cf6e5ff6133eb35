"""Parameters that several commands share, with their completion.

Imported by `--help` and on every TAB: click and `gkr.runs` only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from gkr.runs import list_runs

F = TypeVar("F", bound=Callable[..., Any])


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Run ids and experiment names, newest first."""
    del ctx, param
    runs = list_runs()
    items = [CompletionItem(run.name, help=run.experiment) for run in runs]
    items += [CompletionItem(name, help="latest run") for name in dict.fromkeys(run.experiment for run in runs)]
    return [item for item in items if item.value.startswith(incomplete)]


def run_argument(function: F) -> F:
    """RUN, optional: nothing means the latest."""
    return click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_run)(function)


def file_argument(function: F) -> F:
    """FILE; whether it exists is asked when it is read, so that a missing one is an error like any other in a file."""
    return click.argument("file", type=click.Path(path_type=Path, readable=False))(function)


def set_option(function: F) -> F:
    """--set, repeatable."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="A.B=C", help="Change one value of the file; may be repeated."
    )(function)


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Clusters that were added; after a comma the next one."""
    from gkr.cluster.registry import known_names

    del ctx, param
    done, comma, _ = incomplete.rpartition(",")
    items = [f"{done}{comma}{name}" for name in known_names() if name not in done.split(",")]
    return [CompletionItem(item) for item in items if item.startswith(incomplete)]


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (value or "").split(",") if name.strip())
    if value is not None and not names:
        raise click.BadParameter(f'"{value}" names no cluster', ctx=ctx, param=param)
    return names


def _cluster_option(help_text: str) -> Callable[[F], F]:
    return click.option(
        "--cluster",
        "clusters",
        metavar="NAME[,NAME]",
        callback=_names,
        shell_complete=complete_cluster,
        help=help_text,
    )


def cluster_option(function: F) -> F:
    """--cluster: where to place the learners instead of where the file says."""
    return _cluster_option("Place all learners on this cluster, or on several in turn; local-0 is this machine.")(
        function
    )


def clusters_option(function: F) -> F:
    """--cluster: which ones to show; none means all that were added."""
    return _cluster_option("Only these clusters. Default: all that were added.")(function)


def output_option(*formats: str) -> Callable[[F], F]:
    """-o: text unless asked otherwise."""
    choices = click.Choice(["text", *(formats or ("json",))])
    return click.option("-o", "--output", type=choices, default="text", help="Form of the result on stdout.")
