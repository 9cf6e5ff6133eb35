"""Rules for Google Cloud resources: labels, addresses, places, machines, protection and buckets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from infra.policy.gpus import NODE_POOL
from infra.policy.resource import (
    SECRET,
    UNKNOWN,
    Finding,
    Resource,
    Settings,
    finding,
    has_gpus,
    is_set,
    look,
    texts,
)

CLUSTER = "gcp:container/cluster:Cluster"
BUCKET = "gcp:storage/bucket:Bucket"
FIREWALL = "gcp:compute/firewall:Firewall"
LABELLED = {
    CLUSTER: "resourceLabels",
    NODE_POOL: "nodeConfig.resourceLabels",
    BUCKET: "labels",
    "gcp:artifactregistry/repository:Repository": "labels",
    "gcp:compute/instance:Instance": "labels",
    "gcp:kms/cryptoKey:CryptoKey": "labels",
    "gcp:lustre/instance:Instance": "labels",
    "gcp:filestore/instance:Instance": "labels",
    "gcp:redis/instance:Instance": "labels",
    "gcp:secretmanager/secret:Secret": "labels",
    "gcp:compute/globalAddress:GlobalAddress": "labels",
}
"""Where a type that costs money carries its labels."""
ALWAYS_PROTECTED = ("gcp:kms/cryptoKey:CryptoKey", "gcp:kms/keyRing:KeyRing", "gcp:compute/reservation:Reservation",
                    "gcp:compute/futureReservation:FutureReservation")  # fmt: skip
PROTECTED_IN_PRODUCTION = (CLUSTER, BUCKET, "gcp:compute/network:Network", "gcp:compute/subnetwork:Subnetwork",
                           "gcp:lustre/instance:Instance")  # fmt: skip
WORLD = {"0.0.0.0/0", "::/0", "0::/0"}
_PLACE = re.compile(r"[a-z]+(?:-[a-z]+)+\d+(?:-[a-z])?")
_MULTI_REGIONS = {"us", "eu", "asia", "global"}


def labels_present(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Costs are split and stray things are found by labels."""
    path = LABELLED.get(resource.type)
    labels = resource.get(path) if path else None
    if path is None or labels in (UNKNOWN, SECRET):
        return
    keys = set(cast("dict[str, Any]", labels)) if isinstance(labels, dict) else set[str]()
    missing = [key for key in settings.labels if key not in keys]
    if missing or not keys:
        what = f"lacks the labels {', '.join(missing)}" if missing else "has no labels"
        yield finding(
            resource, "labels",
            message=f"{path} {what}: its cost could not be told apart",
            remedy="the labels come from the stack's `labels`; let the shared transform add them",
        )  # fmt: skip


def no_public_node_address(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Nodes and machines have no address on the internet; they go out through NAT."""
    del settings
    paths = {NODE_POOL: "networkConfig.enablePrivateNodes", CLUSTER: "privateClusterConfig.enablePrivateNodes"}
    path = paths.get(resource.type)
    if path is not None and resource.get(path) is not True:
        yield finding(
            resource, "public-node-address",
            message=f"{path} is not true: every node would get a public address",
            remedy="set it to true; outgoing traffic goes through the region's NAT",
        )  # fmt: skip
    if resource.type == "gcp:compute/instance:Instance":
        for one in resource.each("networkInterfaces"):
            if look(one, "accessConfigs"):
                yield finding(
                    resource, "public-node-address", message="a network interface asks for a public address",
                    remedy="leave accessConfigs out and reach the machine through IAP",
                )  # fmt: skip


def not_open_to_the_world(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """No rule admits every address."""
    del settings
    if resource.type == FIREWALL and is_set(resource.get("allows")) and resource.get("direction") != "EGRESS":
        sources = texts(resource.get("sourceRanges"))
        if WORLD & set(sources):
            yield finding(
                resource, "open-to-the-world",
                message=f"admits {', '.join(sorted(WORLD & set(sources)))}, which is everybody",
                remedy="name the pod or node ranges that need it",
            )  # fmt: skip
        elif not sources and not _other_source(resource):
            yield finding(
                resource, "open-to-the-world", message="has no source, which the cloud reads as 0.0.0.0/0",
                remedy="name the pod or node ranges that need it",
            )  # fmt: skip
    if resource.type == CLUSTER:
        for block in resource.each("masterAuthorizedNetworksConfig.cidrBlocks"):
            if look(block, "cidrBlock") in WORLD:
                yield finding(
                    resource, "open-to-the-world", message="the control plane's address is open to everybody",
                    remedy="use the DNS endpoint, whose access is by IAM, or name the networks",
                )  # fmt: skip


def _other_source(resource: Resource) -> bool:
    """A source besides known ranges; ranges that are known only after the update count as one."""
    fields = ("sourceTags", "sourceServiceAccounts", "sourceRanges")
    return any(is_set(resource.get(field)) for field in fields)


def allowed_regions(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """A region stack makes nothing elsewhere; a global stack nothing where its environment has no region stack."""
    if not settings.regions or not resource.type.startswith("gcp:"):
        return
    for field in ("region", "location", "zone", "nodeLocations", "locationId"):
        for text in texts(resource.get(field)):
            place = text.rsplit("/", 1)[-1].lower()
            if place in _MULTI_REGIONS or not _PLACE.fullmatch(place):
                continue
            region = re.sub(r"-[a-z]$", "", place)
            if region not in settings.regions:
                yield finding(
                    resource, "allowed-regions",
                    message=f"{field} {place} is outside the regions of this stack"
                    f" ({', '.join(sorted(settings.regions))})",
                    remedy="declare it in the stack of its own region",
                )  # fmt: skip


def allowed_machines(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Only machines that somebody has thought about: GPU machines of the catalogue, CPU machines of known families."""
    paths = {NODE_POOL: "nodeConfig.machineType", CLUSTER: "nodeConfig.machineType",
             "gcp:compute/instance:Instance": "machineType"}  # fmt: skip
    path = paths.get(resource.type)
    name = resource.get(path) if path else None
    if not isinstance(name, str) or name == UNKNOWN or name in settings.machine_types:
        return
    if name.startswith(settings.machine_families) and not has_gpus(resource):
        return
    yield finding(
        resource, "allowed-machines",
        message=f"machine type {name} is neither in the machine catalogue nor of an allowed CPU family",
        remedy="use a machine of spec.machines, or add its row there with its fabric",
    )  # fmt: skip


def deletion_protection(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """In production a deletion takes two changes: first the protection, then the thing."""
    if resource.type == CLUSTER and settings.protected and resource.get("deletionProtection") is False:
        yield finding(
            resource, "deletion-protection", message="deletionProtection is false: one mistaken change ends every run",
            remedy="set deletionProtection to true; turn it off in a change of its own when the cluster is to go",
        )  # fmt: skip
    if resource.protect is not False:
        return
    reserved = resource.type == NODE_POOL and is_set(resource.get("nodeConfig.reservationAffinity.values"))
    needed = resource.type in ALWAYS_PROTECTED and not settings.throwaway
    if settings.protected:
        needed = needed or resource.type in PROTECTED_IN_PRODUCTION or reserved
    if needed:
        yield finding(
            resource, "deletion-protection",
            message="is not protected: a removed line in a stack file would delete it",
            remedy="declare it with protect=True (the pool's or cluster's `protect`)",
        )  # fmt: skip


def buckets(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Buckets hold the weights: access by IAM alone, never public, never emptied by a deletion."""
    if resource.type != BUCKET:
        return
    if resource.get("uniformBucketLevelAccess") is not True:
        yield finding(
            resource, "buckets", message="uniformBucketLevelAccess is not true: single objects could be made public",
            remedy="set it to true",
        )  # fmt: skip
    if resource.get("publicAccessPrevention") != "enforced":
        yield finding(
            resource, "buckets", message="publicAccessPrevention is not enforced", remedy="set it to enforced"
        )
    if resource.get("forceDestroy") is True and not settings.throwaway:
        yield finding(
            resource, "buckets", message="forceDestroy is true: deleting the bucket deletes every checkpoint in it",
            remedy="set it to false; only dev and local environments may",
        )  # fmt: skip
