"""Entry of plain `pulumi up`: the selected stack's configuration -> its program."""

from __future__ import annotations

import sys
from pathlib import Path

import pulumi

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Pulumi runs this folder, not the package

from infra.programs import program
from spec.errors import ConfigError, GkrError
from spec.stack import KEY, read_stack


def main() -> None:
    """Hands the program to the engine. An error with a remedy is shown as one, without a traceback."""
    stack = pulumi.get_stack()
    value = pulumi.Config(KEY.partition(":")[0]).get_object(KEY.partition(":")[2])
    try:
        if value is None:
            raise ConfigError(f"stack {stack} has no {KEY}", hint=f"write it in stacks/Pulumi.{stack}.yaml")
        pulumi.run(program(stack, read_stack(value, stack).value))
    except GkrError as error:
        raise pulumi.RunError(str(error)) from error


main()
