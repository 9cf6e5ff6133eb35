"""Experiments, facts and plans for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spec.document import Located
from spec.experiment import Experiment
from spec.facts import ClusterFacts, MachinePool, SharedService, SyncerPorts, local_facts
from spec.load import load_experiment
from spec.nodes import Source
from spec.plan import Plan
from spec.resolve import resolve_located

ROOT = Path(__file__).parents[2]
RUN = "20261130-143755-3fa9c1"
GIB = 2**30


def recipes() -> dict[str, Source]:
    """The shipped training recipes."""
    found = sorted((ROOT / "recipes" / "train").glob("*.yaml"))
    return {path.stem: Source(path.read_text(encoding="utf-8"), f"recipes/train/{path.name}") for path in found}


def shipped(name: str) -> Source:
    """A shipped experiment."""
    return Source((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"), f"recipes/{name}.yaml")


def load(text: str, *, overrides: Sequence[str] = (), file: str = "t.yaml") -> Located[Experiment]:
    """An experiment from text, with the shipped recipes."""
    return load_experiment(Source(text, file), recipes=recipes(), overrides=overrides)


def laptop(cores: float = 2, *, memory_gib: int = 24, count: int = 2) -> list[ClusterFacts]:
    """The local backend of a small machine."""
    return local_facts(cores, memory_bytes=memory_gib * GIB, bucket_root_uri="file:///w/.gkr/buckets", count=count)


def cluster(
    name: str,
    *,
    pools: Mapping[str, int],
    services: Mapping[str, SharedService] | None = None,
    queues: Sequence[str] = ("research",),
    ports: tuple[int, int] | None = (7400, 7401),
    host: str = "10.64.0.7",
) -> ClusterFacts:
    """One Kubernetes cluster; pools are machine name to nodes."""
    return ClusterFacts(
        name=name,
        region=name,
        backend="kubernetes",
        pools=[MachinePool(name=machine, machine=machine, nodes=nodes) for machine, nodes in pools.items()],
        bucket=f"gs://gkr-{name}",
        registry=f"{name}-registry/gkr",
        queues=list(queues),
        services=dict(services or {}),
        syncer=SyncerPorts(control_port=ports[0], bulk_port=ports[1], host=host) if ports else None,
        namespaces=["research"],
    )


def regions() -> list[ClusterFacts]:
    """Two regions as the shipped GPU recipe expects them."""
    judge = SharedService(kind="evaluate", endpoints=["tcp://judge.platform:7500"])
    return [
        cluster("us-east5", pools={"n2-standard-32": 4, "a3-ultra": 3}, services={"judge": judge}),
        cluster("us-central1", pools={"n2-standard-32": 4, "a3-mega": 5}),
    ]


def resolved(
    text: str,
    *,
    facts: Sequence[ClusterFacts] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Text to plan."""
    document = load(text, overrides=overrides)
    return resolve_located(document, facts or laptop(), run=RUN, env=env or {}, run_uri="file:///w/runs/x/r")


LOCAL = """\
version: 1
name: small
learners:
  - name: east
    cluster: local-0
    groups:
      - {name: trainer, nodes: 1, ranks: 2, resources: {cpu: 1, memory: 2Gi}}
  - name: west
    cluster: local-1
    groups:
      - {name: trainer, nodes: 1, ranks: 2, resources: {cpu: 1, memory: 2Gi}}
train: {recipe: digits}
data: {manifest: "{bucket}/d/manifest.json"}
services:
  encoder: {kind: encode}
  sampler: {kind: sample}
  judge: {kind: evaluate}
"""

GPU = """\
version: 1
name: big
image: trainer
learners:
  - name: east
    cluster: us-east5
    groups:
      - {name: trainer, nodes: 2, resources: {gpu: H200:8}}
train: {recipe: digits}
data: {manifest: "{bucket}/d/manifest.json"}
services:
  encoder: {kind: encode}
"""
