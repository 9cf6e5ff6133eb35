"""The platform's shared services: a long-lived Ray cluster that experiments of one cluster use together.

To the pod builders it is a run that never ends, of one learner without nodes: its plan says what the host in its head
starts, as it does for a learner's private services. Differences: each replica is a service of its own there, in a
worker group of its own behind a Service of its own, so that it has an address that outlives it; and it listens on a
port that is known before it starts. No queue label: what these pods hold is taken out of the queues' quotas instead
(`holdings`), so that they neither wait behind the experiments that need them nor are preempted by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manifests import labels, names, placing, pods, rayjob, render, scripts, support
from spec.errors import ConfigError
from spec.facts import SharedService, Site
from spec.machines import parse_gpu
from spec.names import LONGEST_POD_PREFIX
from spec.plan import LearnerPlan, Plan, ServicePlan
from spec.service_placement import DEFAULT_CPU, DEFAULT_MEMORY, MOST_QUEUE_BYTES, SHARED_CLIENTS, model_of, queue_share
from spec.services import ServiceConfig
from spec.units import parse_bytes, parse_cpu

NAME = "shared"
"""Of the Ray cluster, of its plan's only learner, and the start of every Service's name."""
FIRST_PORT = "GKR_FIRST_PORT"
"""Environment variable of the head: the first replica's port."""


@dataclass(frozen=True, kw_only=True)
class HeadState:
    """Where the head keeps its state, so that its restart does not restart every pod."""

    address: str
    """HOST:PORT of a Redis."""
    password_secret: str = ""
    """Secret of the namespace with the key `password`; empty: no password."""


@dataclass(frozen=True, kw_only=True)
class SharedServices:
    """What one cluster shares."""

    cluster: str
    region: str
    namespace: str
    image: str
    bucket: str
    """URI of the region's bucket: logs lie under services/<cluster> in it."""
    services: Mapping[str, ServiceConfig]
    site: Site = field(default_factory=Site)
    manifest: str = ""
    """URI of the dataset that replicas load before they answer; empty: they load what a call names."""
    first_port: int
    """Port of the first replica; the others follow in the order of their names."""
    ray_version: str = rayjob.RAY_VERSION
    head_cores: float
    head_memory: int
    head_state: HeadState | None = None
    token_secret: str = ""
    """Secret of the namespace, and of those of experiments, with the key `token`; empty: none is needed."""


def shared_plan(shared: SharedServices) -> Plan:
    """The plan that the host in the head reads."""
    replicas = [
        _replica(name, service, index=index, bucket=shared.bucket, secret=shared.token_secret)
        for name, service in sorted(shared.services.items())
        for index in range(service.replicas)
    ]
    uri = f"{shared.bucket.rstrip('/')}/services/{shared.cluster}"
    learner = LearnerPlan(
        name=NAME, cluster=shared.cluster, region=shared.region, gpu=None, nodes=[], world_size=0, services=replicas,
        data_manifest=shared.manifest, checkpoints="", job=NAME, image=shared.image, namespace=shared.namespace,
        run_uri=uri, site=shared.site,
    )  # fmt: skip
    env = {FIRST_PORT: str(shared.first_port)}
    return Plan(experiment=NAME, run=NAME, backend="kubernetes", image=shared.image, learners=[learner], env=env)


def ports(shared: SharedServices) -> dict[str, int]:
    """Replica to the port where it listens; the host counts in the same order."""
    replicas = shared_plan(shared).home.services
    return {one.name: shared.first_port + index for index, one in enumerate(replicas)}


def endpoints(shared: SharedServices) -> dict[str, SharedService]:
    """Where pods of the cluster find the services: what the facts say."""
    port = ports(shared)
    return {
        name: SharedService(
            kind=service.kind,
            endpoints=[
                f"tcp://{_service_name(replica)}.{shared.namespace}.svc.cluster.local:{port[replica]}"
                for replica in (f"{name}-{index}" for index in range(service.replicas))
            ],
            secret=shared.token_secret,
        )
        for name, service in sorted(shared.services.items())
    }


def shared_objects(shared: SharedServices) -> list[dict[str, Any]]:
    """All objects, in the order in which they are applied; none if nothing is shared."""
    if not shared.services:
        return []
    plan = shared_plan(shared)
    learner = plan.home
    _check(shared, learner)
    objects = [
        _config_map(plan, learner),
        _network_policy(plan, learner, shared=shared),
        *(_service(plan, learner, replica, port=port) for replica, port in ports(shared).items()),
        _ray_cluster(plan, learner, shared=shared),
    ]
    if not shared.site.service_account:
        objects.append(support.service_account(_metadata(plan, learner, NAME)))
    return render.in_apply_order(objects)


def holdings(shared: SharedServices) -> dict[str, dict[str, float]]:
    """GPU type (empty: without) to what the pods hold of cpu (cores), memory (bytes) and GPUs, as they request it."""
    if not shared.services:
        return {}
    plan = shared_plan(shared)
    learner = plan.home
    templates = [("", _head(plan, learner, shared=shared))]
    templates += [(one.gpu or "", pods.service(plan, learner=learner, service=one)) for one in learner.services]
    found: dict[str, dict[str, float]] = {}
    for gpu, template in templates:
        held = found.setdefault(gpu, {"cpu": 0.0, "memory": 0.0, placing.GPU_RESOURCE: 0.0})
        requests: dict[str, str] = template["spec"]["containers"][0]["resources"]["requests"]
        held["cpu"] += parse_cpu(requests["cpu"])
        held["memory"] += int(requests["memory"]) if requests["memory"].isdecimal() else parse_bytes(requests["memory"])
        held[placing.GPU_RESOURCE] += int(requests.get(placing.GPU_RESOURCE, "0"))
    return found


def _replica(name: str, service: ServiceConfig, *, index: int, bucket: str, secret: str) -> ServicePlan:
    asked = service.resources
    gpu = parse_gpu(asked.gpu) if asked.gpu else None
    memory = asked.memory if asked.memory is not None else DEFAULT_MEMORY
    share = min(MOST_QUEUE_BYTES, queue_share(memory, clients=SHARED_CLIENTS))
    return ServicePlan(
        name=f"{name}-{index}", answers_to=name, kind=service.kind, replicas=1,
        cpu=asked.cpu if asked.cpu is not None else DEFAULT_CPU, memory=memory,
        gpus=gpu.count if gpu else 0, gpu=gpu.gpu if gpu else None,
        queue_depth=service.queue_depth, max_batch=service.max_batch,
        queue_bytes=service.queue_bytes or share, max_delay_ms=service.max_delay_ms,
        model=model_of(service, bucket=bucket), shared_secret=secret,
    )  # fmt: skip


def _check(shared: SharedServices, learner: LearnerPlan) -> None:
    for one in learner.services:
        prefix = f"{learner.job}-{names.service_group(one)}"
        if len(prefix) > LONGEST_POD_PREFIX:
            raise ConfigError(
                f"pods of shared service {one.name} would be called {prefix}, {len(prefix) - LONGEST_POD_PREFIX} "
                f"characters more than the {LONGEST_POD_PREFIX} that KubeRay keeps",
                hint="give the service a shorter name",
            )
    last = shared.first_port + len(learner.services) - 1
    if last > 65535:
        raise ConfigError(
            f"{len(learner.services)} replicas from port {shared.first_port} on would need port {last}",
            hint="a lower first_port",
        )


def _head(plan: Plan, learner: LearnerPlan, *, shared: SharedServices) -> dict[str, Any]:
    return pods.head(plan, learner=learner, cores=shared.head_cores, memory=shared.head_memory)


def _ray_cluster(plan: Plan, learner: LearnerPlan, *, shared: SharedServices) -> dict[str, Any]:
    """The same pods as a learner's private services, under a head that starts them."""
    head = _head(plan, learner, shared=shared)
    spec = rayjob.cluster_spec(plan, learner=learner, head=head, ray_version=shared.ray_version)
    if shared.head_state is not None:
        state: dict[str, Any] = {"redisAddress": shared.head_state.address}
        if shared.head_state.password_secret:
            key = {"key": "password", "name": shared.head_state.password_secret}
            state["redisPassword"] = {"valueFrom": {"secretKeyRef": key}}
        spec["gcsFaultToleranceOptions"] = state
    # Without it KubeRay leaves the pods of a changed cluster as they are: a new image would never start.
    spec["upgradeStrategy"] = {"type": "Recreate"}
    return {
        "apiVersion": rayjob.API_VERSION,
        "kind": "RayCluster",
        "metadata": _metadata(plan, learner, learner.job),
        "spec": dict(sorted(spec.items())),
    }


def _config_map(plan: Plan, learner: LearnerPlan) -> dict[str, Any]:
    """Files of /gkr/plan. Not immutable: a platform's services change under the same name."""
    data = {"head.sh": scripts.SHARED_HEAD, "plan.json": labels.plan_json(plan), "start.sh": scripts.SHARED_START}
    found = support.config_map(_metadata(plan, learner, learner.job), data)
    del found["immutable"]
    return found


def _service(plan: Plan, learner: LearnerPlan, replica: str, *, port: int) -> dict[str, Any]:
    """One replica's address."""
    [one] = [service for service in learner.services if service.name == replica]
    wanted = {**labels.selector(plan, learner=learner), labels.GROUP: names.service_group(one)}
    spec = {
        "ports": [{"name": "requests", "port": port, "protocol": "TCP", "targetPort": port}],
        "selector": dict(sorted(wanted.items())),
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan, learner, _service_name(replica)),
        "spec": spec,
    }


def _network_policy(plan: Plan, learner: LearnerPlan, *, shared: SharedServices) -> dict[str, Any]:
    """As a learner's; besides, pods of experiments reach the replicas' ports and nothing else."""
    found = support.learner_network_policy(plan, learner)
    experiments = {"namespaceSelector": {"matchLabels": dict(labels.EXPERIMENTS)}}
    opened = [{"port": port, "protocol": "TCP"} for port in sorted(ports(shared).values())]
    found["spec"]["ingress"].append({"from": [experiments], "ports": opened})
    return found


def _service_name(replica: str) -> str:
    return f"{NAME}-{replica}"


def _metadata(plan: Plan, learner: LearnerPlan, name: str) -> dict[str, Any]:
    return support.metadata(plan, name, namespace=learner.namespace, learner=learner)
