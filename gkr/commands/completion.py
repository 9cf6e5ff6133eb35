"""`gkr completion SHELL`: the script that a shell sources."""

from __future__ import annotations

import click


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(*, shell: str) -> None:
    """Print the completion script. For bash: `source <(gkr completion bash)` in ~/.bashrc."""
    from click.shell_completion import get_completion_class

    from gkr.main import COMPLETION, cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the choice above"
    click.echo(kind(cli, {}, "gkr", COMPLETION).source())
