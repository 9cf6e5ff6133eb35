"""`gkr sync RUN`: which round of the sync is open, who is waited for, why, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gkr.options import output_option, run_argument

if TYPE_CHECKING:
    from gkr.syncing.asking import SyncNow


@click.command(name="sync")
@run_argument
@click.option("-w", "--watch", is_flag=True, help="Look again every two seconds until the run ends.")
@output_option()
def command(*, run: str | None, watch: bool, output: str) -> None:
    """Show the sync of RUN: open rounds, who is waited for, why and until when; every learner and what it cost.

    The running syncer is asked; where it cannot be, and after the run, the run's events tell. With `--watch -o json`
    each look is one line.
    """
    from gkr.backend import find_run
    from gkr.syncing.asking import look
    from gkr.watch.again import show_again

    found = find_run(run)

    def show() -> bool:
        now = look(found)
        _show(now, output=output, one_line=watch)
        return now.over

    show_again(show, watch=watch, output=output)


def _show(look: SyncNow, *, output: str, one_line: bool) -> None:
    import json
    import time

    from gkr.output import result, result_json
    from gkr.syncing.lines import lines

    if output == "text":
        result("\n".join(lines(look, now=time.time())))
        return
    fields = {"run": look.run, "run_state": look.run_state, "source": look.source, "seen": look.seen}
    document = {**fields, "trouble": look.trouble, "sync": json.loads(look.status.write_json())}
    if one_line:
        result(json.dumps(document, ensure_ascii=False))
    else:
        result_json(document)
