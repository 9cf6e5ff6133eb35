"""A run on the double of a cluster: plan, registry entry, objects as its controllers would leave them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkr.cluster.launch import Prepared, prepare
from gkr.cluster.registry import ClusterEntry
from spec.facts import ClusterFacts, MachinePool, Site, SyncerPorts
from spec.plan import Plan
from spec.resolve import resolve_located
from tests.builders.api_double import ApiDouble
from tests.builders.experiments import GIB, RUN, load

NAMESPACES = ("gkr-0", "gkr-1")
QUEUE = "research"
TINY = """
version: 1
name: tiny
groups:
  - {name: trainer, nodes: 2, resources: {cpu: 1, memory: 2Gi}}
run: |
  echo hello
"""
PAIR = """
version: 1
name: pair
learners:
  - {name: east, cluster: any, groups: [{nodes: 1, resources: {cpu: 1, memory: 2Gi}}]}
  - {name: west, cluster: any, groups: [{nodes: 1, resources: {cpu: 1, memory: 2Gi}}]}
run: |
  echo hello
"""


def facts(bucket: Path, *, name: str = "double", site: Site | None = None) -> ClusterFacts:
    """Of a cluster of CPU nodes whose bucket is a folder, so that object storage is real as well."""
    return ClusterFacts(
        name=name,
        region=f"{name}-region",
        backend="kubernetes",
        pools=[MachinePool(name="cpu", machine="local-cpu", nodes=8, cpu=8, memory=32 * GIB)],
        bucket=bucket.as_uri(),
        queues=[QUEUE],
        syncer=SyncerPorts(control_port=7070, bulk_port=7071, host="10.0.0.9"),
        namespaces=list(NAMESPACES),
        site=site or Site(image="localhost/trainer:1"),
    )


def plan(text: str, clusters: Sequence[ClusterFacts], *, env: dict[str, str] | None = None, run: str = RUN) -> Plan:
    """The plan of an experiment on these clusters."""
    return resolve_located(load(text), clusters, run=run, env=env or {})


def furnish(double: ApiDouble, *, gpus: int = 0) -> None:
    """What a platform stack leaves in a cluster: namespaces, queues, priorities."""
    for namespace in NAMESPACES:
        double.put("Namespace", namespace)
        double.put("LocalQueue", QUEUE, namespace=namespace, spec={"clusterQueue": QUEUE})
    for priority in ("low", "normal", "high"):
        double.put("WorkloadPriorityClass", priority)
    double.put("ResourceFlavor", "cpu", spec={"nodeLabels": {}})
    amounts = {"cpu": "64", "memory": "256Gi", "nvidia.com/gpu": f"{gpus}"}
    resources = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
    groups = [{"coveredResources": list(amounts), "flavors": [{"name": "cpu", "resources": resources}]}]
    double.put("ClusterQueue", QUEUE, spec={"resourceGroups": groups})


def entry(double: ApiDouble, folder: Path, *, name: str = "double", context: str = "double") -> ClusterEntry:
    """A registry entry that leads to the double."""
    path = double.kubeconfig(folder / f"{name}.kubeconfig", context=context)
    return ClusterEntry(name, f"{path}", context)


def prepared(text: str, clusters: Sequence[ClusterFacts], entries: Sequence[ClusterEntry], **more: Any) -> Prepared:
    """Ready to launch."""
    return prepare(plan(text, clusters, **more), entries={one.name: one for one in entries}, say=lambda _: None)


def started(double: ApiDouble, *, phase: str = "Running") -> None:
    """What KubeRay and Kueue add to every RayJob: its Workload, its pod, its state."""
    for (kind, namespace, name), job in list(double.objects.items()):
        if kind != "RayJob":
            continue
        owner = [{"kind": "RayJob", "name": name, "uid": job["metadata"]["uid"]}]
        outcome = {"Running": "RUNNING", "Complete": "SUCCEEDED", "Failed": "FAILED"}.get(phase, "")
        job["status"] = {"jobDeploymentStatus": phase, "jobStatus": outcome}
        double.put("Workload", f"rayjob-{name}", namespace=namespace, metadata={"ownerReferences": owner})
        labels = dict(job["metadata"]["labels"])
        double.put("Pod", f"{name}-head", namespace=namespace, metadata={"ownerReferences": owner, "labels": labels})
