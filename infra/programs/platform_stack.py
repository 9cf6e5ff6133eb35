"""Program of a platform stack: what runs in a region's cluster before any experiment does.

Reads the region's facts once, at the start: how many objects there are must not depend on a value that comes later, or
a preview would not show them. Everything else is components; the facts of the cluster are declared last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as kubernetes

from infra.components.base import stack_labels
from infra.components.k8s.fabric import FabricObjects, FabricObjectsArgs
from infra.components.k8s.installers import GpuDirectInstallers, GpuDirectInstallersArgs
from infra.components.k8s.kuberay import KubeRayStack, KubeRayStackArgs
from infra.components.k8s.kueue import KueueStack, KueueStackArgs
from infra.components.k8s.namespaces import Namespaces, NamespacesArgs, referred_secrets
from infra.components.k8s.operators import source_of
from infra.components.k8s.provider import ClusterProvider, ClusterProviderArgs
from infra.components.k8s.published import FactsConfigMap, FactsConfigMapArgs
from infra.components.k8s.shared import SharedRayCluster, SharedRayClusterArgs, shared_services
from infra.components.k8s.syncer import SyncerAccess, SyncerAccessArgs
from infra.components.ops.health import HealthArgs, HealthRules
from infra.facts import (
    KUBECONFIG_OUTPUT,
    NAMESPACE,
    PLATFORM_OUTPUT,
    REGION_OUTPUT,
    SECRETS,
    RegionFacts,
    cluster_facts,
    full_image,
    read_region,
    site_of,
)
from infra.programs import Program
from manifests.shared import endpoints, holdings
from spec.errors import ConfigError
from spec.stack_platform import PlatformStack


def platform_program(stack: str, *, config: PlatformStack) -> Program:
    """The program of one platform stack; the engine runs what it returns."""

    async def run() -> None:
        whole_name = f"{pulumi.get_organization()}/{pulumi.get_project()}/{config.region_stack}"
        reference = pulumi.StackReference(config.region_stack, stack_name=whole_name)
        value = await _read(reference, REGION_OUTPUT)
        region = read_region(cast("Mapping[str, Any] | None", value), stack=config.region_stack)
        if await _read(reference, KUBECONFIG_OUTPUT) is None:
            raise ConfigError(
                f"stack {config.region_stack} has no output {KUBECONFIG_OUTPUT}, so its cluster cannot be reached",
                hint=f"run: make up STACK={config.region_stack}, then this stack again",
                where=config.region_stack,
            )
        kubeconfig = pulumi.Output.secret(reference.get_output(KUBECONFIG_OUTPUT))
        Platform(stack, config=config, region=region, kubeconfig=kubeconfig, environment=os.environ).declare()

    return run


async def _read(reference: pulumi.StackReference, name: str) -> Any:
    details = await reference.get_output_details(name)
    return details.value if details.value is not None else details.secret_value


class Platform:
    """All parts of one platform. Each method declares a part and says what later parts wait for."""

    def __init__(
        self,
        stack: str,
        *,
        config: PlatformStack,
        region: RegionFacts,
        kubeconfig: pulumi.Input[str],
        environment: Mapping[str, str],
    ) -> None:
        self._stack = stack
        self._config = config
        self._region = region
        self._kubeconfig = kubeconfig
        self._environment = environment
        self._site = site_of(config, region=region, environment=environment)
        shared = config.shared
        self._shared = shared_services(shared, region=region, site=self._site) if shared else None

    def declare(self) -> None:
        """Everything, in the order in which it must be there."""
        cluster = self._region.name
        provider = ClusterProvider(cluster, ClusterProviderArgs(cluster=cluster, kubeconfig=self._kubeconfig)).provider
        space = self._namespaces(cluster, provider=provider, names=[NAMESPACE])
        fabric = self._fabric(provider)
        kueue = self._kueue(provider, space=space)
        kuberay = self._kuberay(provider)
        experiments, after = self._config.namespaces, [*kueue.ready, *kuberay.ready]
        spaces = self._namespaces(
            f"{cluster}-experiments", provider=provider, names=experiments, after=after,
            researchers=self._region.researchers,
        )  # fmt: skip
        kueue.open(experiments, after=[spaces])
        access = SyncerAccess(
            cluster,
            SyncerAccessArgs(provider=provider, syncer=self._region.syncer, namespace=self._config.namespaces[0]),
            opts=pulumi.ResourceOptions(depends_on=[spaces]),
        )
        self._health(provider, after=[space])
        ready: list[pulumi.Resource] = [spaces, *fabric, kueue, kuberay, access]
        if self._shared is not None:
            # Kueue looks at every Ray cluster: until its webhooks answer, the API server refuses this one.
            before = [space, *fabric, kuberay, *kueue.ready]
            args = SharedRayClusterArgs(provider=provider, services=self._shared, after=before)
            ready.append(SharedRayCluster(cluster, args))
        self._publish(provider, after=ready)

    def _namespaces(
        self,
        name: str,
        *,
        provider: kubernetes.Provider,
        names: Sequence[str],
        after: Sequence[pulumi.Resource] = (),
        researchers: Sequence[str] = (),
    ) -> pulumi.Resource:
        values = secret_values(pulumi.Config().get(SECRETS), referred=self._referred())
        args = NamespacesArgs(
            provider=provider, names=names, site=self._site, secrets=values, researchers=researchers, after=after
        )
        return Namespaces(name, args)

    def _referred(self) -> list[str]:
        shared = self._config.shared
        own = [shared.token_secret, shared.redis.password_secret if shared.redis else ""] if shared else []
        return [*referred_secrets(self._site), *(one for one in own if one)]

    def _fabric(self, provider: kubernetes.Provider) -> list[pulumi.Resource]:
        """Networks, then what prepares nodes for them; nothing in a cluster without GPU machines."""
        name, fabrics = self._region.name, self._region.fabrics
        if not fabrics:
            return []
        objects = FabricObjects(name, FabricObjectsArgs(provider=provider, fabrics=fabrics))
        machines = [fabric.machine for fabric in fabrics]
        args = GpuDirectInstallersArgs(provider=provider, installers=self._config.installers, machines=machines)
        return [objects, GpuDirectInstallers(name, args, opts=pulumi.ResourceOptions(depends_on=[objects]))]

    def _kueue(self, provider: kubernetes.Provider, *, space: pulumi.Resource) -> KueueStack:
        kueue = self._config.kueue
        args = KueueStackArgs(
            provider=provider,
            kueue=kueue,
            source=source_of(kueue.chart, environment=self._environment),
            region=self._region,
            holdings=holdings(self._shared) if self._shared else {},
            probe_image=self._probe_image(),
            site=self._site,
            space=space,
        )
        return KueueStack(self._region.name, args)

    def _probe_image(self) -> str:
        image = (
            self._config.shared.image
            if self._config.shared
            else full_image(self._site.image, registry=self._region.registry)
        )
        if not image:
            raise ConfigError(
                f"{self._stack} names no image with which it can wait for Kueue",
                hint="add site: {image: trainer}, which experiments then use where they name none",
            )
        return image

    def _kuberay(self, provider: kubernetes.Provider) -> KubeRayStack:
        kuberay = self._config.kuberay
        source = source_of(kuberay.chart, environment=self._environment)
        return KubeRayStack(self._region.name, KubeRayStackArgs(provider=provider, kuberay=kuberay, source=source))

    def _health(self, provider: kubernetes.Provider, *, after: Sequence[pulumi.Resource]) -> None:
        name, managed = self._region.name, self._region.managed_monitoring
        google = gcp.Provider(name, project=self._config.project, region=self._region.region) if managed else None
        args = HealthArgs(
            provider=provider,
            health=self._config.health,
            cluster=name,
            project=self._config.project,
            labels=stack_labels(self._stack, configured=self._config.labels),
            managed=managed,
            channels=self._region.alert_channels,
            gpus=any(pool.row.gpus for pool in self._region.pools),
            after=after,
            google=google,
        )
        HealthRules(name, args)

    def _publish(self, provider: kubernetes.Provider, *, after: Sequence[pulumi.Resource]) -> None:
        services = endpoints(self._shared) if self._shared else {}
        facts = cluster_facts(self._config, region=self._region, site=self._site, services=services)
        published = FactsConfigMap(self._region.name, FactsConfigMapArgs(provider=provider, facts=facts, after=after))
        del published
        pulumi.export(PLATFORM_OUTPUT, facts.model_dump(mode="json"))


def secret_values(text: str | None, *, referred: Sequence[str]) -> dict[str, dict[str, pulumi.Output[str]]]:
    """The Secrets that this stack makes, with values that the engine keeps secret."""
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not _is_secrets(found):
        raise ConfigError(
            f"the secret configuration gkr:{SECRETS} is not JSON of Secret to keys and values",
            hint=f"""pulumi config set --secret gkr:{SECRETS} '{{"gkr-bucket": {{"AWS_ACCESS_KEY_ID": "..."}}}}'""",
        )
    given = cast("dict[str, dict[str, str]]", found)
    if surplus := sorted(set(given) - set(referred)):
        raise ConfigError(
            f"the secret configuration gkr:{SECRETS} has {', '.join(surplus)}, which nothing in this stack refers to",
            hint=f"the stack refers to {', '.join(referred) or 'no Secret'}",
        )
    return {name: {key: pulumi.Output.secret(value) for key, value in keys.items()} for name, keys in given.items()}


def _is_secrets(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    inner = [cast("dict[str, Any]", one) for one in cast("dict[str, Any]", found).values() if isinstance(one, dict)]
    values = [value for one in inner for value in one.values()]
    return len(inner) == len(cast("dict[str, Any]", found)) and all(isinstance(value, str) for value in values)
