"""`gkr exec RUN -- COMMAND`: run a command in one of a run's pods."""

from __future__ import annotations

import click

from gkr.options import run_argument

_INSIDE = "gkr.exec.inside"


class _Command(click.Command):
    """Keeps everything after `--` from click, so that RUN stays optional and the command's own options stay its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_INSIDE] = args[:at], tuple(args[at + 1 :])
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


@click.command(name="exec", cls=_Command)
@run_argument
@click.option("--learner", help="In a pod of this learner; default: the first.")
@click.option("--role", type=click.Choice(["head", "trainer", "service", "syncer"]), help="In a pod of this role.")
@click.option("--group", help="In a pod of this group.")
@click.option("--node", help="On this node, or a number: that pod of the group, from 0 on.")
@click.option("--pod", help="In the pod whose name begins so.")
@click.option("--container", help="In this container; default: the main one.")
@click.option("-i", "--stdin", is_flag=True, help="Pass what is piped in; without a terminal only.")
@click.option("-T", "--no-terminal", is_flag=True, help="Never interactive, even in a terminal.")
@click.pass_context
def command(
    context: click.Context,
    *,
    run: str | None,
    learner: str | None,
    role: str | None,
    group: str | None,
    node: str | None,
    pod: str | None,
    container: str | None,
    stdin: bool,
    no_terminal: bool,
) -> int:
    """Run COMMAND in a pod of RUN; the exit code is the command's.

    Without a choice: in the first learner's first trainer pod, where rank 0 runs. In a terminal the command is
    interactive.
    """
    import sys

    from gkr.backend import find_run
    from gkr.cluster.connection import connect
    from gkr.cluster.execute import Target, choose_pod, piped_stdin, run_interactive, run_plain
    from gkr.cluster.logs_reading import list_pods
    from gkr.cluster.places import read_places
    from gkr.runs import is_on_clusters
    from spec.errors import RefusedError

    inside: tuple[str, ...] = context.meta.get(_INSIDE, ())
    if not inside:
        raise click.UsageError("what to run? Write `gkr exec RUN -- COMMAND`", ctx=context)
    found = find_run(run)
    if not is_on_clusters(found.path):
        raise RefusedError(f"run {found.name} is on this machine", hint="run the command here yourself")
    places = read_places(found.path)
    connections = {name: connect(entry) for name, entry in places.clusters.items()}
    target = Target(learner=learner, role=role, group=group, node=node, pod=pod)
    pods = list_pods(places, connections, container=container)
    chosen = choose_pod(pods, target=target, learners=[one.learner for one in places.learners], run=found.name)
    connection = connections[chosen.cluster]
    if not no_terminal and sys.stdin.isatty() and sys.stdout.isatty():
        return run_interactive(connection, chosen, command=inside)
    return run_plain(connection, chosen, command=inside, stdin=piped_stdin() if stdin else None)
