"""Labels and annotations of every object, by one function, because `gkr` finds what belongs to a run by them alone."""

from __future__ import annotations

import hashlib

from spec.plan import LearnerPlan, Plan

EXPERIMENT = "gkr/experiment"
RUN = "gkr/run"
LEARNER = "gkr/learner"
ROLE = "gkr/role"
GROUP = "gkr/group"
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "gkr"
PLAN_SHA256 = "gkr/plan-sha256"
"""Annotation: digest of the plan.json that the objects were rendered from."""
EXPERIMENTS = {"gkr/managed": "true"}
"""Labels of the namespaces that experiments run in."""
OUTER = {"gkr/outer": "true"}
"""Labels of the pod of a syncer that learners of other clusters use; a cluster has one address for them."""
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"


def labels(plan: Plan, *, learner: LearnerPlan | None = None, role: str = "", group: str = "") -> dict[str, str]:
    """Labels of an object; of a pod when it has a role. Those of the syncer name no learner."""
    found = {EXPERIMENT: plan.experiment, RUN: plan.run, MANAGED_BY: MANAGER}
    if learner is not None:
        found[LEARNER] = learner.name
    if role:
        found[ROLE] = role
    if group:
        found[GROUP] = group
    return dict(sorted(found.items()))


def selector(plan: Plan, *, learner: LearnerPlan | None = None, role: str = "") -> dict[str, str]:
    """What selects the pods of a run, of one learner or of one role in it."""
    found = labels(plan, learner=learner, role=role)
    return {key: value for key, value in found.items() if key in {RUN, LEARNER, ROLE}}


def plan_annotations(plan: Plan) -> dict[str, str]:
    """Annotations of an object."""
    return {PLAN_SHA256: hashlib.sha256(plan_json(plan).encode()).hexdigest()}


def plan_json(plan: Plan) -> str:
    """The plan as pods read it."""
    return plan.write_json()
