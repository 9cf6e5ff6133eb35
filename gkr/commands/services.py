"""`gkr services RUN`: replicas, queues, credit, latency and weights of a run's services."""

from __future__ import annotations

import click

from gkr.options import output_option, run_argument


@click.command(name="services")
@run_argument
@click.option("-w", "--watch", is_flag=True, help="Look again every two seconds until the run ends.")
@output_option()
def command(*, run: str | None, watch: bool, output: str) -> None:
    """Show the services of RUN: replicas, queue and credit per rank, batches, latency per class, weights, restarts.

    As the drivers wrote it down last, every few seconds while the run lives. With `--watch -o json` each look is one
    line.
    """
    import json
    import time
    from dataclasses import asdict

    from gkr.backend import find_run, refresh
    from gkr.output import result, result_json
    from gkr.plan_file import read_plan
    from gkr.runs import FINAL, OVER, read_state
    from gkr.serving.lines import lines
    from gkr.serving.told import told_replicas
    from gkr.watch.again import show_again
    from gkr.watch.tail import EventTail

    found = find_run(run)
    plan = read_plan(found.path)

    def show() -> bool:
        if read_state(found.path).status not in FINAL:
            refresh(found)
        state = read_state(found.path).status
        over = state in OVER
        replicas = told_replicas(plan, EventTail(found.path).read(), over=over)
        if output == "text":
            result("\n".join(lines(found.name, state, replicas, now=time.time())))
        else:
            told = [{**asdict(one), "stats": one.stats.model_dump() if one.stats else None} for one in replicas]
            document = {"run": found.name, "run_state": state, "replicas": told}
            result(json.dumps(document, ensure_ascii=False)) if watch else result_json(document)
        return over

    show_again(show, watch=watch, output=output)
