"""Names and paths that objects, `gkr` and the processes in pods agree on."""

from __future__ import annotations

from spec.names import SERVICE_GROUP
from spec.plan import LearnerPlan, ServicePlan

PLAN_DIR = "/gkr/plan"
RUN_DIR = "/gkr/run"
CODE_DIR = "/gkr/code"
KEYS_DIR = "/gkr/keys"
"""What proves to syncer and learners that they are of one run (`spec.sync_keys`)."""
SHARED_KEYS_DIR = "/gkr/shared-keys"
"""What proves to shared services and their clients that they belong to one cluster's platform."""
PLAN_PATH = f"{PLAN_DIR}/plan.json"

RAY_CONTAINER = "ray"
"""First container of every Ray pod: KubeRay demands that place, and GKE gives RDMA devices to that container only."""
SYNCER_CONTAINER = "syncer"

HEAD = "head"
TRAINER = "trainer"
SERVICE = "service"
SYNCER = "syncer"
"""Roles of pods."""

OPERATOR_NAMESPACE = "kuberay-system"
DASHBOARD_PORT = 8265
AGENT_PORT = 52365
"""Ray's dashboard agent, on every node: answers health checks."""
METRICS_PORT = 9464
"""A replica's own metrics; what Ray tells of a pod has another port."""
METRICS_PORT_NAME = "svc-metrics"
"""Collection asks for ports by name, which only pods with a replica have."""


def env_secret(learner: LearnerPlan) -> str:
    """Secret with the variables taken from the caller's environment; `gkr` makes it, pods refer to it."""
    return f"{learner.job}-env"


def keys_secret(owner: str) -> str:
    """Secret with the keys of a learner's pods, by its job, or of the syncer, by its name; `gkr` makes it."""
    return f"{owner}-keys"


def shared_secret(learner: LearnerPlan) -> str:
    """Secret with the token of the platform's services; empty: the learner needs none."""
    return next((one.shared_secret for one in learner.services if one.shared_secret), "")


def service_group(service: ServicePlan) -> str:
    """Worker group of a private service."""
    return f"{SERVICE_GROUP}{service.name}"


def private_services(learner: LearnerPlan) -> list[ServicePlan]:
    """Those that run in the learner's own Ray cluster; the others are the platform's."""
    return [service for service in learner.services if not service.shared_endpoints]


def account(learner: LearnerPlan) -> str:
    """Service account of a learner's pods."""
    return learner.site.service_account or learner.job
