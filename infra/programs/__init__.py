"""Programs of the three kinds of stack.

    run = program("prod.us-east5", config)     # what the engine runs

Plain `pulumi up` (`infra/__main__.py`) and the Automation API (make targets, tests) call this one function, so that
they cannot differ. A kind's module is imported when it is needed: only a platform needs the Kubernetes SDK.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pulumi

from spec.errors import GkrError
from spec.stack import AnyStack, GlobalStack, RegionStack

Program = Callable[[], Awaitable[None]]


def program(stack: str, config: AnyStack) -> Program:
    """The program of one stack. What a person can mend is shown with its remedy and without a traceback."""
    declare = _of_kind(stack, config)

    async def run() -> None:
        try:
            await declare()
        except GkrError as error:
            raise pulumi.RunError(str(error)) from error

    return run


def _of_kind(stack: str, config: AnyStack) -> Program:
    if isinstance(config, GlobalStack):
        from infra.programs.global_stack import global_program

        return global_program(stack, config=config)
    if isinstance(config, RegionStack):
        from infra.programs.region_stack import region_program

        return region_program(stack, config=config)
    from infra.programs.platform_stack import platform_program

    return platform_program(stack, config=config)
