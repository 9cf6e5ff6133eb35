"""Program of a global stack: what an environment has once, whatever its regions.

The only look-ups of all programs are here: the project's number, which workload identity and the budget need and which
no resource says (regions get it from this stack's output), and the storage service's account, which in a new project
does not exist until somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra.components.base import stack_labels
from infra.components.gcp.identity import Identity, IdentityArgs
from infra.components.gcp.keys import Keys, KeysArgs
from infra.components.gcp.network import PrimaryNetwork, PrimaryNetworkArgs
from infra.components.gcp.services import ProjectServices, ProjectServicesArgs
from infra.components.gcp.storage import READ, WRITE, Grant, Storage, StorageArgs
from infra.components.ops.budget import AlertChannels, AlertChannelsArgs, Budget, BudgetArgs
from infra.outputs import GLOBAL_OUTPUT
from infra.programs import Program
from spec.stack_global import GlobalStack
from spec.stack_values import parse_stack_name

LOCATION = "us"
"""Of buckets and registries that name none: a stack of all regions has no region of its own."""


def global_program(stack: str, *, config: GlobalStack) -> Program:
    """The program of one global stack; the engine runs what it returns."""

    async def run() -> None:
        Environment(stack, config=config).declare()

    return run


class Environment:
    """All parts of one environment. Each method declares a part."""

    def __init__(self, stack: str, *, config: GlobalStack) -> None:
        self._config = config
        self._name = parse_stack_name(stack).environment
        self._labels = stack_labels(stack, configured=config.labels)
        # The budget service charges its own quota to a project, which must be named.
        self._google = gcp.Provider(
            "google", project=config.project, billing_project=config.project, user_project_override=True
        )

    def declare(self) -> None:
        """Everything, services first."""
        config, name = self._config, self._name
        services = ProjectServices(
            name, ProjectServicesArgs(project=config.project, apis=config.apis), opts=self._options()
        )
        after = self._options(services.services)
        number = self._number(services.services)
        keys = self._keys(services.services)
        network = PrimaryNetwork(
            name,
            PrimaryNetworkArgs(
                project=config.project,
                network=config.network.name,
                mtu=config.network.mtu,
                services_access=config.network.services_access,
                labels=self._labels,
                protect=config.protect,
            ),
            opts=after,
        )
        identity = Identity(
            name, IdentityArgs(project=config.project, environment=name, identity=config.identity), opts=after
        )
        self._storage(identity, keys, after)
        channels = AlertChannels(
            name,
            AlertChannelsArgs(project=config.project, emails=config.alerts.emails, labels=self._labels),
            opts=after,
        )
        if config.budget is not None:
            budget = BudgetArgs(number=number, name=f"gkr {name}", budget=config.budget, channels=channels.channels)
            Budget(name, budget, opts=after)
        pulumi.export(
            GLOBAL_OUTPUT,
            {
                "project_number": number,
                "network": network.network.id,
                "network_name": network.network.name,
                "pods": config.network.pods,
                "node_account": identity.nodes.email,
                "researchers": config.identity.researchers,
                "shared_buckets": [bucket.name for bucket in config.buckets],
                "alert_channels": channels.channels,
                "secrets_key": keys.secrets if keys else "",
            },
        )

    def _options(self, after: Sequence[pulumi.Resource] = ()) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(providers=[self._google], depends_on=list(after) or None)

    def _number(self, after: Sequence[pulumi.Resource]) -> pulumi.Output[str]:
        found = gcp.organizations.get_project_output(project_id=self._config.project, opts=self._look_up(after))
        return found.number

    def _keys(self, after: Sequence[pulumi.Resource]) -> Keys | None:
        wanted = self._config.keys
        if wanted is None:
            return None
        project = self._config.project
        storage = gcp.storage.get_project_service_account_output(project=project, opts=self._look_up(after))
        args = KeysArgs(project=project, storage=storage.member, keys=wanted, labels=self._labels)
        return Keys(self._name, args, opts=self._options(after))

    def _look_up(self, after: Sequence[pulumi.Resource]) -> pulumi.InvokeOutputOptions:
        return pulumi.InvokeOutputOptions(provider=self._google, depends_on=list(after))

    def _storage(self, identity: Identity, keys: Keys | None, opts: pulumi.ResourceOptions) -> None:
        config = self._config
        readers = [*config.identity.operators, *config.identity.previewers]
        grants = [
            *(Grant(member, member, WRITE) for member in config.identity.researchers),
            *(Grant(member, member, READ) for member in readers),
        ]
        args = StorageArgs(
            project=config.project,
            location=LOCATION,
            labels=self._labels,
            protect=config.protect,
            buckets=config.buckets,
            grants=grants,
            registries=config.registries,
            image_readers={"nodes": identity.nodes.member},
            key=keys.data if keys else None,
        )
        Storage(self._name, args, opts=opts)
