"""What the bed tells GKR: the facts document that a deployed region's platform stack would publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec.facts import ClusterFacts, HostMount, MachinePool, Site, SyncerPorts
from spec.machines import machine
from tools.bed import bucket, kueue
from tools.bed.layout import Bed, Wanted

NAMESPACE = "gkr-system"
NAME = "gkr-facts"
KEY = "facts.json"
NAMESPACES = ("gkr-0", "gkr-1")
MANAGED = {"gkr/managed": "true"}
CPU_NODES = 16
"""Stand-ins for CPU nodes: pods of this size share the one real node."""
CPU_REQUEST_SHARE = 0.1
SYNCER_PORTS = (7070, 7071)
TOPOLOGY_LEVEL = "cloud.google.com/gce-topology-subblock"


def cluster_facts(
    bed: Bed, *, wanted: Wanted, cores: float, memory: int, image: str, mounts: Sequence[Path]
) -> ClusterFacts:
    """Facts of one bed; `cores` and `memory` (bytes) are what the real node offers to experiments' pods."""
    cpu = MachinePool(name="cpu", machine="local-cpu", nodes=CPU_NODES, cpu=cores, memory=memory)
    fake = [MachinePool(name=name, machine=name, nodes=count) for name, count in wanted.fake.items()]
    control, bulk = SYNCER_PORTS
    return ClusterFacts(
        name=bed.name,
        region=bed.region,
        backend="kubernetes",
        pools=[cpu, *fake],
        bucket=f"s3://{bucket.bucket_name(bed.name)}",
        queues=[kueue.QUEUE],
        priorities=list(kueue.PRIORITIES),
        syncer=SyncerPorts(control_port=control, bulk_port=bulk, host=bed.link_address if wanted.regions > 1 else ""),
        namespaces=list(NAMESPACES),
        site=site(bed, image=image, mounts=mounts, topology=any(machine(name).gpus for name in wanted.fake)),
    )


def site(bed: Bed, *, image: str, mounts: Sequence[Path], topology: bool) -> Site:
    """What every pod of an experiment gets here: a root made of the host's folders, and the bucket."""
    return Site(
        image=image,
        bucket_env=bucket.environment(bed.address),
        bucket_secret=bucket.SECRET,
        mounts=[
            HostMount(name=f"host-{index}", host_path=str(path), mount_path=str(path), read_only=True)
            for index, path in enumerate(mounts)
        ],
        cpu_request_share=CPU_REQUEST_SHARE,
        topology_level=TOPOLOGY_LEVEL if topology else "",
    )


def config_map(facts: ClusterFacts) -> dict[str, Any]:
    """Where `gkr` looks for the facts of a cluster."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "data": {KEY: facts.model_dump_json(indent=2)},
    }


def namespaces() -> list[dict[str, Any]]:
    """The platform's own namespace and those of experiments."""
    labels: Mapping[str, Mapping[str, str]] = {NAMESPACE: {}, **dict.fromkeys(NAMESPACES, MANAGED)}
    return [namespace(name, labels=one) for name, one in labels.items()]


def namespace(name: str, *, labels: Mapping[str, str]) -> dict[str, Any]:
    """One namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels)}}
