"""Who may do what in the project: the nodes' account, and the people.

Roles are the fewest that the work needs, granted one by one: resources that own a whole policy would take away what
others and Google's own agents were granted. No account has a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
from pulumi_gcp import projects, serviceaccount

from infra.components.base import options
from spec.stack_global import Identity as Config

NODE_ROLES = ("roles/container.defaultNodeServiceAccount",)
"""Logs, metrics and the node's own registration; reading images is granted on each registry."""
RESEARCHER_ROLES = ("roles/container.viewer", "roles/logging.viewer", "roles/monitoring.viewer")
"""Reaching clusters and reading there; launching is a right inside the cluster's experiment namespaces."""
OPERATOR_ROLES = (
    "roles/artifactregistry.writer", "roles/compute.viewer", "roles/container.admin", "roles/logging.viewer",
    "roles/monitoring.editor",
)  # fmt: skip
"""Operating clusters and pushing images. Applying stacks is another account's (docs/infrastructure.md lists its roles).
"""
PREVIEWER_ROLES = (
    "roles/container.viewer", "roles/iam.securityReviewer", "roles/serviceusage.serviceUsageConsumer", "roles/viewer",
)  # fmt: skip
"""Reading what a preview compares with: the project's resources, its grants, and objects in clusters, whose endpoint
`roles/viewer` alone does not let anybody connect to. A global stack charges its requests to the project, which takes
the right to use its services.
"""
LONGEST_ACCOUNT = 30
"""Characters of an account's id."""


@dataclass(frozen=True, kw_only=True)
class IdentityArgs:
    """Identities of an environment."""

    project: str
    environment: str
    identity: Config


class Identity(pulumi.ComponentResource):
    """Declares them."""

    def __init__(self, name: str, args: IdentityArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:Identity", name, None, opts)
        self.nodes = serviceaccount.Account(
            "nodes",
            account_id=node_account_id(args.environment),
            project=args.project,
            display_name=f"nodes of {args.environment}",
            opts=options(self),
        )
        self._grant(args.project, "nodes", self.nodes.member, NODE_ROLES)
        people = (
            ("researchers", args.identity.researchers, RESEARCHER_ROLES),
            ("operators", args.identity.operators, OPERATOR_ROLES),
            ("previewers", args.identity.previewers, PREVIEWER_ROLES),
        )
        for group, members, roles in people:
            for member in members:
                self._grant(args.project, f"{group}-{member}", member, roles)
        self.register_outputs({"nodes": self.nodes.email})

    def _grant(self, project: str, name: str, member: pulumi.Input[str], roles: Sequence[str]) -> None:
        for role in roles:
            projects.IAMMember(
                f"{name}-{role.removeprefix('roles/')}", project=project, role=role, member=member, opts=options(self)
            )


def node_account_id(environment: str) -> str:
    """Id of the nodes' account; an environment's name is short enough for it."""
    return f"gkr-{environment}-nodes"[:LONGEST_ACCOUNT].rstrip("-")
