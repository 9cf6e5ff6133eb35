"""Services (APIs) of the project. They stay on when the stack goes: others of the project may use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
from pulumi_gcp import projects

from infra.components.base import options


@dataclass(frozen=True, kw_only=True)
class ProjectServicesArgs:
    """Services to switch on."""

    project: str
    apis: Sequence[str]


class ProjectServices(pulumi.ComponentResource):
    """Everything else of the project depends on it."""

    def __init__(self, name: str, args: ProjectServicesArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:ProjectServices", name, None, opts)
        self.services = [
            projects.Service(
                api.partition(".")[0],
                project=args.project,
                service=api,
                disable_on_destroy=False,
                opts=options(self),
            )
            for api in args.apis
        ]
        self.register_outputs({"apis": list(args.apis)})
