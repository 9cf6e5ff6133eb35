"""What can be wrong with one stack's configuration whatever the other stacks say.

Pure; every finding is a `Refusal` that says what the value would cause and what to write instead, and none stops the
others. Rules for machines and their networks are in stack_pool_checks.py, between stacks in stack_cross_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from spec.checks import SECRET_ENV
from spec.nodes import Path
from spec.problems import RemedyError
from spec.refusals import Refusal
from spec.stack_common import Bucket
from spec.stack_global import GlobalStack
from spec.stack_platform import PlatformStack
from spec.stack_pool_checks import check_pools
from spec.stack_region import RegionStack
from spec.stack_values import StackName, network_of, parse_stack_name

LARGEST_ACCESS_PREFIX = 22
"""Private services access needs at least a range of this length."""
LUSTRE_FASTEST, LUSTRE_STEP = 1000, 9_000
"""MB/s for each TiB, and the GiB in whose multiples that is sold; half the speed comes in steps of twice the size."""
ROLLING_DAYS = 32
LEAST_HOURS = 48
"""Hours that maintenance windows must leave in any so many days."""


def check_stack(config: GlobalStack | RegionStack | PlatformStack, *, name: str = "") -> list[Refusal]:
    """All findings; those about the stack's name only when it is given."""
    found: list[Refusal] = []
    if isinstance(config, GlobalStack):
        found.extend(_global(config))
    elif isinstance(config, RegionStack):
        found.extend(_region(config))
    else:
        found.extend(_platform(config))
    return [*(_name(config, name) if name else ()), *found]


def _name(config: GlobalStack | RegionStack | PlatformStack, text: str) -> Iterator[Refusal]:
    try:
        name = parse_stack_name(text)
    except RemedyError as error:
        yield Refusal(("kind",), str(error), hint=error.hint)
        return
    if config.kind != name.kind:
        message = f"kind is {config.kind}, but the stack {text} is by its name a {name.kind} stack"
        yield Refusal(("kind",), message, hint=f"write kind: {name.kind}, or rename the file")
        return
    if isinstance(config, RegionStack):
        if config.region != name.region:
            message = f"region is {config.region}, but the stack is called {text}; another region would be changed"
            yield Refusal(("region",), message, hint=f"write region: {name.region}, or rename the file")
        yield from _refers_to(("global_stack",), config.global_stack, StackName(name.environment, "", "global"))
    if isinstance(config, PlatformStack):
        wanted = StackName(name.environment, name.region, "region")
        yield from _refers_to(("region_stack",), config.region_stack, wanted)


def _refers_to(path: Path, written: str, wanted: StackName) -> Iterator[Refusal]:
    if written != str(wanted):
        message = f"refers to {written}; a stack builds only on the one below it, and this would read another's outputs"
        yield Refusal(path, message, hint=f"write {wanted}")


def _global(config: GlobalStack) -> Iterator[Refusal]:
    network = config.network
    if network.services_access:
        access = network_of(network.services_access)
        if access.prefixlen > LARGEST_ACCESS_PREFIX:
            message = f"{network.services_access} is too small; file systems could not be made"
            yield Refusal(("network", "services_access"), message, hint=f"take at least a /{LARGEST_ACCESS_PREFIX}")
        if access.overlaps(network_of(network.pods)):
            message = f"{network.services_access} overlaps the range of pods {network.pods}; neither could be routed"
            yield Refusal(
                ("network", "services_access"), message, hint="take a free range", also=(("network", "pods"),)
            )
    for path, index, twice in (
        *_twice(("apis",), config.apis), *_twice(("buckets",), [one.name for one in config.buckets]),
        *_twice(("registries",), [one.name for one in config.registries]),
    ):  # fmt: skip
        yield Refusal((*path, index), f"{twice} is given twice; the second could not be made", hint="remove one")
    for index, one in enumerate(config.buckets):
        yield from _bucket(("buckets", index), one, has_region=False)
    for index, one in enumerate(config.registries):
        if not one.location:
            message = f"registry {one.name} has no location, and a global stack has no region to take it from"
            yield Refusal(("registries", index, "location"), message, hint="write location: us, or a region", key=True)
    for role in ("researchers", "operators", "previewers"):
        for index, member in enumerate(getattr(config.identity, role)):
            yield from _member(("identity", role, index), member)
    yield from _researchers(config)
    if config.budget:
        for index, part in enumerate(config.budget.thresholds):
            if not 0 < part <= 10:
                message = f"{part} is not a part of the amount; the alert would never be sent"
                yield Refusal(("budget", "thresholds", index), message, hint="write 0.8 for 80 percent")


def _member(path: Path, member: str) -> Iterator[Refusal]:
    kind, _, rest = member.partition(":")
    if member in ("allUsers", "allAuthenticatedUsers"):
        message = f"{member} would give the role to everybody on the internet"
        yield Refusal(path, message, hint="name a group, such as group:research@example.com")
    elif kind not in ("group", "user", "serviceAccount", "principal", "principalSet", "domain") or not rest:
        message = f'"{member}" is not a member; the cloud would refuse the whole binding'
        yield Refusal(path, message, hint="write KIND:NAME, such as group:research@example.com")


def _researchers(config: GlobalStack) -> Iterator[Refusal]:
    """They are named in every cluster too, which knows fewer kinds of member, and groups of one domain only."""
    first = ""
    for index, member in enumerate(config.identity.researchers):
        path: Path = ("identity", "researchers", index)
        kind, _, name = member.partition(":")
        if kind == "domain":
            message = f"{member} cannot be given rights in a cluster; nobody of it could launch"
            yield Refusal(path, message, hint=f"name a group, such as group:research@{name}")
        if kind == "group":
            domain = name.partition("@")[2]
            first = first or domain
            if domain != first:
                message = (
                    f"group {name} is of another domain than {first}; a cluster resolves groups of one domain, and"
                    " nobody of it could launch"
                )
                yield Refusal(path, message, hint=f"put its members into a group of {first}")


def _bucket(path: Path, bucket: Bucket, *, has_region: bool) -> Iterator[Refusal]:
    name = bucket.name
    if not bucket.location and not has_region:
        message = f"bucket {name} has no location, and a global stack has no region to take it from"
        yield Refusal((*path, "location"), message, hint="write location: us, or a region", key=True)
    if bucket.hierarchical_namespace and len(bucket.data_locations) == 2:
        message = f"bucket {name} has folders and two regions; whether that works together is not known"
        hint = "write hierarchical_namespace: false"
        yield Refusal((*path, "data_locations"), message, hint=hint, key=True)
    if bucket.hierarchical_namespace and bucket.versioning:
        message = f"bucket {name} has folders and versions; the cloud makes no such bucket"
        yield Refusal((*path, "versioning"), message, hint="choose one of the two")
    if bucket.storage_class == "RAPID" and (len(bucket.data_locations) != 1 or not bucket.hierarchical_namespace):
        message = f"bucket {name} is RAPID, which is in one zone and has folders; the cloud would refuse it"
        hint = "write data_locations: [ZONE] and hierarchical_namespace: true"
        yield Refusal((*path, "storage_class"), message, hint=hint)


def _region(config: RegionStack) -> Iterator[Refusal]:
    yield from _ranges(config)
    yield from check_pools(config)
    yield from _control_plane(config)
    yield from _maintenance(config)
    buckets = [config.bucket, *config.buckets]
    for index, one in enumerate(buckets):
        path: Path = ("buckets", index - 1) if index else ("bucket",)
        yield from _bucket(path, one, has_region=True)
        if one.name in [before.name for before in buckets[:index]]:
            yield Refusal((*path, "name"), f"bucket {one.name} is given twice", hint="remove one")
    if config.bucket.location.lower() not in ("", config.region):
        message = f"the region's bucket is in {config.bucket.location}; checkpoints would leave the region, at a price"
        yield Refusal(("bucket", "location"), message, hint=f"leave it out, or write {config.region}")
    yield from _lustre(config)
    syncer = config.syncer
    if syncer.control_port == syncer.bulk_port:
        message = f"control_port and bulk_port are both {syncer.bulk_port}; the syncer could listen on one of them only"
        also = (("syncer", "control_port"),)
        yield Refusal(("syncer", "bulk_port"), message, hint=f"write {syncer.bulk_port + 1}", also=also)


def _ranges(config: RegionStack) -> Iterator[Refusal]:
    """No two ranges of one cluster may overlap, those of its fabrics included."""
    ranges = cluster_ranges(config)
    for (first, one), (second, two) in combinations(ranges.items(), 2):
        if network_of(one).overlaps(network_of(two)):
            message = f"{two} overlaps {one}; packets for one would go to the other"
            yield Refusal(second, message, hint="take a free range", also=(first,))


def cluster_ranges(config: RegionStack) -> dict[Path, str]:
    """Every address range of a cluster by its path."""
    network = config.network
    own: dict[Path, str] = {
        ("network", "nodes"): network.nodes,
        ("network", "pods"): network.pods,
        ("network", "services"): network.services,
    }
    return own | {("fabrics", name, "range"): one.range for name, one in config.fabrics.items() if one.range}


def _maintenance(config: RegionStack) -> Iterator[Refusal]:
    """GKE refuses a policy that leaves it too little time."""
    maintenance = config.cluster.maintenance
    hours = maintenance.window_hours * windows(maintenance.recurrence)
    if hours < LEAST_HOURS:
        message = (
            f"windows of {maintenance.window_hours} hours with {maintenance.recurrence} leave {hours:.0f} hours in"
            f" {ROLLING_DAYS} days for maintenance; GKE wants {LEAST_HOURS}, and the cluster would be refused"
        )
        path: Path = ("cluster", "maintenance")
        yield Refusal(path, message, hint="more days or longer windows, such as FREQ=WEEKLY;BYDAY=SA,SU", key=True)


def windows(recurrence: str) -> float:
    """Windows in the days that GKE looks at, of a rule such as FREQ=WEEKLY;BYDAY=SA,SU."""
    rule = dict(part.split("=", 1) for part in recurrence.split(";") if "=" in part)
    days = len(rule["BYDAY"].split(",")) if "BYDAY" in rule else (7 if rule.get("FREQ") == "DAILY" else 1)
    interval = rule.get("INTERVAL", "1")
    return ROLLING_DAYS / 7 * days / max(1, int(interval) if interval.isdecimal() else 1)


def _control_plane(config: RegionStack) -> Iterator[Refusal]:
    cluster = config.cluster
    if not cluster.external_access and not cluster.authorized_ranges:
        message = "nobody could reach the control plane: no access from outside and no authorized range"
        hint = "write external_access: true, or list the ranges of your own network"
        yield Refusal(("cluster", "external_access"), message, hint=hint)
    for index, one in enumerate(cluster.authorized_ranges):
        if network_of(one).prefixlen == 0:
            message = f"{one} is the whole internet; anybody could try the control plane"
            yield Refusal(("cluster", "authorized_ranges", index), message, hint="list your own ranges")


def _lustre(config: RegionStack) -> Iterator[Refusal]:
    if config.lustre and not config.cluster.addons.lustre:
        message = "the cluster has no driver for Lustre; no pod could mount it"
        yield Refusal(("lustre",), message, hint="write cluster.addons.lustre: true", key=True)
    zones = {pool.zone for pool in config.gpu_pools}
    for index, one in enumerate(config.lustre):
        if zones and one.zone not in zones:
            message = f"file system {one.name} is in {one.zone} and the GPUs are in {', '.join(sorted(zones))}"
            hint = "put it in the GPUs' zone; reads across zones are slow and paid for"
            yield Refusal(("lustre", index, "zone"), message, hint=hint)
        step = LUSTRE_STEP * LUSTRE_FASTEST // one.throughput
        if one.capacity_gib % step:
            message = f"{one.capacity_gib} GiB cannot be had at {one.throughput} MB/s for each TiB; it would be refused"
            below = one.capacity_gib // step * step
            hint = f"write {f'{below} or ' if below else ''}{below + step}: a multiple of {step}, never less afterwards"
            yield Refusal(("lustre", index, "capacity_gib"), message, hint=hint)


def _platform(config: PlatformStack) -> Iterator[Refusal]:
    kueue = config.kueue
    if kueue.topology and kueue.topology_levels[-1:] != ["kubernetes.io/hostname"]:
        message = "the last topology level is not the node; Kueue could not place pods on nodes"
        hint = "end with kubernetes.io/hostname"
        yield Refusal(("kueue", "topology_levels"), message, hint=hint, key=True)
    if kueue.topology and kueue.placement_level not in kueue.topology_levels:
        message = f"{kueue.placement_level} is not a topology level; every group would wait forever"
        hint = f"write one of {', '.join(kueue.topology_levels)}"
        yield Refusal(("kueue", "placement_level"), message, hint=hint, also=(("kueue", "topology_levels"),))
    for path, index, twice in (
        *_twice(("kueue", "queues"), [one.name for one in kueue.queues]), *_twice(("namespaces",), config.namespaces),
        *_twice(("site", "mounts"), [one.name for one in config.site.mounts]),
    ):  # fmt: skip
        yield Refusal((*path, index), f"{twice} is given twice; the second would replace the first", hint="remove one")
    for index, queue in enumerate(kueue.queues):
        if queue.borrow_nodes and not queue.cohort:
            message = f"queue {queue.name} may borrow but is in no cohort, so nobody lends to it"
            hint = "write cohort: NAME in this queue and in those that lend"
            yield Refusal(("kueue", "queues", index, "borrow_nodes"), message, hint=hint, key=True)
        for field, nodes in (("nodes", queue.nodes), ("borrow_nodes", queue.borrow_nodes)):
            for pool, count in nodes.items():
                if count < 0:
                    message = f"{count} nodes cannot be handed out"
                    yield Refusal(("kueue", "queues", index, field, pool), message, hint="write 0 or more")
    for missing in sorted({"low", "normal", "high"} - set(kueue.priorities)):
        message = f'there is no priority "{missing}"; experiments that ask for it would be refused'
        yield Refusal(("kueue", "priorities"), message, hint=f"add {missing}: a number", key=True)
    if len(set(kueue.priorities.values())) < len(kueue.priorities):
        message = "two priorities have the same number; one would not go before the other"
        yield Refusal(("kueue", "priorities"), message, hint="give each its own number", key=True)
    for key in config.site.bucket_env:
        if SECRET_ENV.fullmatch(key):
            message = f"{key} looks like a secret; facts are readable by everybody who launches"
            hint = "put it into the Kubernetes secret that bucket_secret names"
            yield Refusal(("site", "bucket_env", key), message, hint=hint, key=True)
    yield from _shared(config)


def _shared(config: PlatformStack) -> Iterator[Refusal]:
    if config.shared is None:
        return
    for name, service in config.shared.services.items():
        if service.learner is not None or service.shared:
            message = f"service {name} belongs to the platform; learner and shared are an experiment's to say"
            yield Refusal(("shared", "services", name), message, hint="remove learner and shared", key=True)


def _twice(path: Path, names: Iterable[str]) -> Iterator[tuple[Path, int, str]]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield path, index, name
        seen.add(name)
