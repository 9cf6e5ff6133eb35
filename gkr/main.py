"""The command line's door: a table of commands, each imported only when it is called, and the one error boundary.

Promises: `gkr --help` and completion import click and nothing heavier (a test in a fresh process checks it); an error
that a person can mend is one message and one hint on stderr with its exit code; anything else keeps its traceback.
Must not hold any command's logic.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from spec.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, GkrError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class _Entry(NamedTuple):
    theme: str
    help: str


COMMANDS: dict[str, _Entry] = {
    "launch": _Entry("Runs", "Start an experiment and watch it."),
    "ps": _Entry("Runs", "List runs and their state."),
    "describe": _Entry("Runs", "Show one run in full."),
    "watch": _Entry("Runs", "Watch a run that was detached from."),
    "sync": _Entry("Runs", "Show who the sync of a run waits for, why and until when."),
    "services": _Entry("Runs", "Show replicas, queues, credit and latency of a run's services."),
    "why": _Entry("Runs", "Explain what a run waits for, and what would help."),
    "logs": _Entry("Runs", "Print or follow what the processes of a run wrote."),
    "exec": _Entry("Runs", "Run a command in a pod of a run."),
    "report": _Entry("Runs", "Build the report of a run and print its path."),
    "cancel": _Entry("Runs", "End a run."),
    "resume": _Entry("Runs", "Go on with a run whose supervisor is gone."),
    "init": _Entry("Experiments", "Write a commented experiment file to start from."),
    "plan": _Entry("Experiments", "Show what a file would start: placement, values and their origins."),
    "render": _Entry("Experiments", "Print the Kubernetes objects that a file would start."),
    "explain": _Entry("Experiments", "Explain one field of an experiment file."),
    "data": _Entry("Experiments", "Prepare a dataset from images, and look at one."),
    "clusters": _Entry("Clusters", "Add, list and choose clusters."),
    "gpus": _Entry("Clusters", "Show GPUs: free, held and broken."),
    "queues": _Entry("Clusters", "Show queues: quota, holders and who waits."),
    "nodes": _Entry("Clusters", "Show nodes and what runs on them."),
    "completion": _Entry("Other", "Print the completion script of a shell."),
    "version": _Entry("Other", "Print versions."),
}
"""Name -> theme and help line. Module and function follow from the name: `gkr.commands.<name>:command`."""


class _LazyGroup(click.Group):
    """Imports a command's module when it is called; help and the list of names come from the table alone."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"gkr.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            import difflib  # imports below the top are for what `--help` must not pay

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f'did you mean "{near[0]}"?' if near else "`gkr --help` lists them."
            ctx.fail(f'There is no command "{args[0]}"; {hint}')
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for theme in dict.fromkeys(entry.theme for entry in COMMANDS.values()):
            with formatter.section(theme):
                formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items() if entry.theme == theme])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [name for name in COMMANDS if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name].help) for name in names]


@click.group(
    name="gkr",
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="A run is named by its id, a unique start or the last part of it, its experiment's name (the latest run), "
    "or `-` or nothing (the latest of all). Runs lie in ./runs, or where GKR_RUNS says.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(*, debug: bool) -> None:
    """Train across clusters: launch an experiment, watch it, read its logs and its report."""
    del debug  # read by the error boundary, which also serves failures before this function is reached


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and answer with its exit code; the only place that turns errors into text."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code: object = cli.main(args=args, prog_name="gkr", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except GkrError as error:
        _show(error, args=args)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`gkr logs | head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception:  # noqa: BLE001 a bug of ours keeps its traceback and still has a code of the contract
        import traceback

        traceback.print_exc()
        click.echo("This is a bug in gkr. Please report it with the lines above.", err=True)
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_OK


def _show(error: GkrError, *, args: Sequence[str]) -> None:
    if "--debug" in args or not error.message.strip():
        import traceback

        traceback.print_exception(error)
        return
    from spec.problems import DocumentError

    problems = [problem.as_dict() for problem in error.problems] if isinstance(error, DocumentError) else []
    if _wants_json(args):
        import json

        fields = {"message": error.message, "hint": error.hint, "where": error.where, "exit_code": error.exit_code}
        click.echo(json.dumps({"error": {**fields, "problems": problems}}, ensure_ascii=False), err=True)
        return
    click.echo(str(error) if problems else f"error: {error}", err=True)  # each problem says "error" at its own place


def _wants_json(args: Sequence[str]) -> bool:
    joined = " ".join(args)
    return any(spelling in joined for spelling in ("-o json", "-ojson", "--output json", "--output=json"))
