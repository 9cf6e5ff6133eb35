"""The syncer's objects, in the cluster and namespace of the first learner.

A Job, because it ends when the run has ended; it may restart as often as it must, for its state is in the bucket. It
carries no queue label: it must run while learners still wait for theirs, and never be preempted apart from them.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from manifests import containers, labels, names, placing, pods, scripts, support, values
from spec.plan import Plan, SyncerPlan

MOST_RESTARTS = 100
"""Kubelet waits up to five minutes between two; a syncer that never comes up ends with the Job."""


def config_map(plan: Plan, syncer: SyncerPlan) -> dict[str, Any]:
    """Files of /gkr/plan."""
    data = {"plan.json": labels.plan_json(plan), "syncer.sh": scripts.SYNCER}
    return support.config_map(_metadata(plan, syncer), data)


def service_account(plan: Plan, syncer: SyncerPlan) -> dict[str, Any]:
    """Where the site has none for pods."""
    return support.service_account(_metadata(plan, syncer))


def network_policy(plan: Plan, syncer: SyncerPlan) -> dict[str, Any]:
    """Into the syncer's two ports: pods of the run in any namespace; learners of other clusters come by address, which
    no label can name.
    """
    ports = [{"port": port, "protocol": "TCP"} for port in (syncer.control_port, syncer.bulk_port)]
    rule: dict[str, Any] = {"ports": ports}
    if not syncer.outer_host:
        rule["from"] = [{"namespaceSelector": {}, "podSelector": {"matchLabels": labels.selector(plan)}}]
    return support.network_policy(
        _metadata(plan, syncer), selector=labels.selector(plan, role=names.SYNCER), ingress=[rule]
    )


def service(plan: Plan, syncer: SyncerPlan) -> dict[str, Any]:
    """Its name is the address that learners of the same cluster have in their plan."""
    spec: dict[str, Any] = {
        "ports": [
            {"name": name, "port": port, "protocol": "TCP", "targetPort": port}
            for name, port in (("bulk", syncer.bulk_port), ("control", syncer.control_port))
        ],
        "selector": labels.selector(plan, role=names.SYNCER),
    }
    if _is_address(syncer.outer_host) and not syncer.outer_routed:  # a name is somebody else's to route
        spec["externalIPs"] = [syncer.outer_host]
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(plan, syncer), "spec": spec}


def job(plan: Plan, syncer: SyncerPlan) -> dict[str, Any]:
    """The process."""
    site = plan.home.site
    container: dict[str, Any] = {
        "name": names.SYNCER_CONTAINER,
        "image": syncer.image,
        "command": ["bash", f"{names.PLAN_DIR}/syncer.sh"],
        "env": containers.syncer_environment(site),
        "ports": [
            {"name": "bulk", "containerPort": syncer.bulk_port},
            {"name": "control", "containerPort": syncer.control_port},
        ],
        "envFrom": values.env_from([site.bucket_secret]),
        "readinessProbe": {"tcpSocket": {"port": "control"}, "initialDelaySeconds": 1, "periodSeconds": 1},
        "resources": containers.resources(syncer.cpu * site.cpu_request_share, syncer.memory),
        "securityContext": containers.HARDENED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": containers.mounts(site, code=False, keys=True),
    }
    spec = pods.pod_spec(
        plan,
        site_pull_secrets=site.image_pull_secrets,
        account=site.service_account or syncer.name,
        containers=[container],
        volumes=containers.volumes(site, config_map=syncer.name, code=False, keys=True),
        affinity=placing.off_gpus(),
        secrets=True,
    )
    spec["restartPolicy"] = "OnFailure"
    metadata = {
        "annotations": labels.plan_annotations(plan),
        "labels": {
            **labels.labels(plan, role=names.SYNCER, group=names.SYNCER),
            **(labels.OUTER if syncer.outer_host else {}),
        },
    }
    deadline = plan.timeouts.queue + plan.timeouts.start + plan.timeouts.run
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(plan, syncer),
        "spec": {
            "activeDeadlineSeconds": values.seconds(deadline),
            "backoffLimit": MOST_RESTARTS,
            "template": {"metadata": metadata, "spec": dict(sorted(spec.items()))},
        },
    }


def _metadata(plan: Plan, syncer: SyncerPlan) -> dict[str, Any]:
    return support.metadata(plan, syncer.name, namespace=syncer.namespace)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
