"""Environment, mounts and volumes of the containers of a run, in one place: what a process finds is the same in all."""

from __future__ import annotations

from typing import Any

from manifests import names, values
from spec.facts import Site
from spec.plan import LearnerPlan, Plan
from spec.services import METRICS_PORT
from spec.sync_keys import ENVIRONMENT, SHARED_ENVIRONMENT

_FIELDS = {"GKR_POD": "metadata.name", "GKR_POD_IP": "status.podIP", "GKR_POD_NODE": "spec.nodeName"}
_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # How long a raylet whose head is gone waits for it. A new head is a new Ray cluster, so waiting only delays the
    # pod's restart, which joins the new one; shorter than a busy head may pause would restart pods for nothing.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    # Ray gives its own processes 30 s to start, too short where many pods start on one busy machine.
    "RAY_raylet_start_wait_time_s": "120",
}
"""What a person's `env` may override."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Pods without GPUs share a machine; a thread per core of it in each of them would only slow all down."""


def environment(
    plan: Plan, *, learner: LearnerPlan, role: str, group: str, gpus: int, more: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """`env` of a learner's pod. A person's variables win over defaults and over the site's, GKR's own over all."""
    own = {"GKR_LEARNER": learner.name, **_own(role, group)}
    if plan.code is not None:
        own["GKR_CODE_DIR"] = names.CODE_DIR
    if plan.has_keys:
        own[ENVIRONMENT] = names.KEYS_DIR
    if names.shared_secret(learner):
        own[SHARED_ENVIRONMENT] = names.SHARED_KEYS_DIR
    if role == names.SERVICE:
        own[METRICS_PORT] = f"{names.METRICS_PORT}"
    threads = {} if gpus else _ONE_THREAD
    literals = {**_DEFAULTS, **threads, **(more or {}), **learner.site.bucket_env, **plan.env, **own}
    return values.env_list(literals, fields=_FIELDS, secret=names.env_secret(learner), secret_keys=plan.env_from_caller)


def fetch_environment(learner: LearnerPlan) -> list[dict[str, Any]]:
    """`env` of the init container that fetches the code: the bucket, and nothing that a person wrote."""
    own = {"GKR_CODE_DIR": names.CODE_DIR, "GKR_LEARNER": learner.name, **_own("code", "code")}
    return values.env_list({"PYTHONUNBUFFERED": "1", **learner.site.bucket_env, **own}, fields=_FIELDS)


def syncer_environment(site: Site) -> list[dict[str, Any]]:
    """`env` of the syncer's pod: nothing that a person wrote, for it runs nothing of theirs."""
    own = {ENVIRONMENT: names.KEYS_DIR, **_own(names.SYNCER, names.SYNCER)}
    literals = {**_DEFAULTS, **_ONE_THREAD, **site.bucket_env, **own}
    return values.env_list(literals, fields=_FIELDS)


def _own(role: str, group: str) -> dict[str, str]:
    return {"GKR_GROUP": group, "GKR_PLAN": names.PLAN_PATH, "GKR_ROLE": role, "GKR_RUN_DIR": names.RUN_DIR}


def secrets(plan: Plan, site: Site) -> list[dict[str, Any]]:
    """`envFrom`: the person's Secrets, then the bucket's, so that theirs cannot take the run's storage away."""
    return values.env_from([*plan.secrets, site.bucket_secret])


def mounts(site: Site, *, code: bool, keys: bool = False, shared_secret: str = "") -> list[dict[str, Any]]:
    """Folders that every container of a run sees; `keys`: also those of the run; with a secret the platform's."""
    found: list[dict[str, Any]] = [
        {"name": "plan", "mountPath": names.PLAN_DIR, "readOnly": True},
        {"name": "run", "mountPath": names.RUN_DIR},
    ]
    if code:
        found.append({"name": "code", "mountPath": names.CODE_DIR})
    if keys:
        found.append({"name": "keys", "mountPath": names.KEYS_DIR, "readOnly": True})
    if shared_secret:
        found.append({"name": "shared-keys", "mountPath": names.SHARED_KEYS_DIR, "readOnly": True})
    found += [{"name": mount.name, "mountPath": mount.mount_path, "readOnly": mount.read_only} for mount in site.mounts]
    return sorted(found, key=lambda one: one["mountPath"])


def volumes(
    site: Site, *, config_map: str, code: bool, keys: bool = False, shared_secret: str = ""
) -> list[dict[str, Any]]:
    """What those mounts are. Keys belong to whom the ConfigMap belongs to."""
    found: list[dict[str, Any]] = [
        {"name": "plan", "configMap": {"name": config_map, "defaultMode": 0o444}},
        {"name": "run", "emptyDir": {}},
    ]
    if code:
        found.append({"name": "code", "emptyDir": {}})
    if keys:
        found.append(_secret("keys", names.keys_secret(config_map)))
    if shared_secret:
        found.append(_secret("shared-keys", shared_secret))
    found += [{"name": mount.name, "hostPath": {"path": mount.host_path}} for mount in site.mounts]
    return sorted(found, key=lambda one: one["name"])


def _secret(name: str, secret: str) -> dict[str, Any]:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o400}}


def shared_memory(size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Mount and volume of /dev/shm; its pages count in the container's memory."""
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": values.memory(size)}}
    return {"name": "shm", "mountPath": "/dev/shm"}, volume  # noqa: S108 (the mount point itself)


def resources(cores: float, memory: int, *, gpus: int = 0, gpu_resource: str = "") -> dict[str, Any]:
    """Memory and GPUs are limits too; cores are not: a limit would throttle a pod beside idle cores."""
    fixed = {"memory": values.memory(memory)}
    if gpus:
        fixed[gpu_resource] = str(gpus)
    return {"limits": fixed, "requests": {"cpu": values.cpu(cores), **fixed}}


HARDENED: dict[str, Any] = {"allowPrivilegeEscalation": False}
"""Of every container of ours. More is not taken away: images bring their own user, and a profile of system calls would
forbid those with which CUDA shares memory between processes."""
