"""The long-lived Ray cluster of the platform's shared services, rendered by `manifests` as a learner's is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_kubernetes as kubernetes

from infra.components.k8s.objects import declare
from infra.facts import NAMESPACE, RegionFacts
from manifests.shared import HeadState, SharedServices, shared_objects
from spec.facts import Site
from spec.stack_platform import SharedRay


def shared_services(ray: SharedRay, *, region: RegionFacts, site: Site) -> SharedServices:
    """What `manifests` is told."""
    state = HeadState(address=ray.redis.address, password_secret=ray.redis.password_secret) if ray.redis else None
    bucket = region.bucket.rstrip("/")
    return SharedServices(
        cluster=region.name, region=region.region, namespace=NAMESPACE, image=ray.image, bucket=bucket,
        services=ray.services, site=site, manifest=ray.manifest.replace("{bucket}", bucket), first_port=ray.first_port,
        ray_version=ray.ray_version, head_cores=ray.head_cpu, head_memory=ray.head_memory, head_state=state,
        token_secret=ray.token_secret,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SharedRayClusterArgs:
    """Shared services of a cluster."""

    provider: kubernetes.Provider
    services: SharedServices
    after: Sequence[pulumi.Resource]
    """Operators, networks and namespaces that its pods need."""


class SharedRayCluster(pulumi.ComponentResource):
    """Declares it."""

    def __init__(self, name: str, args: SharedRayClusterArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:SharedServices", name, None, opts)
        objects = shared_objects(args.services)
        declare(objects, parent=self, provider=args.provider, depends_on=args.after)
        self.register_outputs({"services": sorted(args.services.services)})
