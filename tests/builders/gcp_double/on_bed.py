"""What the double does with a one-node cluster of `tools.bed`, when one is up for the region.

A GKE cluster answers with the bed's API server; a pool of GPU machines is fake nodes with the labels, the taint, the
GPUs and the places of its machine; a CPU pool is the one real node. Without a bed all of it is nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import yaml

from infra.engine.place import DOUBLE_READS_ONLY
from spec.machines import CATALOGUE, Machine, machine
from tools.bed import fake_nodes, kwok
from tools.bed.layout import Bed
from tools.bed.processes import ensure
from tools.bed.run import kubectl
from tools.local_stacks import bed_of

POOL_LABEL = "cloud.google.com/gke-nodepool"


def reach(region: str) -> dict[str, Any]:
    """Outputs by which the cluster of a region is reached; empty without a bed."""
    bed = bed_of(region)
    if bed is None or not bed.kubeconfig.is_file():
        return {}
    document: Any = yaml.safe_load(bed.kubeconfig.read_text(encoding="utf-8"))
    server, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    return {
        "endpoint": str(server["server"]).removeprefix("https://"),
        "masterAuth": {
            "clusterCaCertificate": server["certificate-authority-data"],
            "clientCertificate": user["client-certificate-data"],
            "clientKey": user["client-key-data"],
        },
    }


def provide_types(region: str) -> None:
    """The resource types that GKE brings to a cluster with several networks."""
    bed = bed_of(region)
    if bed is not None and not _reads_only():
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": network_types()})
        kubectl(bed, "apply", "--server-side", "-f", "-", stdin=text)
        names = [f"crd/{one['metadata']['name']}" for one in network_types()]
        kubectl(bed, "wait", "--for=condition=Established", "--timeout=30s", *names)


def remove_types(region: str) -> None:
    """A cluster that is deleted takes them along; the bed outlives it."""
    bed = bed_of(region)
    if bed is not None and not _reads_only():
        kubectl(bed, "delete", "--ignore-not-found", "crd", *(one["metadata"]["name"] for one in network_types()))


def network_types() -> list[dict[str, Any]]:
    """Network and GKENetworkParamSet with the fields that this project writes; what GKE adds is accepted unread."""
    text: dict[str, Any] = {"type": "string"}
    reference = {"type": "object", "properties": {"group": text, "kind": text, "name": text}}
    mode = {"type": "string", "enum": ["NetDevice", "DPDK-VFIO", "RDMA"]}
    return [
        _type("Network", "networks", required=["type"], type=text, parametersRef=reference),
        _type("GKENetworkParamSet", "gkenetworkparamsets", required=["vpc"], vpc=text, vpcSubnet=text, deviceMode=mode),
    ]


def _type(kind: str, plural: str, *, required: list[str], **fields: Mapping[str, Any]) -> dict[str, Any]:
    more = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {**more, "properties": fields, "required": required}
    schema = {"type": "object", "properties": {"spec": spec, "status": more}, "required": ["spec"]}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.networking.gke.io"},
        "spec": {
            "group": "networking.gke.io",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "scope": "Cluster",
            "versions": [{**version, "subresources": {"status": {}}}],
        },
    }


def provide_pool(inputs: Mapping[str, Any]) -> None:
    """Bring the nodes of a pool to what is wanted."""
    bed, row = bed_of(str(inputs["location"])), _machine(inputs)
    if bed is None or row is None or _reads_only():
        return
    if not row.gpus:
        labels = {**machine("local-cpu").labels, POOL_LABEL: str(inputs["name"]), **_zone(inputs)}
        kubectl(bed, "label", "node", bed.node, "--overwrite", *(f"{key}={value}" for key, value in labels.items()))
        return
    ensure(bed, kwok.component(bed))
    wanted = {one["metadata"]["name"]: one for one in pool_nodes(inputs, row, region=bed.region)}
    there = _present(bed, inputs)
    missing = [node for name, node in wanted.items() if name not in there]
    if missing:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": missing})
        kubectl(bed, "create", "--validate=false", "-f", "-", stdin=text, deadline_seconds=fake_nodes.APPLY_SECONDS)
    _remove(bed, [name for name in there if name not in wanted])


def remove_pool(outputs: Mapping[str, Any]) -> None:
    """Take a pool's fake nodes away; the real node stays."""
    bed, row = bed_of(str(outputs["location"])), _machine(outputs)
    if bed is not None and row is not None and row.gpus and not _reads_only():
        _remove(bed, _present(bed, outputs))


def pool_nodes(inputs: Mapping[str, Any], row: Machine, *, region: str) -> list[dict[str, Any]]:
    """A pool's nodes, in name and label those of the pool rather than of the machine."""
    pool = str(inputs["name"])
    config = inputs["nodeConfig"]
    found: list[dict[str, Any]] = []
    for index in range(int(inputs.get("nodeCount") or 0) * len(inputs["nodeLocations"])):
        node = fake_nodes.node(row, index, region=region)
        name = f"gke-{pool}-{index}"
        node["metadata"]["name"] = name
        own = {POOL_LABEL: pool, "kubernetes.io/hostname": name, **_zone(inputs), **_reserved(config)}
        node["metadata"]["labels"] |= {**dict(config.get("labels") or {}), **own}
        found.append(node)
    return found


def _reads_only() -> bool:
    return bool(os.environ.get(DOUBLE_READS_ONLY))


def _reserved(config: Mapping[str, Any]) -> dict[str, str]:
    values = (config.get("reservationAffinity") or {}).get("values") or []
    if not values:
        return {}
    name = str(values[0]).split("/")[3]
    return {"cloud.google.com/reservation-name": name, "cloud.google.com/reservation-affinity": "specific"}


def _zone(inputs: Mapping[str, Any]) -> dict[str, str]:
    return {
        "topology.kubernetes.io/region": str(inputs["location"]),
        "topology.kubernetes.io/zone": str(inputs["nodeLocations"][0]),
    }


def _machine(inputs: Mapping[str, Any]) -> Machine | None:
    kind = inputs["nodeConfig"]["machineType"]
    return next((row for row in CATALOGUE if row.machine_type == kind), None)


def _present(bed: Bed, inputs: Mapping[str, Any]) -> list[str]:
    selector = f"{fake_nodes.MACHINE_LABEL},{POOL_LABEL}={inputs['name']}"
    return kubectl(bed, "get", "nodes", "-l", selector, "-o", "jsonpath={.items[*].metadata.name}").split()


def _remove(bed: Bed, names: list[str]) -> None:
    if names:
        arguments = ("delete", "node", "--wait=false", "--ignore-not-found", *names)
        kubectl(bed, *arguments, deadline_seconds=fake_nodes.APPLY_SECONDS)
