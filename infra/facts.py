"""The region's outputs and the platform's configuration -> the facts of a cluster. Pure.

A region stack exports `RegionFacts` as plain data under one output (`REGION_OUTPUT`); the platform stack reads it, adds
what it installs, and publishes `spec.facts.ClusterFacts` as its own output and as a ConfigMap, the form that
`gkr clusters add` reads. A reader is lenient, so that an older platform reads a newer region; what is missing fails
here, with the name of the stack that should have said it and the command that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

from pydantic import ValidationError

from spec.base import Record
from spec.errors import ConfigError
from spec.facts import ClusterFacts, HostMount, MachinePool, SharedService, Site, SyncerPorts
from spec.machines import machine
from spec.stack_fabric import DeviceMode
from spec.stack_platform import PlatformStack

Said = TypeVar("Said", bound=Record)
"""What a stack says to those that build on it."""

REGION_OUTPUT = "facts"
"""Output of a region stack: `RegionFacts` as plain data."""
KUBECONFIG_OUTPUT = "kubeconfig"
"""Output of a region stack: how its cluster is reached; secret."""
PLATFORM_OUTPUT = "facts"
"""Output of a platform stack: `ClusterFacts` as plain data."""
SECRETS = "secrets"
"""Secret configuration of a platform stack: JSON of Kubernetes Secret to its keys and values. Optional."""
NEVER_UP = "it was never brought up, or has been taken down"
"""What is said of a stack that another one reads from and that says nothing; reviews know it by these words."""
NAMESPACE = "gkr-system"
NAME = "gkr-facts"
KEY = "facts.json"
"""Where `gkr` finds the facts in a cluster: this key of that ConfigMap."""


class AttachedNetwork(Record):
    """One network of a node pool besides the primary one."""

    name: str
    """Of its Network object, as pods name it."""
    network: str
    """VPC, by short name."""
    subnetwork: str
    """Subnet, by short name."""
    mode: DeviceMode


class RegionFabric(Record):
    """The networks that machines of one type talk over; none if GKE manages them."""

    machine: str
    """Row of the machine catalogue."""
    networks: list[AttachedNetwork] = []
    """In the order of its NICs."""


class RegionSyncer(Record):
    """How syncers of the region are reached."""

    control_port: int
    bulk_port: int
    host: str = ""
    """Address for pods of other regions; empty: none reach it."""
    reserved: bool = False
    """The address is one that the region stack reserved for this; the platform must bring its traffic to the syncer."""
    peers: list[str] = []
    """Address ranges of the other regions' pods."""


class RegionFacts(Record):
    """A region's part of the facts."""

    version: Literal[1] = 1
    name: str
    """Of the cluster."""
    region: str
    pools: list[MachinePool]
    """The CPU pool first. `nodes` can be asked for: the most of a pool that grows, none of an undelivered one."""
    bucket: str
    """URI of the region's bucket."""
    registry: str
    """Prefix of images given by name."""
    syncer: RegionSyncer | None = None
    fabrics: list[RegionFabric] = []
    managed_monitoring: bool = False
    """Google's managed collection runs in the cluster, with DCGM's metrics."""
    alert_channels: list[str] = []
    """Ids of who is told."""
    researchers: list[str] = []
    """Members who may launch in the namespaces of experiments."""
    queued: dict[str, int] = {}
    """Pools whose machines come only when a whole request is granted, to the seconds that they then stay."""

    def pool(self, name: str) -> MachinePool | None:
        """The pool of that name."""
        return next((one for one in self.pools if one.name == name), None)


def read_region(value: Mapping[str, Any] | None, *, stack: str) -> RegionFacts:
    """What a region stack exported; ConfigError names the stack and the command that makes it say the rest."""
    return read_output(RegionFacts, value, stack=stack, output=REGION_OUTPUT)


def read_output(model: type[Said], value: Mapping[str, Any] | None, *, stack: str, output: str) -> Said:
    """An output of the stack below, leniently: a newer writer may say more. What is missing is a ConfigError with the
    name of the stack that should have said it and the command that makes it.
    """
    remedy = f"run: make up STACK={stack}"
    if value is None:
        raise ConfigError(
            f"stack {stack} has no output {output}: {NEVER_UP}",
            hint=f"{remedy}, then this stack again",
            where=stack,
        )
    try:
        return model.model_validate(_whole_numbers(value), extra="ignore")
    except ValidationError as error:
        faults = [_fault(one["loc"], one["msg"], missing=one["type"] == "missing") for one in error.errors()]
        raise ConfigError(
            f"{output} of stack {stack} cannot be used: {'; '.join(faults)}",
            hint=f"{remedy} with this version of the repository, then this stack again",
            where=stack,
        ) from None


def cluster_facts(
    config: PlatformStack, *, region: RegionFacts, site: Site, services: Mapping[str, SharedService] | None = None
) -> ClusterFacts:
    """Everything that experiments are told about the cluster."""
    syncer = region.syncer
    return ClusterFacts(
        name=region.name,
        region=region.region,
        backend="kubernetes",
        pools=list(region.pools),
        bucket=region.bucket.rstrip("/"),
        registry=region.registry,
        queues=[queue.name for queue in config.kueue.queues],
        priorities=sorted(config.kueue.priorities, key=config.kueue.priorities.__getitem__),
        services=dict(services or {}),
        syncer=None
        if syncer is None
        else SyncerPorts(
            control_port=syncer.control_port, bulk_port=syncer.bulk_port, host=syncer.host, routed=syncer.reserved
        ),
        namespaces=list(config.namespaces),
        site=site,
    )


def site_of(config: PlatformStack, *, region: RegionFacts, environment: Mapping[str, str]) -> Site:
    """What every pod of an experiment gets. `$NAME` in image and paths is taken from the environment."""
    given = config.site
    mounts: dict[str, HostMount] = {}
    for one in given.mounts:
        path = expand(one.mount_path, environment=environment)
        # Two names of one folder, as $PYTHON may be /usr: a pod cannot mount it twice.
        mounts.setdefault(
            path,
            HostMount(
                name=one.name,
                host_path=expand(one.host_path, environment=environment),
                mount_path=path,
                read_only=one.read_only,
            ),
        )
    placed = config.kueue.topology and any(machine(pool.machine).gpus for pool in region.pools)
    return Site(
        image=expand(given.image, environment=environment),
        bucket_env=dict(given.bucket_env),
        bucket_secret=given.bucket_secret,
        mounts=list(mounts.values()),
        service_account=given.service_account,
        cpu_request_share=given.cpu_request_share,
        topology_level=config.kueue.placement_level if placed else "",
        image_pull_secrets=list(given.image_pull_secrets),
    )


def full_image(image: str, *, registry: str) -> str:
    """The reference of an image that is given by name in the cluster's registry or in full."""
    return image if not image or "/" in image or not registry else f"{registry.rstrip('/')}/{image}"


def expand(text: str, *, environment: Mapping[str, str]) -> str:
    """`$NAME` replaced by the environment's value: what differs between machines is not written down."""

    def value(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in environment:
            raise ConfigError(f"{text} names ${name}, which is not set", hint=f"set {name} in the environment")
        return environment[name]

    return re.sub(r"\$(?P<name>[A-Za-z_][A-Za-z0-9_]*)", value, text)


def config_map(facts: ClusterFacts) -> dict[str, Any]:
    """Where `gkr` looks for the facts of a cluster."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "data": {KEY: facts.model_dump_json(indent=2)},
    }


def _fault(path: tuple[str | int, ...], message: str, *, missing: bool) -> str:
    where = ".".join(str(part) for part in path)
    return f"field {where} is missing" if missing else f"field {where}: {message[:1].lower()}{message[1:]}"


def _whole_numbers(value: Any) -> Any:
    """The engine carries every number as a float; 8.0 is 8 again."""
    if isinstance(value, Mapping):
        return {key: _whole_numbers(one) for key, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_whole_numbers(one) for one in cast("list[Any]", value)]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
