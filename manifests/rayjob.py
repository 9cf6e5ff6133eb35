"""The RayJob of a learner: KubeRay starts its Ray cluster when Kueue admits it, and ends it with the job.

Rules of the pinned versions (KubeRay 1.6.0, Kueue 0.17.0) that it keeps:

- HTTPMode: the operator submits over HTTP, so there is no submitter pod to pay for, and a new head gets the job again.
- Retries are ours: backoffLimit 0, and each driver replays the run's events.
- Kueue refuses a job that does not shut its cluster down, and counts it as finished when the job ends: with a longer
  ttl GPUs would stay held while their quota is free. No deletion rules, which exclude both.
- No autoscaling; worker groups say replicas, min and max, and all are equal.
- Both deadlines count from the start that follows admission: Kueue's suspension clears the start time, so waiting in
  the queue is not part of them.
- `suspend` is not set: Kueue sets and clears it, and an object that is applied again must not stop a running job.
"""

from __future__ import annotations

import json
from typing import Any

from manifests import labels, names, pods, values
from spec.names import group_resource, service_resource
from spec.plan import LearnerPlan, Plan

API_VERSION = "ray.io/v1"
RAY_VERSION = "2.60.0"
"""Of the images. From 2.53 on KubeRay probes liveness over HTTP, which needs no wget in the image."""


def rayjob(plan: Plan, *, learner: LearnerPlan) -> dict[str, Any]:
    """The learner."""
    own = labels.labels(plan, learner=learner)
    queue = {labels.QUEUE: str(learner.queue), labels.PRIORITY: plan.priority}
    return {
        "apiVersion": API_VERSION,
        "kind": "RayJob",
        "metadata": {
            "annotations": labels.plan_annotations(plan),
            "labels": dict(sorted({**own, **queue}.items())),
            "name": learner.job,
            "namespace": learner.namespace,
        },
        "spec": {
            "activeDeadlineSeconds": values.seconds(plan.timeouts.run),
            "backoffLimit": 0,
            "entrypoint": f"bash {names.PLAN_DIR}/driver.sh",
            "preRunningDeadlineSeconds": values.seconds(plan.timeouts.start),
            "rayClusterSpec": cluster_spec(plan, learner=learner),
            "shutdownAfterJobFinishes": True,
            "submissionMode": "HTTPMode",
            "ttlSecondsAfterFinished": 0,
        },
    }


def cluster_spec(
    plan: Plan, *, learner: LearnerPlan, head: dict[str, Any] | None = None, ray_version: str = RAY_VERSION
) -> dict[str, Any]:
    """The Ray cluster: one worker group per group of nodes and per private service. `head`: another head's template."""
    groups = [_trainer_group(plan, learner, group) for group in learner.groups]
    groups += [
        _group(
            names.service_group(one),
            replicas=one.replicas,
            params=_worker_params(one.cpu, gpus=one.gpus, resource=service_resource(one.name)),
            template=pods.service(plan, learner=learner, service=one),
        )
        for one in names.private_services(learner)
    ]
    head_params = {
        "dashboard-host": "0.0.0.0",  # noqa: S104 (the operator asks from outside; who may is in the network policy)
        "num-cpus": "0",  # nothing but the driver runs on the head
        "num-gpus": "0",
        "object-store-memory": str(pods.OBJECT_STORE),
    }
    return {
        # Ray's dashboard and its control service run any code for whoever reaches them. KubeRay makes the token.
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": head_params, "template": head or pods.head(plan, learner=learner)},
        "rayVersion": ray_version,
        "workerGroupSpecs": groups,
    }


def _trainer_group(plan: Plan, learner: LearnerPlan, group: str) -> dict[str, Any]:
    nodes = learner.group(group)
    first = nodes[0]
    return _group(
        group,
        replicas=len(nodes),
        params=_worker_params(first.cpu, gpus=first.gpus, resource=group_resource(group)),
        template=pods.trainer(plan, learner=learner, node=first),
    )


def _worker_params(cores: float, *, gpus: int, resource: str) -> dict[str, str]:
    # KubeRay pastes each parameter into the `ray start` line, which bash reads: hence the quotes around the JSON.
    return {
        "num-cpus": pods.ray_cores(cores),
        "num-gpus": str(gpus),
        "object-store-memory": str(pods.OBJECT_STORE),
        "resources": f"'{json.dumps({resource: 1})}'",
    }


def _group(name: str, *, replicas: int, params: dict[str, str], template: dict[str, Any]) -> dict[str, Any]:
    return {
        "groupName": name,
        "maxReplicas": replicas,
        "minReplicas": replicas,
        "numOfHosts": 1,
        "rayStartParams": params,
        "replicas": replicas,
        "template": template,
    }
