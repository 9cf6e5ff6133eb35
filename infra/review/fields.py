"""What a change of a field does to a resource, as data.

Sources: the provider's code for container resources (magic-modules, `mmv1/third_party/terraform/services/container`),
its resource descriptions for networks, subnetworks and reservations (`mmv1/products/compute`), Pulumi's Kubernetes
provider for objects. The engine decides what a preview shows; this table says why, tells an update that restarts every
node from one that restarts none, and lets tests and the test double know what the real provider would do.

Paths are spelled as on the wire, without indices; an entry covers everything below it unless a longer entry says
otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Effect = Literal["replaces", "recreates nodes", "in place", "not applied"]
"""`recreates nodes`: updated in place, but every node is drained and made anew by the pool's upgrade strategy.
`not applied`: the provider has no code that would apply it after creation.
"""

NODE_POOL = "gcp:container/nodePool:NodePool"
CLUSTER = "gcp:container/cluster:Cluster"


@dataclass(frozen=True)
class Fields:
    """The fields of one type."""

    replaces: tuple[str, ...] = ()
    recreates_nodes: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    not_applied: tuple[str, ...] = ()

    def rows(self) -> dict[str, Effect]:
        """Path to effect."""
        found: dict[str, Effect] = {}
        found.update(dict.fromkeys(self.replaces, "replaces"))
        found.update(dict.fromkeys(self.recreates_nodes, "recreates nodes"))
        found.update(dict.fromkeys(self.in_place, "in place"))
        found.update(dict.fromkeys(self.not_applied, "not applied"))
        return found


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


TABLE: dict[str, Fields] = {
    NODE_POOL: Fields(
        replaces=(
            "project", "cluster", "location", "name", "namePrefix", "initialNodeCount", "maxPodsPerNode",
            "placementPolicy", "queuedProvisioning",
            *_under(
                "networkConfig", "acceleratorNetworkProfile", "additionalNodeNetworkConfigs",
                "additionalPodNetworkConfigs", "createPodRange", "podRange", "podIpv4CidrBlock",
                "podCidrOverprovisionConfig", "subnetwork",
            ),
            *_under(
                "nodeConfig", "guestAccelerators", "ephemeralStorageConfig", "ephemeralStorageLocalSsdConfig",
                "localSsdCount", "localNvmeSsdBlockConfig", "secondaryBootDisks", "metadata", "minCpuPlatform",
                "oauthScopes", "preemptible", "spot", "flexStart", "maxRunDuration", "reservationAffinity",
                "serviceAccount", "shieldedInstanceConfig", "hostMaintenancePolicy", "sandboxConfig", "bootDiskKmsKey",
                "nodeGroup", "soleTenantConfig", "advancedMachineFeatures", "localSsdEncryptionMode",
                "enableConfidentialStorage", "confidentialNodes",
            ),
        ),
        recreates_nodes=(
            "version",
            *_under(
                "nodeConfig", "machineType", "diskType", "diskSizeGb", "bootDisk", "imageType", "labels", "taints",
                "tags", "resourceLabels", "resourceManagerTags", "kubeletConfig", "linuxNodeConfig", "gvnic",
                "gcfsConfig", "fastSocket", "workloadMetadataConfig", "loggingVariant", "containerdConfig",
                "storagePools",
            ),
        ),
        in_place=(
            "autoscaling", "nodeCount", "management", "upgradeSettings", "nodeLocations", "nodeDrainConfigs",
            "networkConfig.enablePrivateNodes",
        ),
        not_applied=("maintenancePolicies", "nodeConfig.gpudirectStrategy"),
    ),
    CLUSTER: Fields(
        replaces=(
            "name", "location", "project", "description", "network", "subnetwork", "ipAllocationPolicy",
            "networkingMode", "datapathProvider", "initialNodeCount", "enableAutopilot", "clusterIpv4Cidr",
            "defaultMaxPodsPerNode", "confidentialNodes", "enableMultiNetworking", "nodePools",
            *_under("privateClusterConfig", "masterIpv4CidrBlock", "privateEndpointSubnetwork"),
            "masterAuth.clientCertificateConfig",
        ),
        in_place=(
            "minMasterVersion", "releaseChannel", "addonsConfig", "maintenancePolicy", "monitoringConfig",
            "loggingConfig", "masterAuthorizedNetworksConfig", "controlPlaneEndpointsConfig", "deletionProtection",
            "resourceLabels", "workloadIdentityConfig", "enableL4IlbSubsetting",
        ),
    ),
    "gcp:compute/network:Network": Fields(
        replaces=("name", "project", "description", "autoCreateSubnetworks", "networkProfile", "internalIpv6Range",
                  "params"),
        in_place=("mtu", "routingMode", "networkFirewallPolicyEnforcementOrder"),
    ),
    "gcp:compute/subnetwork:Subnetwork": Fields(
        replaces=("name", "project", "region", "network", "description", "purpose", "reservedInternalRange",
                  "ipCidrRange"),
        in_place=("secondaryIpRanges", "privateIpGoogleAccess", "logConfig", "role"),
    ),
    "gcp:compute/reservation:Reservation": Fields(
        replaces=("name", "project", "zone", "description", "specificReservationRequired", "deleteAtTime",
                  "enableEmergentMaintenance", "specificReservation.instanceProperties", "shareSettings.shareType",
                  "reservationSharingPolicy.serviceShareType"),
        in_place=("specificReservation.count", "shareSettings.projects", "shareSettings.projectMaps"),
    ),
    "gcp:storage/bucket:Bucket": Fields(
        replaces=("name", "project", "location", "hierarchicalNamespace", "customPlacementConfig",
                  "enableObjectRetention"),
        in_place=("labels", "lifecycleRules", "softDeletePolicy", "storageClass", "uniformBucketLevelAccess",
                  "publicAccessPrevention", "versioning"),
    ),
    "gcp:artifactregistry/repository:Repository": Fields(
        replaces=("repositoryId", "project", "location", "format", "mode", "kmsKeyName"),
        in_place=("cleanupPolicies", "labels", "description"),
    ),
    "gcp:kms/keyRing:KeyRing": Fields(replaces=("name", "project", "location")),
    "gcp:kms/cryptoKey:CryptoKey": Fields(
        replaces=("name", "keyRing", "purpose", "importOnly", "destroyScheduledDuration"),
        in_place=("labels", "rotationPeriod"),
    ),
    "gcp:lustre/instance:Instance": Fields(
        replaces=("instanceId", "project", "location", "filesystem", "network", "perUnitStorageThroughput"),
        in_place=("capacityGib", "labels", "description"),
    ),
    "gcp:serviceaccount/account:Account": Fields(
        replaces=("accountId", "project"), in_place=("displayName", "description", "disabled")
    ),
    "kubernetes:core/v1:ConfigMap": Fields(replaces=("data", "binaryData", "immutable")),
    "kubernetes:core/v1:Secret": Fields(replaces=("data", "stringData", "type", "immutable")),
    "kubernetes:apps/v1:Deployment": Fields(replaces=("spec.selector",), in_place=("spec.template", "spec.replicas")),
    "kubernetes:apps/v1:DaemonSet": Fields(replaces=("spec.selector",), in_place=("spec.template",)),
    "kubernetes:apps/v1:StatefulSet": Fields(
        replaces=("spec.selector", "spec.serviceName", "spec.volumeClaimTemplates", "spec.podManagementPolicy"),
        in_place=("spec.template", "spec.replicas"),
    ),
    "kubernetes:batch/v1:Job": Fields(replaces=("spec.template", "spec.selector", "spec.completionMode")),
}  # fmt: skip
"""By type token. A subnetwork's range may grow in place; the provider replaces only when it shrinks or moves."""

_METADATA = ("metadata.name", "metadata.namespace")
"""A Kubernetes object of another name is another object."""


def effect_of(resource_type: str, path: str) -> Effect | None:
    """What a change at this path does; None where the table does not know."""
    plain = plain_path(path)
    rows: dict[str, Effect] = TABLE[resource_type].rows() if resource_type in TABLE else {}
    if resource_type.startswith("kubernetes:"):
        rows.update(dict.fromkeys(_METADATA, "replaces"))
    covering = [one for one in rows if plain == one or plain.startswith(f"{one}.")]
    if covering:
        return rows[max(covering, key=len)]
    below: list[Effect] = [effect for one, effect in rows.items() if one.startswith(f"{plain}.")]
    return below[0] if len(set(below)) == 1 else None


def replaces(resource_type: str, path: str) -> bool:
    """Whether the real provider would replace the resource for a change at this path."""
    return effect_of(resource_type, path) == "replaces"


def plain_path(path: str) -> str:
    """`nodeConfig.guestAccelerators[0].type` without its indices."""
    return re.sub(r"\[\d+\]|\[\"([^\"]*)\"\]", lambda match: f".{match[1]}" if match[1] else "", path).lstrip(".")
