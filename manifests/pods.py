"""Pod templates of a learner's Ray cluster: head, trainer nodes, service replicas.

They differ in four things only (who they are, what they ask for, where they may run, their fabric); the rest is made in
one place. The container's command is ours: KubeRay leaves the `ray start` it would have run in a variable, and start.sh
runs it after setting up what every process of the pod must inherit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from manifests import checks, containers, fabric, labels, names, placing, values
from spec.machines import machine, machine_of_gpu
from spec.plan import LearnerPlan, NodePlan, Plan, ServicePlan

RAY_MEMORY = 512 * 2**20
"""What Ray's own processes take beside a replica, or beside a node that is not a whole machine."""
KEYS_GROUP = 1000
OBJECT_STORE = 80 * 2**20
"""Ray's shared memory; nothing but control messages goes through Ray, and it accepts no less than 75 MiB."""
SPARE_SHM = 48 * 2**20
FETCH_MEMORY = 512 * 2**20
"""Of the init container that fetches and unpacks the code."""
HEAD_MEMORY = 2 * 2**30
HEAD_MEMORY_PER_POD = 16 * 2**20
"""Of the head for each pod that joins. A margin, not a measurement: the dashboard keeps the state of every node."""
PODS_PER_HEAD_CORE = 128
_READINESS = {
    "httpGet": {"path": "/api/healthz", "port": names.AGENT_PORT},
    "initialDelaySeconds": 1,
    "periodSeconds": 2,
    "timeoutSeconds": 5,
    "failureThreshold": 10,
}
"""KubeRay's own starts after 10 s and asks every 5 s: a third of the time from admission to the first step."""


@dataclass(frozen=True, kw_only=True)
class _Wants:
    """What one kind of pod asks for."""

    role: str
    group: str
    cores: float
    memory: int
    shm: int
    gpus: int = 0
    affinity: dict[str, Any]
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    fabric: fabric.PodFabric = field(default_factory=fabric.PodFabric)
    ports: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def head(plan: Plan, *, learner: LearnerPlan, cores: float | None = None, memory: int | None = None) -> dict[str, Any]:
    """The head: Ray's control service, its dashboard and the driver. On a CPU node, and it grows with the cluster where
    its size is not given.
    """
    joining = pod_count(learner) - 1
    ports = {"client": 10001, "dashboard": names.DASHBOARD_PORT, "gcs-server": 6379, "metrics": 8080}
    wants = _Wants(
        role=names.HEAD,
        group=names.HEAD,
        cores=cores if cores is not None else 1.0 + joining // PODS_PER_HEAD_CORE,
        memory=memory if memory is not None else HEAD_MEMORY + HEAD_MEMORY_PER_POD * joining,
        shm=OBJECT_STORE + SPARE_SHM,
        affinity=placing.off_gpus(),
        ports=[{"name": name, "containerPort": port} for name, port in ports.items()],
    )
    return _template(plan, learner, wants)


def trainer(plan: Plan, *, learner: LearnerPlan, node: NodePlan) -> dict[str, Any]:
    """One node of a group: agent, ranks and loader workers."""
    row = machine(node.machine)
    gpus = row.accelerator if node.gpus else ""
    wants = _Wants(
        role=names.TRAINER,
        group=node.group,
        cores=node.cpu,
        # Of a real machine the plan may give away all there is, so Ray's share is inside; a stand-in's is beside it.
        memory=node.memory + (RAY_MEMORY if row.oversubscribable else 0),
        shm=node.shm + OBJECT_STORE,
        gpus=node.gpus,
        affinity=placing.on_gpus(gpus) if gpus else placing.on_machine(row),
        annotations=placing.topology(learner.site, together=True) if gpus else {},
        fabric=fabric.pod_fabric(row, gpus=node.gpus),
    )
    template = _template(plan, learner, wants)
    if wants.fabric.annotations:
        checks.check_pod(template, row=row)
    return template


def service(plan: Plan, *, learner: LearnerPlan, service: ServicePlan) -> dict[str, Any]:
    """One replica of a private service."""
    row = machine_of_gpu(service.gpu) if service.gpu else None
    wants = _Wants(
        role=names.SERVICE,
        group=names.service_group(service),
        cores=service.cpu,
        memory=service.memory + RAY_MEMORY,
        shm=OBJECT_STORE + SPARE_SHM,
        gpus=service.gpus,
        affinity=placing.on_gpus(row.accelerator) if row else placing.off_gpus(),
        annotations=placing.topology(learner.site, together=False) if row else {},
        ports=[{"name": names.METRICS_PORT_NAME, "containerPort": names.METRICS_PORT}],
    )
    return _template(plan, learner, wants)


def pod_count(learner: LearnerPlan) -> int:
    """Pods of a learner, the head included."""
    return 1 + len(learner.nodes) + sum(one.replicas for one in names.private_services(learner))


def ray_cores(cores: float) -> str:
    """Cores as Ray counts them: whole ones, enough for what the pod was planned for, whatever share it requests."""
    return str(max(1, math.ceil(cores)))


def _template(plan: Plan, learner: LearnerPlan, wants: _Wants) -> dict[str, Any]:
    site, code = learner.site, plan.code is not None
    shm_mount, shm_volume = containers.shared_memory(wants.shm)
    fetching, keys, secret = containers.mounts(site, code=code), plan.has_keys, names.shared_secret(learner)
    mounts = containers.mounts(site, code=code, keys=keys, shared_secret=secret)
    container: dict[str, Any] = {
        "name": names.RAY_CONTAINER,
        "image": learner.image,
        "command": ["bash", f"{names.PLAN_DIR}/start.sh"],
        "env": containers.environment(
            plan, learner=learner, role=wants.role, group=wants.group, gpus=wants.gpus, more=wants.fabric.env
        ),
        "envFrom": containers.secrets(plan, site),
        "readinessProbe": _READINESS,
        "resources": containers.resources(
            wants.cores * site.cpu_request_share, wants.memory, gpus=wants.gpus, gpu_resource=placing.GPU_RESOURCE
        ),
        "securityContext": containers.HARDENED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _by_path([*mounts, shm_mount, *wants.fabric.mounts]),
    }
    if wants.ports:
        container["ports"] = wants.ports
    if code:
        container["workingDir"] = names.CODE_DIR
    init = [_fetch_code(learner, fetching)] if code else []
    spec = pod_spec(
        plan,
        site_pull_secrets=site.image_pull_secrets,
        account=names.account(learner),
        containers=[container],
        volumes=[
            *containers.volumes(site, config_map=learner.job, code=code, keys=keys, shared_secret=secret),
            shm_volume,
            *wants.fabric.volumes,
        ],
        affinity=wants.affinity,
        secrets=keys or bool(secret),
    )
    spec["restartPolicy"] = "Always"
    if init or wants.fabric.sidecars:
        spec["initContainers"] = [*wants.fabric.sidecars, *init]
    if wants.gpus:
        spec["tolerations"] = list(placing.GPU_TOLERATIONS)
    notes = {
        **labels.plan_annotations(plan),
        **wants.annotations,
        **wants.fabric.annotations,
        "ray.io/overwrite-container-cmd": "true",
    }
    metadata = {
        "annotations": dict(sorted(notes.items())),
        "labels": labels.labels(plan, learner=learner, role=wants.role, group=wants.group),
    }
    return {"metadata": metadata, "spec": dict(sorted(spec.items()))}


def pod_spec(
    plan: Plan,
    *,
    site_pull_secrets: list[str],
    account: str,
    containers: list[dict[str, Any]],
    volumes: list[dict[str, Any]],
    affinity: dict[str, Any],
    secrets: bool,
) -> dict[str, Any]:
    """What all pods of a run have in common; also the syncer's. `secrets`: files of some are mounted."""
    spec: dict[str, Any] = {
        "affinity": affinity,
        # Nothing in a pod talks to the API server.
        "automountServiceAccountToken": False,
        "containers": containers,
        # Else every service of the namespace becomes seven variables in every process.
        "enableServiceLinks": False,
        "serviceAccountName": account,
        "terminationGracePeriodSeconds": values.seconds(plan.timeouts.grace),
        "volumes": sorted(volumes, key=lambda one: one["name"]),
    }
    if secrets:
        # Images bring their own user, and files of a Secret are root's: through this group, whose number means nothing,
        # the processes of the pod, and they only, may read its keys.
        spec["securityContext"] = {"fsGroup": KEYS_GROUP}
    if site_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in site_pull_secrets]
    return spec


def _fetch_code(learner: LearnerPlan, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": "code",
        "image": learner.image,
        "command": ["python", "-m", "training.fetch_code"],
        "env": containers.fetch_environment(learner),
        "envFrom": values.env_from([learner.site.bucket_secret]),
        "resources": containers.resources(0.1, FETCH_MEMORY),
        "securityContext": containers.HARDENED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _by_path(mounts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(mounts, key=lambda one: one["mountPath"])
