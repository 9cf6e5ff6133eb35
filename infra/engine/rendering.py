"""A platform without a cluster: its objects are rendered into files instead of being sent to an API server.

With the double and without a test bed nothing answers at the address that a region gives. The Kubernetes provider can
work without a cluster then: it renders charts, checks what it can, and writes what it would have applied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pulumi

from infra.programs import Program
from spec.stack import AnyStack

Declare = Callable[[str, AnyStack], Program]
PROVIDER = "pulumi:providers:kubernetes"


def rendered(declare: Declare, *, folder: Path) -> Declare:
    """The same program, whose Kubernetes providers write into a folder."""

    def transform(args: pulumi.ResourceTransformationArgs) -> pulumi.ResourceTransformationResult | None:
        if args.type_ != PROVIDER:
            return None
        # Alone: the provider refuses it beside anything that says how a cluster is reached.
        props = {"renderYamlToDirectory": str(folder / args.name)}
        return pulumi.ResourceTransformationResult(props=props, opts=args.opts)

    def made(stack: str, config: AnyStack) -> Program:
        run = declare(stack, config)

        async def whole() -> None:
            pulumi.runtime.register_stack_transformation(transform)
            await run()

        return whole

    return made
