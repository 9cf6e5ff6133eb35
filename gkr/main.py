"""The command line's door: a table of commands, each imported only when it is called, and the one error boundary.

Promises: `gkr --help` and completion import click and nothing heavier (a test in a fresh process checks it); an error
that a person can mend is one message and one hint on stderr with its exit code; anything else keeps its traceback.
Must not hold any command's logic.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import click

from spec.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, GkrError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


COMPLETION = "_GKR_COMPLETE"
"""The variable by which a shell asks for completion; click answers and ends the process."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_JSON = frozenset({("-o", "json"), ("--output", "json")})


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
        _show_usage(error, args=args)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except GkrError as error:
        _show(error, args=args)
        return error.exit_code
    except SystemExit:
        if COMPLETION in os.environ:
            raise
        return EXIT_OK  # else click does so only when the reader of our output went away (`gkr logs | head`)
    except Exception as error:  # noqa: BLE001 a bug of ours keeps its traceback and still has a code of the contract
        trouble = _trouble_with_files(error)
        if trouble is not None:
            _show(trouble, args=args)
            return EXIT_FAILED
        import traceback

        traceback.print_exc()
        click.echo("This is a bug in gkr. Please report it with the lines above.", err=True)
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_OK


def _trouble_with_files(error: Exception) -> GkrError | None:
    """A file that may not be read, a folder in its place, a full disk: for the person to mend, and no bug."""
    if not isinstance(error, OSError) or (error.filename is None and error.errno not in _FULL):
        return None
    place = "" if error.filename is None else f"{error.filename}"
    hint = "check permissions and free space; `gkr --debug` in front of the command shows where it happened"
    return GkrError(error.strerror or f"{error}", where=place, hint=hint)


def _show_usage(error: click.ClickException, *, args: Sequence[str]) -> None:
    if not _wants_json(args):
        _tell(error.show)
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    wrong = GkrError(error.format_message(), hint=f"`{context.command_path if context else 'gkr'} --help`")
    wrong.exit_code = error.exit_code
    _show(wrong, args=args)


def _show(error: GkrError, *, args: Sequence[str]) -> None:
    if "--debug" in _own(args) or not error.message.strip():
        import traceback

        _tell(lambda: traceback.print_exception(error))
        return
    from spec.problems import DocumentError

    problems = [problem.as_dict() for problem in error.problems] if isinstance(error, DocumentError) else []
    if _wants_json(args):
        import json

        fields = {"message": error.message, "hint": error.hint, "where": error.where, "exit_code": error.exit_code}
        text = json.dumps({"error": {**fields, "problems": problems}}, ensure_ascii=False)
    else:
        text = str(error) if problems else f"error: {error}"  # each problem says "error" at its own place
    _tell(lambda: click.echo(text, err=True))


def _tell(show: Callable[[], object]) -> None:
    """Where stderr is closed or full there is nobody to tell; the exit code says it."""
    with contextlib.suppress(OSError):
        show()


def _wants_json(args: Sequence[str]) -> bool:
    own = _own(args)
    return "-ojson" in own or "--output=json" in own or any(pair in _JSON for pair in pairwise(own))


def _own(args: Sequence[str]) -> Sequence[str]:
    """Without what follows `--`: that is another program's."""
    return args[: args.index("--")] if "--" in args else args
