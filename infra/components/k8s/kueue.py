"""Kueue and its queues: the operator first, the queues once its webhooks answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes
import yaml

from infra.components.k8s.objects import declare
from infra.components.k8s.operators import Operator, Source, image_values, install
from infra.components.k8s.queues import Holdings, local_queues, queue_objects
from infra.components.k8s.webhook import webhook_objects
from infra.facts import RegionFacts
from manifests import values
from spec.errors import ConfigError
from spec.facts import Site
from spec.stack_platform import Kueue

NAME = "kueue"
NAMESPACE = "kueue-system"
DEPLOYMENT = "kueue-controller-manager"
FRAMEWORKS = ("batch/job", "ray.io/rayjob", "ray.io/raycluster")
"""What is queued. Others are left out: each would put Kueue's webhook in the way of pods that have no queue."""
IGNORES_UNDECLARED_FROM = (0, 19)
"""First minor version that can admit requests for resources without a quota; an older one refuses the setting."""
MOST_CORES = 4.0


def operator(kueue: Kueue) -> Operator:
    """What it is given."""
    memory = {"memory": values.memory(kueue.memory)}
    limits = {"cpu": values.cpu(max(MOST_CORES, kueue.cpu)), **memory}
    requests = {"cpu": values.cpu(kueue.cpu), **memory}
    manager: dict[str, Any] = {"resources": {"limits": limits, "requests": requests}}
    if image := image_values(kueue.image):
        manager["image"] = image
    settings = {
        "controllerManager": {"manager": manager, "readinessProbe": {"initialDelaySeconds": 1, "periodSeconds": 2}},
        "managerConfig": {"controllerManagerConfigYaml": yaml.safe_dump(configuration(kueue), sort_keys=True)},
    }
    return Operator(name=NAME, namespace=NAMESPACE, deployment=DEPLOYMENT, values=settings, image=kueue.image)


def configuration(kueue: Kueue) -> dict[str, Any]:
    """The controller's own settings."""
    found: dict[str, Any] = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "clientConnection": {"burst": 400, "qps": 200},
        "controller": {
            "groupKindConcurrency": {
                "ClusterQueue.kueue.x-k8s.io": 1,
                "Job.batch": 5,
                "LocalQueue.kueue.x-k8s.io": 1,
                "ResourceFlavor.kueue.x-k8s.io": 1,
                "Workload.kueue.x-k8s.io": 5,
            }
        },
        "health": {"healthProbeBindAddress": ":8081"},
        "integrations": {"frameworks": list(FRAMEWORKS)},
        "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
        "metrics": {"bindAddress": ":8443", "enableClusterQueueResources": True},
        "webhook": {"port": 9443},
    }
    if kueue.wait_for_pods_ready is not None:
        timeout = f"{values.seconds(kueue.wait_for_pods_ready)}s"
        found["waitForPodsReady"] = {
            "blockAdmission": False,
            "recoveryTimeout": timeout,
            "requeuingStrategy": {"backoffBaseSeconds": 60, "backoffMaxSeconds": 3600, "timestamp": "Eviction"},
            "timeout": timeout,
        }
    if kueue.ignore_undeclared:
        major, minor = (int(part) for part in kueue.chart.version.split(".")[:2])
        if (major, minor) < IGNORES_UNDECLARED_FROM:
            raise ConfigError(
                f"kueue.ignore_undeclared needs Kueue 0.19, the stack installs {kueue.chart.version}, which refuses "
                "such a configuration and would not start",
                hint="leave it out: quotas name all that experiments ask for",
            )
        found["resources"] = {"quotaCheckStrategy": "IgnoreUndeclared"}
    return found


@dataclass(frozen=True, kw_only=True)
class KueueStackArgs:
    """Kueue in one cluster."""

    provider: kubernetes.Provider
    kueue: Kueue
    source: Source
    region: RegionFacts
    holdings: Holdings
    """What the platform's own pods hold."""
    probe_image: str
    """An image with Python, in full."""
    site: Site
    space: pulumi.Resource
    """The platform's own namespace."""


class KueueStack(pulumi.ComponentResource):
    """Declares them. `ready`: what namespaces of experiments wait for, before `open` gives them their queues."""

    def __init__(self, name: str, args: KueueStackArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:KueueStack", name, None, opts)
        ready = install(operator(args.kueue), source=args.source, parent=self, provider=args.provider)
        probe = webhook_objects(image=args.probe_image, site=args.site, version=args.source.version)
        answers = declare(probe, parent=self, provider=args.provider, depends_on=[*ready, args.space])
        objects = queue_objects(args.kueue, region=args.region, holdings=args.holdings)
        self._args = args
        self.ready = list(answers)
        for kinds in _IN_TURN:
            some = [one for one in objects if one["kind"] in kinds]
            self.ready += declare(some, parent=self, provider=args.provider, depends_on=self.ready)
        self.register_outputs({"queues": [queue.name for queue in args.kueue.queues]})

    def open(self, namespaces: Sequence[str], *, after: Sequence[pulumi.Resource]) -> None:
        """Let experiments of these namespaces into the queues."""
        objects = local_queues(self._args.kueue, namespaces=namespaces)
        declare(objects, parent=self, provider=self._args.provider, depends_on=[*self.ready, *after])


_IN_TURN = (
    {"Topology", "WorkloadPriorityClass", "Cohort", "ProvisioningRequestConfig"},
    {"ResourceFlavor", "AdmissionCheck"},
    {"ClusterQueue"},
)
"""Kinds that refer to those before them: deleted in the other direction, or a finalizer would wait for its user."""
