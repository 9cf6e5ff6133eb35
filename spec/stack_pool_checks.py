"""Rules of machines: pools, reservations, capacity, fabrics, and whether everything fits its address range.

Each rule was somebody's outage or a day of confusing messages; reference note on A3 machines, section 12. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spec.machines import CATALOGUE, Machine, machine
from spec.nodes import Path
from spec.problems import did_you_mean
from spec.refusals import Refusal
from spec.stack_fabric import PARTS, fabric_networks, network_faults, usable_hosts
from spec.stack_region import GpuPool, RegionStack
from spec.stack_values import gke_version, network_of

DRANET_FLOOR = "1.34.1-gke.1829001"
PODS_PER_CPU_NODE = 110
PORTS_PER_ADDRESS = 64_512
"""Of a NAT address, for each protocol."""
SMALLEST_SUBNET = 29
"""Longest prefix of a subnet."""


def check_pools(config: RegionStack) -> Iterator[Refusal]:
    """All findings about machines."""
    yield from _cpu_pool(config)
    yield from _names(config)
    known = {index: row for index, pool in enumerate(config.gpu_pools) if (row := _row(pool.machine))}
    for index, pool in enumerate(config.gpu_pools):
        path: Path = ("gpu_pools", index)
        yield from _machine((*path, "machine"), pool.machine, gpus=True)
        yield from _zone((*path, "zone"), pool.zone, config.region)
        yield from _capacity(path, pool, known.get(index))
        if index in known:
            yield from _node(path, pool, known[index])
            yield from _pool_fabric(path, config, pool, known[index])
    first = {row.name: index for index, row in reversed(known.items())}
    for name, index in sorted(first.items(), key=lambda one: one[1]):
        yield from _cluster(("gpu_pools", index), config, machine(name))
    yield from _reservations(config)
    yield from _bindings(config)
    yield from _fabrics(config)
    yield from _room(config)


def _row(name: str) -> Machine | None:
    try:
        row = machine(name)
    except KeyError:
        return None
    return row if row.gpus and not row.unsupported else None


def _machine(path: Path, name: str, *, gpus: bool) -> Iterator[Refusal]:
    choices = [one.name for one in CATALOGUE if bool(one.gpus) == gpus and not one.unsupported]
    row = next((one for one in CATALOGUE if one.name == name), None)
    if row is None:
        hint = did_you_mean(name, choices, noun="machines")
        message = f'machine "{name}" is not in the catalogue; its fabric, labels and sizes are not known'
        yield Refusal(path, message, hint=hint)
    elif row.unsupported:
        yield Refusal(path, f"machine {name} is not supported: {row.unsupported}", hint=f"use {', '.join(choices)}")
    elif bool(row.gpus) != gpus:
        has = "has GPUs" if row.gpus else "has no GPUs"
        yield Refusal(path, f"machine {name} {has}; it belongs in the other kind of pool", hint=f"use {choices[0]}")


def _zone(path: Path, zone: str, region: str) -> Iterator[Refusal]:
    if re.fullmatch(re.escape(region) + "-[a-z]", zone) is None:
        message = f"zone {zone} is not in region {region}, where the cluster is; its nodes could not join"
        yield Refusal(path, message, hint=f"write a zone such as {region}-a")


def _cpu_pool(config: RegionStack) -> Iterator[Refusal]:
    pool, path = config.cpu_pool, ("cpu_pool",)
    yield from _machine((*path, "machine"), pool.machine, gpus=False)
    for index, zone in enumerate(pool.zones):
        yield from _zone((*path, "zones", index), zone, config.region)
    if len(set(pool.zones)) < len(pool.zones):
        yield Refusal((*path, "zones"), "a zone is given twice", hint="remove one", key=True)
    if config.protect and config.gpu_pools and len(set(pool.zones)) < 2:
        message = "the CPU pool is in one zone; when that is out of stock no head pod starts and all GPUs stand idle"
        yield Refusal((*path, "zones"), message, hint="name two or three zones of the region", key=True)
    if pool.min_nodes > pool.max_nodes:
        message = f"min_nodes {pool.min_nodes} is above max_nodes {pool.max_nodes}"
        yield Refusal((*path, "max_nodes"), message, hint=f"write at least {pool.min_nodes}")
    row = next((one for one in CATALOGUE if one.name == pool.machine), None)
    if row and not row.allocatable_cpu and (pool.cpu is None or pool.memory is None):
        message = f"{row.name} has no size of its own; facts could not say what a node offers"
        yield Refusal((*path, "machine"), message, hint="write cpu and memory of a node")


def _names(config: RegionStack) -> Iterator[Refusal]:
    seen: dict[str, Path] = {config.cpu_pool.name: ("cpu_pool", "name")}
    for index, pool in enumerate(config.gpu_pools):
        path: Path = ("gpu_pools", index, "name")
        if pool.name in seen:
            message = f'two pools are called "{pool.name}"; the second could not be made'
            yield Refusal(path, message, hint="give each its own name", also=(seen[pool.name],))
        seen.setdefault(pool.name, path)


def _capacity(path: Path, pool: GpuPool, row: Machine | None) -> Iterator[Refusal]:
    capacity, at = pool.capacity, (*path, "capacity")
    if capacity.kind == "reservation":
        if capacity.reservation is None:
            message = f"pool {pool.name} is to use a reservation but names none; it would get no machines"
            hint = "add reservation: projects/P/reservations/R"
            yield Refusal((*at, "kind"), message, hint=hint)
        if capacity.compact_placement:
            message = (
                "a reservation already is a place; with a placement policy beside it the cloud fails with a"
                " misleading message about the reservation"
            )
            yield Refusal((*at, "compact_placement"), message, hint="remove compact_placement")
        if pool.upgrade.max_surge:
            message = f"max_surge {pool.upgrade.max_surge} asks for machines that a full reservation does not have"
            hint = "write max_surge: 0 and choose max_unavailable"
            yield Refusal((*path, "upgrade", "max_surge"), message, hint=hint)
    elif capacity.reservation is not None:
        message = f"{capacity.kind} machines do not come from a reservation; the pool would be refused"
        hint = "write kind: reservation, or remove reservation"
        yield Refusal((*at, "reservation"), message, hint=hint, also=((*at, "kind"),))
    if capacity.kind != "flex-start":
        for field in ("max_run", "queued"):
            if getattr(capacity, field):
                message = f"{field} is for flex-start, and this pool is {capacity.kind}; the pool would be refused"
                yield Refusal((*at, field), message, hint=f"remove {field}, or write kind: flex-start", key=True)
    elif capacity.compact_placement and capacity.queued:
        message = "compact placement does not go together with queued provisioning"
        yield Refusal((*at, "compact_placement"), message, hint="remove one of them")
    if row and capacity.kind == "on-demand" and not row.on_demand:
        message = f"{row.name} cannot be had on demand; the pool would stay empty"
        yield Refusal((*at, "kind"), message, hint="write reservation, spot or flex-start")


def _node(path: Path, pool: GpuPool, row: Machine) -> Iterator[Refusal]:
    kind = pool.boot_disk.kind
    if kind is not None and kind not in row.boot_disks:
        message = f"{row.name} does not take a boot disk of kind {kind}; no node would start"
        hint = f"write {' or '.join(row.boot_disks)}, or leave it out"
        yield Refusal((*path, "boot_disk", "kind"), message, hint=hint)
    if pool.local_ssds is not None and pool.local_ssds != row.local_ssds:
        message = (
            f"{row.name} has {row.local_ssds} local SSDs, not {pool.local_ssds}; machines would not match the"
            " reservation, or most of the scratch space would be missing"
        )
        yield Refusal((*path, "local_ssds"), message, hint="leave local_ssds out")
    if pool.fast_socket and row.fabric != "none":
        message = f"NCCL Fast Socket does not go together with the fabric of {row.name}; NCCL would use TCP"
        yield Refusal((*path, "fast_socket"), message, hint="remove fast_socket")
    if pool.max_pods_per_node & (pool.max_pods_per_node - 1):
        power = 1 << pool.max_pods_per_node.bit_length()
        message = f"{pool.max_pods_per_node} pods per node waste addresses, which are given out in powers of two"
        yield Refusal((*path, "max_pods_per_node"), message, hint=f"write {power // 2} or {power}")


def _cluster(path: Path, config: RegionStack, row: Machine) -> Iterator[Refusal]:
    """What the cluster must be for one machine type; `path` is its first pool."""
    fabric, also = config.fabrics.get(row.name), ((*path, "machine"),)
    managed = fabric is not None and fabric.mode == "dranet"
    floor = DRANET_FLOOR if managed else row.gke_floor
    if floor and gke_version(config.cluster.version) < gke_version(floor):
        message = f"GKE {config.cluster.version} is older than {floor}, which the fabric of {row.name} needs"
        hint = f"take {floor} or newer; GPUs would talk over TCP"
        yield Refusal(("cluster", "version"), message, hint=hint, also=also)
    if fabric and not managed and not config.cluster.multi_networking:
        message = f"{row.name} needs several networks per node, which can be chosen only when a cluster is made"
        hint = "write multi_networking: true; an existing cluster has to be made again"
        yield Refusal(("cluster", "multi_networking"), message, hint=hint, also=also)


def _pool_fabric(path: Path, config: RegionStack, pool: GpuPool, row: Machine) -> Iterator[Refusal]:
    if not row.extra_networks:
        return
    fabric = config.fabrics.get(row.name)
    if fabric is None:
        message = f"there is no fabric for {row.name}; its GPUs would talk over TCP, at a fiftieth of the speed"
        hint = f"add fabrics: {{{row.name}: {{range: 192.168.0.0/16}}}}"
        yield Refusal((*path, "machine"), message, hint=hint)
        return
    if fabric.mode == "dranet":
        return
    for fault in network_faults(row, networks=fabric_networks(row)):
        yield Refusal((*path, "machine"), fault, hint="mend the row of the machine catalogue")
    first = next(
        (
            one
            for one in config.gpu_pools
            if one.machine == pool.machine and one.zone != pool.zone and row.fabric == "rdma"
        ),
        None,
    )
    if first is not None and config.gpu_pools.index(first) < config.gpu_pools.index(pool):
        message = (
            f"pools {first.name} and {pool.name} are in two zones; a RoCE network is in one, and a cluster has one"
        )
        hint = f"use zone {first.zone}, or a second region stack"
        yield Refusal((*path, "zone"), message, hint=hint, also=(("gpu_pools", config.gpu_pools.index(first), "zone"),))


def _reservations(config: RegionStack) -> Iterator[Refusal]:
    seen: dict[str, Path] = {}
    for index, one in enumerate(config.reservations):
        path: Path = ("reservations", index)
        yield from _machine((*path, "machine"), one.machine, gpus=True)
        yield from _zone((*path, "zone"), one.zone, config.region)
        parts = one.path.split("/")
        if len(parts) > 4:
            message = f"{one.path} is a part of a reservation; machines would be counted twice"
            hint = f"write {'/'.join(parts[:4])}; pools name the part"
            yield Refusal((*path, "path"), message, hint=hint)
        if one.create and parts[1] != config.project:
            message = f"cannot make a reservation in project {parts[1]} from a stack of project {config.project}"
            yield Refusal((*path, "create"), message, hint="remove create; its owner makes it", also=((*path, "path"),))
        if one.path in seen:
            yield Refusal((*path, "path"), f"{one.path} is given twice", hint="remove one", also=(seen[one.path],))
        seen.setdefault(one.path, (*path, "path"))


def _bindings(config: RegionStack) -> Iterator[Refusal]:
    """Pools against the reservations that they are bound to."""
    given = {one.path: (index, one) for index, one in enumerate(config.reservations)}
    wanted: dict[str, int] = {}
    bound = [(index, pool, pool.capacity.reserved) for index, pool in enumerate(config.gpu_pools)]
    for index, pool, part in bound:
        if part is None or pool.capacity.kind != "reservation":
            continue
        at: Path = ("gpu_pools", index, "capacity", "reservation")
        for other, before, taken in bound[:index]:
            if taken and before.capacity.kind == "reservation" and (taken.contains(part) or part.contains(taken)):
                message = f"pool {before.name} already uses {before.capacity.reservation}; one of the two stays empty"
                also = (("gpu_pools", other, "capacity", "reservation"),)
                yield Refusal(at, message, hint="use different blocks, or one pool with more nodes", also=also)
        if part.reservation not in given:
            message = f"{part.reservation} is not among reservations; its zone, size and maintenance are not known"
            hint = did_you_mean(part.reservation, given, noun="reservations") or "add it to reservations"
            yield Refusal(at, message, hint=hint)
            continue
        number, found = given[part.reservation]
        here: Path = ("reservations", number)
        if found.zone != pool.zone:
            message = (
                f"the reservation is in {found.zone} and pool {pool.name} in {pool.zone}; it would get no machines"
            )
            yield Refusal(("gpu_pools", index, "zone"), message, hint=f"write {found.zone}", also=((*here, "zone"),))
        if found.machine != pool.machine:
            message = f"the reservation holds {found.machine}, not {pool.machine}; it would get no machines"
            hint = f"write {found.machine}"
            yield Refusal(("gpu_pools", index, "machine"), message, hint=hint, also=((*here, "machine"),))
        wanted[found.path] = wanted.get(found.path, 0) + pool.nodes
        if wanted[found.path] > found.nodes:
            message = (
                f"pools want {wanted[found.path]} machines of a reservation of {found.nodes}; the rest never comes"
            )
            hint = f"lower nodes by {wanted[found.path] - found.nodes}"
            yield Refusal(("gpu_pools", index, "nodes"), message, hint=hint, also=((*here, "nodes"),))


def _fabrics(config: RegionStack) -> Iterator[Refusal]:
    modes = {one.mode for one in config.fabrics.values()}
    if len(modes) > 1:
        message = "one fabric is of mode device and another dranet; GKE allows only one of them in a cluster"
        yield Refusal(("fabrics",), message, hint="use one mode", key=True)
    yield from _shared_names(config)
    for name, one in config.fabrics.items():
        path: Path = ("fabrics", name)
        row = _row(name)
        if row is None or not row.extra_networks or name not in {pool.machine for pool in config.gpu_pools}:
            message = f"there is no pool of machine {name} with a fabric; its networks would use up quota for nothing"
            hint = did_you_mean(name, {pool.machine for pool in config.gpu_pools}, noun="machines of pools")
            yield Refusal(path, message, hint=hint or "remove it", key=True)
            continue
        if one.mode == "dranet":
            if one.range is not None:
                message = "GKE makes the networks of a dranet fabric; a range would be ignored"
                yield Refusal((*path, "range"), message, hint="remove range")
            continue
        if one.range is None:
            message = f"the fabric of {name} has no range; its subnets could not be made"
            yield Refusal((*path, "mode"), message, hint="add range: 192.168.0.0/16", key=True)
            continue
        yield from _fabric_size((*path, "range"), config, row, one.range)
        if one.mtu is not None and row.fabric in ("tcpx", "tcpxo") and one.mtu != row.fabric_mtu:
            message = (
                f"GPU networks of {name} need packets of {row.fabric_mtu}, not {one.mtu}; GPUDirect would not start"
            )
            yield Refusal((*path, "mtu"), message, hint="remove mtu")


def _shared_names(config: RegionStack) -> Iterator[Refusal]:
    """Network objects are known by name alone, so two fabrics of one cluster need names of their own."""
    taken: dict[str, str] = {}
    for machine_name, one in config.fabrics.items():
        row = _row(machine_name)
        names = [network.name for network in fabric_networks(row)] if row and one.mode == "device" else []
        others = dict.fromkeys(taken[name] for name in names if name in taken)
        for other in others:
            message = (
                f"the fabrics of {machine_name} and {other} both have networks called"
                f" {', '.join(name for name in names if taken.get(name) == other)}; a cluster has one Network object of"
                " a name, and pods of one machine would be given the other's networks"
            )
            hint = "bring one of the two machines up in another region's stack"
            yield Refusal(("fabrics", machine_name), message, hint=hint, also=(("fabrics", other),), key=True)
        taken |= dict.fromkeys(names, machine_name)


def _fabric_size(path: Path, config: RegionStack, row: Machine, cidr: str) -> Iterator[Refusal]:
    prefix = network_of(cidr).prefixlen + PARTS.bit_length() - 1
    nodes = sum(pool.nodes for pool in config.gpu_pools if pool.machine == row.name)
    room = max(0, 2 ** (32 - prefix) - 4) if prefix <= SMALLEST_SUBNET else 0
    if nodes > room:
        message = f"{cidr} is cut into {PARTS} subnets of {room} addresses, and there are {nodes} nodes of {row.name}"
        fitting = 32 - (nodes + 4 - 1).bit_length() - (PARTS.bit_length() - 1)
        yield Refusal(path, message, hint=f"take a range of at least /{min(fitting, SMALLEST_SUBNET - 4)}")


def _room(config: RegionStack) -> Iterator[Refusal]:
    """Nodes and pods against their ranges."""
    gpu_nodes = sum(pool.nodes + pool.upgrade.max_surge for pool in config.gpu_pools)
    nodes = config.cpu_pool.max_nodes + gpu_nodes
    if nodes > usable_hosts(config.network.nodes):
        message = (
            f"{config.network.nodes} has {usable_hosts(config.network.nodes)} addresses and pools have {nodes} nodes"
        )
        hint = f"take a range of at least /{32 - (nodes + 3).bit_length()}; a cluster keeps the one it was made with"
        yield Refusal(("network", "nodes"), message, hint=hint)
    nat = config.network.nat
    served = nat.addresses * (PORTS_PER_ADDRESS // nat.ports_per_node)
    if nodes > served:
        message = (
            f"{nat.addresses} NAT addresses have {nat.ports_per_node} ports each for {served} nodes, and pools have"
            f" {nodes}; the last nodes could reach nothing outside"
        )
        enough = -(-nodes // (PORTS_PER_ADDRESS // nat.ports_per_node))
        hint = f"write addresses: {enough}, or fewer ports_per_node"
        yield Refusal(("network", "nat", "addresses"), message, hint=hint, key=True)
    addresses = config.cpu_pool.max_nodes * _block(PODS_PER_CPU_NODE)
    addresses += sum(pool.nodes * _block(pool.max_pods_per_node) for pool in config.gpu_pools)
    size = network_of(config.network.pods).num_addresses
    if addresses > size:
        message = (
            f"{config.network.pods} has {size} addresses and the nodes' pods take {addresses}; the last nodes could not"
            " join"
        )
        hint = f"take a range of at least /{32 - (addresses - 1).bit_length()}"
        yield Refusal(("network", "pods"), message, hint=hint)


def _block(pods: int) -> int:
    """Addresses that a node takes: twice its pods, rounded up to a power of two."""
    return 1 << (2 * pods - 1).bit_length()
