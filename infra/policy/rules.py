"""All rules and the function that runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infra.policy.cloud import (
    allowed_machines,
    allowed_regions,
    buckets,
    deletion_protection,
    labels_present,
    no_public_node_address,
    not_open_to_the_world,
)
from infra.policy.gpus import gpu_capacity, gpu_fabric, gpu_taint
from infra.policy.identity import no_broad_roles, no_policy_takeover, no_public_members, no_service_account_keys
from infra.policy.kubernetes import (
    images_by_digest,
    no_clear_secrets,
    no_placeholder_images,
    no_public_load_balancer,
)
from infra.policy.resource import Finding, Resource, Rule, Settings

RULES: dict[str, Rule] = {
    "labels": labels_present,
    "public-node-address": no_public_node_address,
    "open-to-the-world": not_open_to_the_world,
    "public-load-balancer": no_public_load_balancer,
    "allowed-regions": allowed_regions,
    "allowed-machines": allowed_machines,
    "gpu-capacity": gpu_capacity,
    "gpu-taint": gpu_taint,
    "gpu-fabric": gpu_fabric,
    "image-by-digest": images_by_digest,
    "placeholder-image": no_placeholder_images,
    "deletion-protection": deletion_protection,
    "buckets": buckets,
    "service-account-keys": no_service_account_keys,
    "broad-roles": no_broad_roles,
    "policy-takeover": no_policy_takeover,
    "public-members": no_public_members,
    "clear-secrets": no_clear_secrets,
}
"""By the name that findings carry."""


def check(resources: Iterable[Resource], *, settings: Settings, only: Sequence[str] = ()) -> list[Finding]:
    """Every finding about every resource; refusals first, then by rule and resource."""
    rules = [RULES[name] for name in only] if only else list(RULES.values())
    found = [one for resource in resources for rule in rules for one in rule(resource, settings)]
    return sorted(dict.fromkeys(found), key=lambda one: (one.severity != "refuse", one.rule, one.type, one.name))
