"""What can be wrong between stacks that are each fine.

Paths of refusals begin with the stack's name. Regions share an environment's network through its global stack and know
nothing of each other, so whatever two of them could both claim (addresses, reservations, names) is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from spec.machines import machine
from spec.nodes import Path
from spec.problems import did_you_mean
from spec.refusals import Refusal
from spec.stack_checks import cluster_ranges
from spec.stack_fabric import vpcs
from spec.stack_global import GlobalStack
from spec.stack_platform import PlatformStack
from spec.stack_region import RegionStack
from spec.stack_values import ReservationPath, network_of

Stacks = Mapping[str, GlobalStack | RegionStack | PlatformStack]


def check_all(stacks: Stacks) -> list[Refusal]:
    """All findings between the stacks, by name."""
    regions = {name: one for name, one in stacks.items() if isinstance(one, RegionStack)}
    return [
        *_references(stacks),
        *_ranges(stacks, regions),
        *_reservations(regions),
        *_unique(stacks, regions),
        *_quota(stacks, regions),
        *_syncers(regions),
        *_on_global(stacks, regions),
        *_on_region(stacks),
    ]


def _references(stacks: Stacks) -> Iterator[Refusal]:
    for name, config in stacks.items():
        if isinstance(config, RegionStack):
            field, target, kind = "global_stack", config.global_stack, GlobalStack
        elif isinstance(config, PlatformStack):
            field, target, kind = "region_stack", config.region_stack, RegionStack
        else:
            continue
        if target not in stacks:
            names = [other for other, one in stacks.items() if isinstance(one, kind)]
            message = f"there is no stack {target}; {name} could not read its outputs"
            hint = did_you_mean(target, names, noun="stacks") or f"add stacks/Pulumi.{target}.yaml"
            yield Refusal((name, field), message, hint=hint)
        elif not isinstance(stacks[target], kind):
            message = f"{target} is a {stacks[target].kind} stack; it has no outputs of that kind"
            yield Refusal((name, field), message, hint="name the stack below this one")


def _ranges(stacks: Stacks, regions: Mapping[str, RegionStack]) -> Iterator[Refusal]:
    """Nodes, pods and services of all regions of one network, its own ranges, and every cluster's fabrics."""
    for (first, one), (second, two) in combinations(regions.items(), 2):
        if one.global_stack != two.global_stack:
            continue
        for path, cidr in _primary(two).items():
            for other, taken in _primary(one).items():
                if network_of(cidr).overlaps(network_of(taken)):
                    message = f"{cidr} overlaps {taken} of {first}; both are in one network and neither could be routed"
                    yield Refusal((second, *path), message, hint="take a free range", also=((first, *other),))
    for name, config in regions.items():
        shared = stacks.get(config.global_stack)
        if not isinstance(shared, GlobalStack):
            continue
        whole = network_of(shared.network.pods)
        home: Path = (config.global_stack, "network", "pods")
        if not network_of(config.network.pods).subnet_of(whole):
            message = f"{config.network.pods} is outside {whole}; syncers of other regions would not admit these pods"
            yield Refusal((name, "network", "pods"), message, hint=f"take a free range in {whole}", also=(home,))
        for path, cidr in cluster_ranges(config).items():
            if path != ("network", "pods") and network_of(cidr).overlaps(whole):
                message = f"{cidr} overlaps {whole}, which is kept for pods"
                yield Refusal((name, *path), message, hint="take a free range", also=(home,))
            access = shared.network.services_access
            if access and network_of(cidr).overlaps(network_of(access)):
                message = f"{cidr} overlaps {access}, which is kept for file systems; nodes could not reach them"
                also = ((config.global_stack, "network", "services_access"),)
                yield Refusal((name, *path), message, hint="take a free range", also=also)
        yield from _fabrics_and_primary(name, config, regions)


def _fabrics_and_primary(name: str, config: RegionStack, regions: Mapping[str, RegionStack]) -> Iterator[Refusal]:
    """A fabric may use the ranges of another cluster's fabric, but not those that its own pods have to reach."""
    for machine_name, fabric in config.fabrics.items():
        for other, two in regions.items():
            if fabric.range is None or other == name or two.global_stack != config.global_stack:
                continue
            for path, cidr in _primary(two).items():
                if network_of(fabric.range).overlaps(network_of(cidr)):
                    message = (
                        f"{fabric.range} overlaps {cidr} of {other}; pods with this fabric could not reach that region"
                    )
                    at: Path = (name, "fabrics", machine_name, "range")
                    yield Refusal(at, message, hint="take a free range", also=((other, *path),))


def _primary(config: RegionStack) -> dict[Path, str]:
    return {path: cidr for path, cidr in cluster_ranges(config).items() if path[0] == "network"}


def _reservations(regions: Mapping[str, RegionStack]) -> Iterator[Refusal]:
    """Within one stack the stack's own check has looked already."""
    used: list[tuple[Path, ReservationPath, str]] = []
    for name, config in regions.items():
        for index, pool in enumerate(config.gpu_pools):
            part = pool.capacity.reserved
            if part is None:
                continue
            path: Path = (name, "gpu_pools", index, "capacity", "reservation")
            for other, taken, text in used:
                if other[0] != name and (taken.contains(part) or part.contains(taken)):
                    message = f"{other[0]} already uses {text}; machines go to whoever asks first"
                    hint = "use another block or another reservation"
                    yield Refusal(path, message, hint=hint, also=(other,))
            used.append((path, part, str(pool.capacity.reservation)))


def _unique(stacks: Stacks, regions: Mapping[str, RegionStack]) -> Iterator[Refusal]:
    """Names that can exist once: clusters by which experiments choose, buckets, which the whole world shares, and the
    networks of one project.
    """
    names: dict[tuple[str, str], Path] = {}
    entries: list[tuple[str, str, Path]] = [
        ("cluster", one.cluster.name, (name, "cluster", "name")) for name, one in regions.items()
    ]
    for name, one in stacks.items():
        if isinstance(one, RegionStack):
            entries.append(("bucket", one.bucket.name, (name, "bucket", "name")))
        if not isinstance(one, PlatformStack):
            for index, bucket in enumerate(one.buckets):
                entries.append(("bucket", bucket.name, (name, "buckets", index, "name")))
        if isinstance(one, GlobalStack):
            entries.append(("network", f"{one.project}/{one.network.name}", (name, "network", "name")))
    for kind, text, path in entries:
        taken = names.setdefault((kind, text), path)
        if taken[0] != path[0]:
            message = f'{kind} "{text}" is also in {taken[0]}; '
            message += "experiments could not tell them apart" if kind == "cluster" else "the second could not be made"
            yield Refusal(path, message, hint="give it another name", also=(taken,))


def _quota(stacks: Stacks, regions: Mapping[str, RegionStack]) -> Iterator[Refusal]:
    """The quota is a project's, which environments may share."""
    environments = {name: one for name, one in stacks.items() if isinstance(one, GlobalStack)}
    for name, shared in environments.items():
        primary = sum(one.project == shared.project for one in environments.values())
        parts = {
            region: sum(vpcs(machine(row)) for row, one in config.fabrics.items() if one.mode == "device")
            for region, config in regions.items()
            if config.project == shared.project
        }
        total = primary + sum(parts.values())
        if total > shared.network.networks_quota:
            shown = ", ".join(f"{region} {count}" for region, count in parts.items() if count)
            message = (
                f"stacks of project {shared.project} need {total} networks (primary {primary}, {shown}) and it may have"
                f" {shared.network.networks_quota}; the last cluster's fabric could not be made"
            )
            hint = "ask for more of the quota NETWORKS, then write here what was granted"
            yield Refusal((name, "network", "networks_quota"), message, hint=hint)


def _syncers(regions: Mapping[str, RegionStack]) -> Iterator[Refusal]:
    """A learner knows one pair of ports, wherever its syncer runs."""
    first: dict[str, tuple[str, RegionStack]] = {}
    for name, config in regions.items():
        if config.syncer.mode == "none":
            continue
        other, one = first.setdefault(config.global_stack, (name, config))
        for field in ("control_port", "bulk_port"):
            mine, theirs = getattr(config.syncer, field), getattr(one.syncer, field)
            if mine != theirs:
                message = (
                    f"{field} is {mine} here and {theirs} in {other}; the firewall would drop the sync between them"
                )
                yield Refusal(
                    (name, "syncer", field), message, hint=f"write {theirs}", also=((other, "syncer", field),)
                )


def _on_global(stacks: Stacks, regions: Mapping[str, RegionStack]) -> Iterator[Refusal]:
    for name, config in regions.items():
        shared = stacks.get(config.global_stack)
        if not isinstance(shared, GlobalStack):
            continue
        if config.project != shared.project:
            message = (
                f"project is {config.project} and the network is in {shared.project}; all of a node's networks must"
            )
            message += " be in one project"
            also = ((config.global_stack, "project"),)
            yield Refusal((name, "project"), message, hint=f"write {shared.project}", also=also)
        if config.lustre and not shared.network.services_access:
            message = f"{config.global_stack} has no range for private services access; no file system could be made"
            hint = f"add network.services_access to stacks/Pulumi.{config.global_stack}.yaml"
            yield Refusal((name, "lustre"), message, hint=hint, key=True)
        yield from _services_on(name, config, shared)


def needed_services(config: RegionStack) -> dict[str, Path]:
    """Services without which a region cannot do what it is configured to, and what asks for each."""
    addons = config.cluster.addons
    streaming = next((index for index, pool in enumerate(config.gpu_pools) if pool.image_streaming), None)
    asked: dict[str, Path | None] = {
        "artifactregistry": ("registry",),
        "compute": ("network",),
        "container": ("cluster",),
        "containerfilesystem": ("cpu_pool",) if streaming is None else ("gpu_pools", streaming, "image_streaming"),
        "file": ("cluster", "addons", "filestore") if addons.filestore else None,
        "gkehub": ("cluster", "fleet") if config.cluster.fleet else None,
        "lustre": ("lustre",) if config.lustre else None,
        "servicenetworking": ("lustre",) if config.lustre else None,
        "storage": ("bucket",),
    }
    return {f"{name}.googleapis.com": path for name, path in asked.items() if path is not None}


def _services_on(name: str, config: RegionStack, shared: GlobalStack) -> Iterator[Refusal]:
    for service, path in needed_services(config).items():
        if service not in shared.apis:
            message = f"{config.global_stack} does not switch on {service}, which this needs; it would fail, or be slow"
            also = ((config.global_stack, "apis"),)
            yield Refusal((name, *path), message, hint=f"add {service} to apis, or leave apis out", key=True, also=also)


def _on_region(stacks: Stacks) -> Iterator[Refusal]:
    for name, config in stacks.items():
        below = stacks.get(config.region_stack) if isinstance(config, PlatformStack) else None
        if isinstance(config, PlatformStack) and isinstance(below, RegionStack):
            yield from _project(name, config, below)
            yield from _queues(name, config, below)
            yield from _installers(name, config, below)
            yield from _managed_fabric(config.region_stack, below)
            yield from _services(name, config, below)


def _project(name: str, config: PlatformStack, below: RegionStack) -> Iterator[Refusal]:
    if config.project != below.project:
        message = (
            f"project is {config.project} and the cluster is in {below.project}; pods would have no identity there"
        )
        also = ((config.region_stack, "project"),)
        yield Refusal((name, "project"), message, hint=f"write {below.project}", also=also)


def _queues(name: str, config: PlatformStack, below: RegionStack) -> Iterator[Refusal]:
    pools = {below.cpu_pool.name: below.cpu_pool.max_nodes} | {one.name: one.nodes for one in below.gpu_pools}
    given = dict.fromkeys(pools, 0)
    for index, queue in enumerate(config.kueue.queues):
        for field, nodes in (("nodes", queue.nodes), ("borrow_nodes", queue.borrow_nodes)):
            for pool, count in nodes.items():
                path: Path = (name, "kueue", "queues", index, field, pool)
                if pool not in pools:
                    message = f'{config.region_stack} has no pool "{pool}"; nothing could be handed out from it'
                    yield Refusal(path, message, hint=did_you_mean(pool, pools, noun="pools"), key=True)
                elif field == "nodes":
                    given[pool] += count
                    if given[pool] > pools[pool]:
                        message = (
                            f"queues hand out {given[pool]} nodes of pool {pool}, which has {pools[pool]}; admitted"
                            " experiments would wait for machines that do not exist"
                        )
                        yield Refusal(path, message, hint=f"write {max(0, count - given[pool] + pools[pool])}")
    if below.gpu_pools and not any(given[one.name] for one in below.gpu_pools):
        message = f"no queue hands out nodes with GPUs of {config.region_stack}; they would stand idle"
        hint = f"add nodes: {{{below.gpu_pools[0].name}: {below.gpu_pools[0].nodes}}} to a queue"
        yield Refusal((name, "kueue", "queues"), message, hint=hint, key=True)


def _installers(name: str, config: PlatformStack, below: RegionStack) -> Iterator[Refusal]:
    needs = {"tcpxo": ("tcpxo_plugin", "nri_injector"), "rdma": ("gib_plugin",)}
    for row in dict.fromkeys(pool.row for pool in below.gpu_pools if pool.machine in below.fabrics):
        for field in needs.get(row.fabric, ()):
            if getattr(config.installers, field) is None:
                message = (
                    f"{config.region_stack} has {row.name}, and there is no installer {field}; GPUs would talk over TCP"
                )
                yield Refusal((name, "installers"), message, hint=f"add installers.{field}: an image", key=True)


def _managed_fabric(name: str, below: RegionStack) -> Iterator[Refusal]:
    """Pods are rendered for Network objects; with GKE's managed DRANET they would have to claim devices instead."""
    for machine_name, fabric in below.fabrics.items():
        if fabric.mode == "dranet":
            message = (
                f"pods for {machine_name} name Network objects, which a dranet fabric has none of; none would start"
            )
            hint = "write a range in place of mode: dranet, until pods claim devices"
            yield Refusal((name, "fabrics", machine_name, "mode"), message, hint=hint)


def _services(name: str, config: PlatformStack, below: RegionStack) -> Iterator[Refusal]:
    gpus = {pool.row.gpu for pool in below.gpu_pools}
    for service, one in (config.shared.services if config.shared else {}).items():
        wanted = one.resources.gpu.partition(":")[0] if one.resources.gpu else ""
        if wanted and wanted not in gpus:
            message = (
                f"service {service} wants {wanted}, which {config.region_stack} does not have; it would never start"
            )
            hint = f"GPUs there: {', '.join(sorted(str(gpu) for gpu in gpus)) or 'none'}"
            yield Refusal((name, "shared", "services", service, "resources", "gpu"), message, hint=hint)
