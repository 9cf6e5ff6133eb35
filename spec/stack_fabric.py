"""Which networks a machine's fabric consists of, in the order in which GKE must be given them.

One home for names, modes and subnets: node pools, Network objects and pod annotations derive from it. The order is the
order of the NICs and is part of a pool's identity; changing it replaces pools. Source: reference note on A3 machines,
sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Literal

from spec.machines import Machine
from spec.stack_values import network_of

LONGEST_NETWORK_OBJECT = 41
"""Characters of a Network object's name of type Device."""
PARTS = 16
"""Equal subnets that a fabric's range is cut into; the largest fabric needs nine."""
DeviceMode = Literal["NetDevice", "RDMA"]


@dataclass(frozen=True)
class FabricNetwork:
    """One NIC's network besides the primary one."""

    name: str
    """Of its Network object and, with the cluster's name in front, of its subnet."""
    mode: DeviceMode
    own_vpc: bool
    """A network for itself; else one of several subnets of the RoCE network."""


def fabric_networks(row: Machine) -> tuple[FabricNetwork, ...]:
    """Networks of a node pool in GKE's order; empty for a machine without fabric."""
    if row.fabric in ("tcpx", "tcpxo"):
        return tuple(FabricNetwork(f"vpc{index}", "NetDevice", own_vpc=True) for index in range(1, row.gpu_nics + 1))
    if row.fabric == "rdma":
        lanes = (FabricNetwork(f"rdma-{index}", "RDMA", own_vpc=False) for index in range(row.gpu_nics))
        return (FabricNetwork("gvnic-1", "NetDevice", own_vpc=True), *lanes)
    return ()


def fabric_subnets(row: Machine, *, cidr: str) -> dict[str, str]:
    """Range of each network's subnet, by name: the first parts of the fabric's range, in order."""
    whole = network_of(cidr)
    parts = list(whole.subnets(prefixlen_diff=PARTS.bit_length() - 1))
    return {one.name: str(part) for one, part in zip(fabric_networks(row), parts, strict=False)}


def vpcs(row: Machine) -> int:
    """VPC networks that one cluster's fabric of this machine takes from the project's quota."""
    networks = fabric_networks(row)
    return sum(one.own_vpc for one in networks) + any(not one.own_vpc for one in networks)


def network_faults(row: Machine, *, networks: Sequence[FabricNetwork]) -> list[str]:
    """What is wrong with the networks that a pool of this machine is about to be given; empty: nothing."""
    faults: list[str] = []
    if len(networks) != row.extra_networks:
        faults.append(
            f"{row.name} has {row.extra_networks} networks besides the primary one, not {len(networks)};"
            " GPUs without theirs fall back to TCP"
        )
    if row.fabric in ("tcpx", "tcpxo") and any("gvnic" in one.name for one in networks):
        faults.append(f"{row.name} must not have a gVNIC network: it takes a GPU NIC's slot, and one GPU is lost")
    faults.extend(
        f"the Network object {one.name} has {len(one.name)} characters; GKE takes {LONGEST_NETWORK_OBJECT}"
        for one in networks
        if len(one.name) > LONGEST_NETWORK_OBJECT
    )
    names, wanted = [one.name for one in networks], [one.name for one in fabric_networks(row)]
    if not faults and names != wanted:
        faults.append(
            f"networks of {row.name} are {', '.join(names)}; the order of its NICs is {', '.join(wanted)},"
            " and another order gives GPUs each other's network"
        )
    return faults


def usable_hosts(cidr: str) -> int:
    """Addresses of a subnet that nodes can have: the cloud keeps four."""
    network: IPv4Network = network_of(cidr)
    return max(0, network.num_addresses - 4)
