"""A plan's objects by cluster. Pure: the same plan gives the same objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from manifests import checks, rayjob, support, syncer
from spec.plan import LearnerPlan, Plan

APPLY_ORDER = (
    "ServiceAccount", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "Job", "RayJob", "RayCluster",
)  # fmt: skip
"""What a job needs is there before the job; the syncer starts before the learners that ask for it."""


def render(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """Cluster name -> its objects in the order in which they are applied; ConfigError for what cannot be rendered."""
    checks.check_plan(plan)
    found: dict[str, list[dict[str, Any]]] = {}
    for learner in plan.learners:
        found.setdefault(learner.cluster, []).extend(learner_objects(plan, learner))
    if plan.syncer is not None:
        found.setdefault(plan.syncer.cluster, []).extend(syncer_objects(plan))
    return {cluster: in_apply_order(objects) for cluster, objects in found.items()}


def learner_objects(plan: Plan, learner: LearnerPlan) -> list[dict[str, Any]]:
    """Objects of one learner."""
    checks.check_plan(plan)
    files = support.learner_config_map(plan, learner)
    checks.check_size(files)
    objects = [
        files,
        support.learner_network_policy(plan, learner),
        support.disruption_budget(plan, learner),
        rayjob.rayjob(plan, learner=learner),
    ]
    if not learner.site.service_account:
        own = support.metadata(plan, learner.job, namespace=learner.namespace, learner=learner)
        objects.append(support.service_account(own))
    return in_apply_order(objects)


def syncer_objects(plan: Plan) -> list[dict[str, Any]]:
    """Objects of the syncer; none if the experiment has none."""
    checks.check_plan(plan)
    if plan.syncer is None:
        return []
    files = syncer.config_map(plan, plan.syncer)
    checks.check_size(files)
    objects = [
        files,
        syncer.network_policy(plan, plan.syncer),
        syncer.service(plan, plan.syncer),
        syncer.job(plan, plan.syncer),
    ]
    if not plan.home.site.service_account:
        objects.append(syncer.service_account(plan, plan.syncer))
    return in_apply_order(objects)


def in_apply_order(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind, then namespace and name; plain values that share nothing, so that a caller may change them."""
    ordered = sorted(
        objects,
        key=lambda one: (APPLY_ORDER.index(one["kind"]), one["metadata"]["namespace"], one["metadata"]["name"]),
    )
    return json.loads(json.dumps(ordered))
