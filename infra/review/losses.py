"""What is lost when a resource is deleted or replaced, in a sentence that a reviewer can weigh."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from infra.policy.gpus import NODE_POOL
from infra.policy.resource import items, look
from infra.review.capacity import RESERVATION_TYPES, capacity_of, gpus_per_node, nodes, pool_gpus, reserved_gpus
from infra.review.fields import CLUSTER
from infra.review.preview import Preview, Step

NETWORK_TYPES = ("gcp:compute/network:Network", "gcp:compute/subnetwork:Subnetwork")


class Weight(IntEnum):
    """Why a loss needs a person's yes; the heavier comes first."""

    PROTECTED = 0
    GPUS = 1
    DATA = 2
    NONE = 3


@dataclass(frozen=True)
class Loss:
    """A deletion or replacement."""

    step: Step
    weight: Weight
    gpus: int
    """GPUs that go, for good or until the replacement is up."""
    text: str


_TEXTS = {
    CLUSTER: "every pool, object and run in the cluster; its address changes and facts have to be read again",
    "gcp:storage/bucket:Bucket": "every object in the bucket: checkpoints, runs, data sets",
    "gcp:kms/cryptoKey:CryptoKey": "everything encrypted with the key",
    "gcp:kms/keyRing:KeyRing": "everything encrypted with its keys; a ring's name can never be used again",
    "gcp:lustre/instance:Instance": "every file on it",
    "gcp:filestore/instance:Instance": "every file on it",
    "gcp:redis/instance:Instance": "the state of the shared services' Ray head",
    "gcp:artifactregistry/repository:Repository": "every image in it; pods that need one cannot start",
    "gcp:secretmanager/secret:Secret": "every version of the secret",
    "gcp:compute/network:Network": "every subnet, firewall rule and cluster attached to the network",
    "gcp:compute/subnetwork:Subnetwork": "the addresses of everything in the subnet",
    "gcp:compute/address:Address": "the address; what is allowed by it elsewhere stops working",
    "kubernetes:core/v1:Namespace": "every object in the namespace, running experiments included",
    "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition":
        "every object of this kind in the cluster, running experiments included",
    "kubernetes:core/v1:PersistentVolumeClaim": "the volume and what is on it",
    "kubernetes:kueue.x-k8s.io/v1beta2:ClusterQueue": "the queue; what it admitted is evicted, what waits is stranded",
    "kubernetes:kueue.x-k8s.io/v1beta2:ResourceFlavor": "the flavor; queues that name it admit nothing meanwhile",
    "kubernetes:ray.io/v1:RayCluster": "the shared services until the new Ray cluster is up",
}  # fmt: skip
_DATA = (
    CLUSTER, "gcp:storage/bucket:Bucket", "gcp:kms/cryptoKey:CryptoKey", "gcp:kms/keyRing:KeyRing",
    "gcp:lustre/instance:Instance", "gcp:filestore/instance:Instance", "gcp:artifactregistry/repository:Repository",
    "gcp:secretmanager/secret:Secret", "gcp:compute/network:Network", "kubernetes:core/v1:Namespace",
    "kubernetes:core/v1:PersistentVolumeClaim", "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition",
)  # fmt: skip
"""What holds data, or what everything else hangs on."""


def losses(preview: Preview) -> list[Loss]:
    """Every deletion and replacement, the heaviest first."""
    total = sum(pool_gpus(step) for step in preview.steps)
    attached = _fabric_users(preview)
    found = [
        _loss(step, total_gpus=total, attached=attached)
        for step in preview.steps
        if step.kind in ("delete", "replace") and step.custom
    ]
    return sorted(found, key=_order)


def _order(loss: Loss) -> tuple[int, int, bool, bool, str]:
    return loss.weight, -loss.gpus, loss.step.type != CLUSTER, loss.step.kind != "delete", loss.step.name


def _loss(step: Step, *, total_gpus: int, attached: dict[str, int]) -> Loss:
    gpus = pool_gpus(step) + reserved_gpus(step)
    if step.type == CLUSTER:
        gpus = total_gpus
    elif step.type in NETWORK_TYPES and step.old:
        gpus = attached.get(str(look(step.old.inputs, "name") or step.name), 0)
    weight = Weight.NONE
    if step.protected:
        weight = Weight.PROTECTED
    elif step.kept:
        weight = Weight.NONE
    elif gpus or (step.old and step.type in (NODE_POOL, *RESERVATION_TYPES) and gpus_per_node(step.old.inputs)):
        weight = Weight.GPUS
    elif step.type in _DATA:
        weight = Weight.DATA
    return Loss(step, weight, gpus, _text(step, gpus=gpus))


def _text(step: Step, *, gpus: int) -> str:
    if step.kept:
        return "nothing: it is forgotten here, stays where it is and is still paid for"
    if step.type == NODE_POOL:
        return _pool_text(step, gpus=gpus)
    if step.type in RESERVATION_TYPES:
        return f"the claim on {gpus} GPUs: others may take the machines, and they may not come back"
    text = _TEXTS.get(step.type, "")
    if gpus and step.type in NETWORK_TYPES:
        return f"{text}; GPU traffic of {gpus} GPUs runs over it"
    if gpus:
        return f"{text}; {gpus} GPUs"
    return text or ("its state; a new one follows" if step.kind == "replace" else "the resource")


def _pool_text(step: Step, *, gpus: int) -> str:
    if step.old is None:
        return "the nodes of the pool"
    count = nodes(step.old)
    if not gpus:
        gone = "the nodes of an empty pool" if not count else f"{count} nodes and the pods on them"
        return f"{gone}, until new ones are up" if step.kind == "replace" else gone
    ssds = int(look(step.old.inputs, "nodeConfig.ephemeralStorageLocalSsdConfig.localSsdCount") or 0)
    text = f"{count} nodes with {gpus} GPUs"
    text += ", until the new pool is up (runs go back to their last checkpoint)" if step.kind == "replace" else ""
    text += f"; what is on {count * ssds} local SSDs" if ssds else ""
    capacity = capacity_of(step.old.inputs)
    if capacity.startswith("projects/"):
        return f"{text}; whoever shares the reservation can take its machines"
    return f"{text}; {capacity} machines may not be had again"


def _fabric_users(preview: Preview) -> dict[str, int]:
    """Name of a network or subnetwork to the GPUs of the pools that are attached to it."""
    found: dict[str, int] = {}
    for step in preview.steps:
        if step.type != NODE_POOL or step.old is None:
            continue
        names: set[str] = set()
        for one in items(look(step.old.inputs, "networkConfig.additionalNodeNetworkConfigs")):
            names.update(str(look(one, key)) for key in ("network", "subnetwork") if look(one, key))
        for name in names:
            found[name] = found.get(name, 0) + pool_gpus(step)
    return found
