"""What a pod that takes a whole GPU machine must look like to get its networks.

The cluster takes a wrong pod without a word: it starts, and NCCL runs over TCP. Pure; the pod is a plain dict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spec.machines import Machine
from spec.stack_fabric import fabric_networks

INTERFACES = "networking.gke.io/interfaces"
DEFAULT_INTERFACE = "networking.gke.io/default-interface"


def interface_annotations(row: Machine) -> dict[str, str]:
    """eth0 is the cluster's network, then the machine's own in the order of its node pool."""
    names = ["default", *(one.name for one in fabric_networks(row))]
    found = [{"interfaceName": f"eth{index}", "network": name} for index, name in enumerate(names)]
    return {DEFAULT_INTERFACE: "eth0", INTERFACES: json.dumps(found)}


def pod_faults(template: Mapping[str, Any], *, row: Machine, ray_container: str = "ray") -> list[str]:
    """What keeps a pod on a whole machine of this row from its fabric; empty: nothing."""
    faults: list[str] = []
    annotations: Mapping[str, str] = template.get("metadata", {}).get("annotations", {})
    wanted = ["default", *(one.name for one in fabric_networks(row))]
    try:
        found = [one["network"] for one in json.loads(annotations.get(INTERFACES, "[]"))]
    except (ValueError, TypeError, KeyError):
        found = []
    if len(wanted) > 1 and found != wanted:
        shown = ", ".join(found) or "nothing"
        faults.append(f"{INTERFACES} lists {shown}; the networks of {row.name} are {', '.join(wanted)}")
    if len(wanted) > 1 and annotations.get(DEFAULT_INTERFACE) != "eth0":
        faults.append(f"{DEFAULT_INTERFACE} is not eth0; the pod could not reach the cluster")
    containers: Sequence[Mapping[str, Any]] = template.get("spec", {}).get("containers", [])
    if not containers or containers[0].get("name") != ray_container:
        faults.append("Ray's container is not the first; only the first one is given the RDMA devices")
    if template.get("spec", {}).get("hostNetwork"):
        faults.append("hostNetwork hides the pod's own networks; GPUs are not matched with their NICs")
    return faults
