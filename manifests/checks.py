"""What cannot be rendered, said before anything is created. Raises ConfigError with the numbers and the remedy."""

from __future__ import annotations

from collections import Counter
from typing import Any

from manifests import fabric, names
from spec.errors import ConfigError
from spec.machines import Machine, machine
from spec.plan import LearnerPlan, Plan
from spec.stack_pods import pod_faults
from spec.units import format_bytes

MOST_WORKER_GROUPS = 7
"""Of a RayJob under Kueue 0.17, whose Workload holds 8 pod sets; the head is one."""
LARGEST_CONFIG_MAP = 2**20
"""Bytes of all its data; the API server refuses more."""


def check_plan(plan: Plan) -> None:
    """The plan as a whole."""
    if plan.backend != "kubernetes":
        raise ConfigError(
            f"run {plan.run} is planned for the local backend, which has no Kubernetes objects",
            hint="name a cluster: --cluster NAME",
        )
    for learner in plan.learners:
        _check_learner(learner)
    syncer = plan.syncer
    if syncer is not None and not (syncer.image and syncer.name and syncer.control_port and syncer.bulk_port):
        raise ConfigError(
            f"the plan of run {plan.run} says too little about its syncer: it needs image, name and both ports",
            hint="make the plan anew with `gkr plan`",
        )


def _check_learner(learner: LearnerPlan) -> None:
    if not learner.image:
        raise ConfigError(f"learner {learner.name} has no image", hint="add image: trainer")
    if not learner.queue:
        # A job without the label would run outside of every quota, or never, depending on Kueue's settings.
        raise ConfigError(f"learner {learner.name} has no queue in cluster {learner.cluster}", hint="add queue: NAME")
    services = names.private_services(learner)
    groups = [*learner.groups, *(names.service_group(one) for one in services)]
    if len(groups) > MOST_WORKER_GROUPS:
        raise ConfigError(
            f"learner {learner.name} has {len(learner.groups)} groups and {len(services)} private services, together "
            f"{len(groups)}; one job holds at most {MOST_WORKER_GROUPS}",
            hint="merge equal groups, share services, or put services with another learner (learner: NAME)",
        )
    for name, count in Counter(groups).items():
        if count > 1 or name == names.HEAD:
            raise ConfigError(
                f'learner {learner.name} has a group called "{name}", which is also the name of '
                f"{'the head' if name == names.HEAD else 'the pods of a service'}",
                hint="rename the group, for example trainer",
            )
    for group in learner.groups:
        _check_group(learner, group)


def _check_group(learner: LearnerPlan, group: str) -> None:
    """One pod template per group: all nodes alike, and able to reach each other."""
    nodes = learner.group(group)
    shapes = {node.model_copy(update={"name": ""}).write_json() for node in nodes}
    if len(shapes) > 1:
        raise ConfigError(
            f"group {group} of learner {learner.name} has nodes of {len(shapes)} shapes",
            hint="make the plan anew with `gkr plan`",
        )
    row = machine(nodes[0].machine)
    if nodes[0].gpus and len(learner.nodes) > 1 and not fabric.is_built(row):
        raise ConfigError(
            f"{len(learner.nodes)} nodes of learner {learner.name} would have to talk over {row.name}'s fabric "
            f"{row.fabric}, which is not built; over plain TCP they would train at a small part of the speed",
            hint="use one node, or another GPU type",
        )


def check_pod(template: dict[str, Any], *, row: Machine) -> None:
    """A pod on a whole machine as its fabric needs it: a wrong one starts all the same, and trains over TCP."""
    faults = pod_faults(template, row=row, ray_container=names.RAY_CONTAINER)
    if faults:
        raise ConfigError(
            f"pods of {row.name} would not reach each other's GPUs: {'; '.join(faults)}",
            hint="mend manifests/pods.py or manifests/fabric.py, which made the pod",
        )


def check_size(manifest: dict[str, Any]) -> None:
    """A ConfigMap within what the API server takes."""
    sizes = {name: len(text.encode()) for name, text in manifest["data"].items()}
    total = sum(sizes.values()) + sum(len(name.encode()) for name in sizes)
    if total <= LARGEST_CONFIG_MAP:
        return
    largest, size = max(sizes.items(), key=lambda one: one[1])
    raise ConfigError(
        f"the files of ConfigMap {manifest['metadata']['name']} have {total} bytes, {total - LARGEST_CONFIG_MAP} more "
        f"than the {format_bytes(LARGEST_CONFIG_MAP)} ({LARGEST_CONFIG_MAP} bytes) that one holds; the largest is "
        f"{largest} with {size}",
        hint="put long scripts into code: and call them from run:" if largest == "run.sh" else "use fewer nodes",
    )
