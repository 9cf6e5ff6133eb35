"""Sick GPUs: what is collected, who is told, and what the health controller may do.

GKE's device plugin watches the driver and sets the node condition XidCriticalError; by default it takes a GPU away for
one error only, so the others are named here, the condition is alerted on, and the controller may cordon. Reporting a
host to Google takes it away for days and is rate limited: nothing here does it.

Alerts ask for what is collected. GKE's DCGM exporter has utilisation, memory, temperature, power, clock and traffic,
and no field for XIDs, ECC or NVLink errors; its kube-state metrics have none of nodes. The condition of nodes is one of
GKE's own metrics, by another name and with other labels. An alert on a series that nobody writes is never sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as kubernetes

from infra.components.k8s.namespaces import RAY_METRICS_PORT, RAY_PODS
from infra.components.k8s.objects import Objects, declare
from infra.facts import NAMESPACE
from manifests.labels import EXPERIMENT, LEARNER, ROLE
from manifests.names import METRICS_PORT_NAME, SERVICE
from manifests.values import seconds
from spec.stack_platform import Health

CONTROLLER = "gkr-health"
CONDITION = "XidCriticalError"
XID_CONFIG = "xid-config"
DRAIN = "Cordon the node, let its experiment move, reset the GPU or report the host (docs: a sick GPU)."
_MONITORING = "monitoring.googleapis.com/v1"


def controller_objects(health: Health) -> Objects:
    """Account and rights of the node health controller: it looks at nodes and pods, and cordons only if allowed."""
    verbs = ["get", "list", "watch"]
    rules: list[dict[str, Any]] = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": [*verbs, "patch"] if health.cordon else verbs},
        {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
        {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
    ]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": CONTROLLER}
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": CONTROLLER, "namespace": NAMESPACE},
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": CONTROLLER},
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": CONTROLLER},
            "roleRef": reference,
            "subjects": [{"kind": "ServiceAccount", "name": CONTROLLER, "namespace": NAMESPACE}],
        },
    ]


def xid_objects(health: Health) -> Objects:
    """Errors that take a GPU out of service, as the device plugin reads them. Whether GKE's managed plugin does is not
    verified; alerts and controller do not depend on it.
    """
    listed = ",".join(str(one) for one in sorted(set(health.critical_xids)))
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": XID_CONFIG, "namespace": "kube-system"},
            "data": {"HealthCriticalXid": listed},
        }
    ]


def monitoring_objects() -> Objects:
    """What managed collection scrapes besides DCGM, which it knows: Ray's own metrics, of all pods of Ray clusters, and
    those of service replicas.
    """
    return [
        _monitoring("gkr-ray", port=RAY_METRICS_PORT, selector=RAY_PODS),
        _monitoring("gkr-services", port=METRICS_PORT_NAME, selector={ROLE: SERVICE}),
    ]


def _monitoring(name: str, *, port: int | str, selector: Mapping[str, str]) -> dict[str, Any]:
    """Pods with these labels, named by what they belong to."""
    own = [{"from": label, "to": label.partition("/")[2]} for label in (EXPERIMENT, LEARNER, ROLE)]
    return {
        "apiVersion": _MONITORING,
        "kind": "ClusterPodMonitoring",
        "metadata": {"name": name},
        "spec": {
            "endpoints": [{"interval": "30s", "port": port}],
            "selector": {"matchLabels": dict(selector)},
            "targetLabels": {"fromPod": own, "metadata": ["node", "pod"]},
        },
    }


@dataclass(frozen=True)
class Alert:
    """One thing that somebody is told of."""

    name: str
    title: str
    query: str
    """PromQL."""
    duration_seconds: int
    advice: str


def alerts(health: Health, *, cluster: str) -> list[Alert]:
    """Alerts of one cluster."""
    only = f'cluster="{cluster}"'
    after = seconds(health.alert_after)
    held = f'{only},pod!=""'  # a GPU that no pod holds has an empty one
    found = [
        Alert("temperature", f"GPU above {health.max_temperature_celsius} degrees",
              f"DCGM_FI_DEV_GPU_TEMP{{{only}}} > {health.max_temperature_celsius}", 300,
              "It throttles and slows its whole experiment; look at its neighbours before reporting the host."),
        Alert("throttle", f"Busy GPU below {health.min_clock_mhz} MHz",
              f"DCGM_FI_DEV_SM_CLOCK{{{only}}} < {health.min_clock_mhz} and "
              f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{only}}} > 0.5", 600,
              "It slows its whole experiment: look at its power limit and temperature with nvidia-smi -q."),
        Alert("idle", "GPUs admitted to experiments and not used",
              f"avg by (Hostname) (DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{held}}}) < 0.02", 1800,
              "`gkr ps` names the experiment; a hung one is ended by its own deadlines."),
    ]  # fmt: skip
    if health.watch_xid:
        found.append(
            Alert("condition", f"Node condition {CONDITION}",
                  f'kubernetes_io:node_status_condition{{monitored_resource="k8s_node",cluster_name="{cluster}",'
                  f'condition="{CONDITION}",status="True"}} == 1', after, DRAIN)
        )  # fmt: skip
    if health.own_exporter:
        found += _errors(health, only=only, after=after)
    return sorted(found, key=lambda one: one.name)


def _errors(health: Health, *, only: str, after: int) -> list[Alert]:
    """On fields that only an exporter of one's own has."""
    xids = " or ".join(f"DCGM_FI_DEV_XID_ERRORS{{{only}}} == {one}" for one in sorted(set(health.critical_xids)))
    found = [
        Alert("ecc", "GPU memory errors that could not be corrected",
              f"increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{only}}}[10m]) > 0", after, DRAIN),
        Alert("nvlink", "NVLink errors between GPUs of a node",
              f"increase(DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{{{only}}}[10m]) > 100", 600, DRAIN),
    ]  # fmt: skip
    if health.watch_xid:
        found.append(Alert("xid", "GPU driver errors that need a reset", xids, after, DRAIN))
    return found


@dataclass(frozen=True, kw_only=True)
class HealthArgs:
    """Health of a cluster."""

    provider: kubernetes.Provider
    health: Health
    cluster: str
    project: str
    labels: dict[str, str]
    managed: bool
    """Google's managed collection runs there: with it come the resource types and the metrics of alerts."""
    gpus: bool
    """The cluster has GPUs."""
    channels: Sequence[str] = ()
    """Ids of who is told."""
    after: Sequence[pulumi.Resource]
    """The platform's namespace."""
    google: gcp.Provider | None = None
    """None where nothing is managed."""


class HealthRules(pulumi.ComponentResource):
    """Declares collection, alerts and rights."""

    def __init__(self, name: str, args: HealthArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:ops:Health", name, None, opts)
        objects = controller_objects(args.health)
        if args.gpus and args.health.watch_xid:
            objects += xid_objects(args.health)
        if args.managed:
            objects += monitoring_objects()
        declare(objects, parent=self, provider=args.provider, depends_on=args.after)
        found = alerts(args.health, cluster=args.cluster) if args.managed and args.gpus else []
        for alert in found:
            self._policy(alert, args)
        self.register_outputs({"alerts": [alert.name for alert in found]})

    def _policy(self, alert: Alert, args: HealthArgs) -> None:
        query = gcp.monitoring.AlertPolicyConditionConditionPrometheusQueryLanguageArgs(
            query=alert.query, duration=f"{alert.duration_seconds}s", evaluation_interval="30s",
            # Metrics of machines that do not run yet are unknown to the service.
            disable_metric_validation=True,
        )  # fmt: skip
        condition = gcp.monitoring.AlertPolicyConditionArgs(
            display_name=alert.title, condition_prometheus_query_language=query
        )
        gcp.monitoring.AlertPolicy(
            f"{args.cluster}-{alert.name}",
            project=args.project,
            display_name=f"{args.cluster}: {alert.title}",
            combiner="OR",
            conditions=[condition],
            documentation=gcp.monitoring.AlertPolicyDocumentationArgs(content=alert.advice, mime_type="text/markdown"),
            severity="WARNING" if alert.name in ("idle", "temperature", "throttle") else "ERROR",
            notification_channels=list(args.channels),
            user_labels=args.labels,
            opts=pulumi.ResourceOptions(parent=self, provider=args.google),
        )
