"""Plans for Kubernetes clusters, one per case that the manifests must cover, and what kubelet does with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec.facts import ClusterFacts, HostMount, MachinePool, SharedService, Site, SyncerPorts
from spec.plan import Plan
from spec.resolve import resolve_located
from tests.builders.experiments import GIB, RUN, cluster, load, shipped

SUBBLOCK = "cloud.google.com/gce-topology-subblock"
NASTY_ENV = {
    "PRICE": "$5 and $(HOME) and $$ and $",
    "QUOTES": 'it\'s "quoted" `date`',
    "LINES": "first\nsecond: b\n",
    "PAIR": "a=b=c",
    "MAP": "a: b",
    "WORDS": "größer 大 \N{SNOWMAN}",
    "EMPTY": "",
}
"""Values that something on the way to a container could change."""
RUN_SCRIPT = """\
set -eu
cat <<'EOF' > /tmp/note
  it's "here": $HOME `date` $(id) \\
EOF
torchrun --nnodes $GKR_NODES --node-rank $GKR_NODE_RANK my_train.py
"""


def gke(name: str, *, pools: Mapping[str, int], host: str = "", services: Mapping[str, SharedService] | None = None,
        service_account: str = "trainer") -> ClusterFacts:  # fmt: skip
    """A region of Google Cloud."""
    site = Site(service_account=service_account, topology_level=SUBBLOCK, image_pull_secrets=["registry"])
    found = cluster(name, pools=pools, services=services)
    ports = SyncerPorts(control_port=7400, bulk_port=7401, host=host)
    return found.model_copy(update={"site": site, "syncer": ports})


def bed(index: int = 0, *, host: str = "") -> ClusterFacts:
    """The one-node cluster: pods share a machine and mount its folders."""
    return ClusterFacts(
        name="bed" if index == 0 else f"bed-{index}",
        region=f"bed-{index}",
        backend="kubernetes",
        pools=[MachinePool(name="cpu", machine="local-cpu", nodes=16, cpu=2, memory=24 * GIB)],
        bucket="s3://gkr-bed" if index == 0 else f"s3://gkr-bed-{index}",
        queues=["research"],
        syncer=SyncerPorts(control_port=7070, bulk_port=7071, host=host),
        namespaces=["gkr-0", "gkr-1"],
        site=Site(
            image="localhost/gkr/hostroot:1f2e3d",
            bucket_env={"AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": f"http://10.201.{index}.2:9000"},
            bucket_secret="gkr-bucket",
            mounts=[HostMount(name="host-usr", host_path="/usr", mount_path="/usr")],
            cpu_request_share=0.1,
        ),
    )


def planned(text: str, facts: Sequence[ClusterFacts], *, overrides: Sequence[str] = ()) -> Plan:
    """Text to plan, on clusters."""
    env = {"WANDB_API_KEY": "never shown"}
    return resolve_located(load(text, overrides=overrides), facts, run=RUN, env=env)


def portrait() -> Plan:
    """A3 Ultra and A3 Mega in two regions, a service with a GPU, a shared one, code, secrets, caller's variables."""
    judge = SharedService(kind="evaluate", endpoints=["tcp://judge.services.svc:7500"], secret="gkr-services")
    east = gke("us-east5", pools={"a3-ultra": 16, "n2-standard-32": 8}, host="10.64.0.7", services={"judge": judge})
    central = gke("us-central1", pools={"a3-mega": 16, "n2-standard-32": 8}, host="10.72.0.7", service_account="")
    return planned(shipped("portrait-2b").text, [east, central])


def ultra() -> Plan:
    """One A3 Ultra learner with two groups, a service without GPUs, a long start."""
    text = """\
version: 1
name: large
image: trainer
cluster: us-east5
groups:
  - {name: front, nodes: 2, resources: {gpu: H200:8}}
  - {name: back, nodes: 1, resources: {gpu: H200:8, cpu: 100, memory: 1000Gi, shm: 64Gi}}
train: {recipe: digits, batch: 96}
data: {manifest: "{bucket}/d/manifest.json"}
services:
  encoder: {kind: encode, replicas: 2}
timeouts: {start: 1.5h, run: 2d, grace: 90s}
priority: high
"""
    return planned(text, [gke("us-east5", pools={"a3-ultra": 16, "n2-standard-32": 8})])


def mega_run() -> Plan:
    """A person's own command on A3 Mega."""
    script = "".join(f"  {line}\n" for line in RUN_SCRIPT.splitlines())
    text = f"""\
version: 1
name: own-command
image: trainer
cluster: us-central1
groups:
  - {{name: trainer, nodes: 2, resources: {{gpu: H100-MEGA:8}}}}
run: |
{script}code: .
secrets: [hf-token]
"""
    return planned(text, [gke("us-central1", pools={"a3-mega": 16, "n2-standard-32": 8}, service_account="")])


def cpu_run(env: Mapping[str, str] = NASTY_ENV) -> Plan:
    """A command on CPU nodes, with variables that are hard to hand over."""
    text = """\
version: 1
name: cpu-only
image: example/tools@sha256:0123
groups:
  - {name: worker, nodes: 3, resources: {cpu: 4, memory: 8Gi}}
cluster: us-east5
run: python -c 'print(1)'
env: {WANDB_API_KEY: }
"""
    plan = planned(text, [gke("us-east5", pools={"n2-standard-8": 4}, service_account="")])
    return plan.model_copy(update={"env": dict(env)})


def digits(clusters: int = 1) -> Plan:
    """The experiment of `make train` on one or two one-node clusters."""
    facts = [bed()] if clusters == 1 else [bed(0, host="10.202.0.1"), bed(1, host="10.202.0.2")]
    overrides = [f"learners.{index}.cluster={facts[index % len(facts)].name}" for index in range(2)]
    return planned(shipped("digits").text, facts, overrides=overrides)


CASES: dict[str, Callable[[], Plan]] = {
    "portrait-ultra-and-mega": portrait,
    "ultra-two-groups": ultra,
    "mega-run": mega_run,
    "cpu-run": cpu_run,
    "digits-one-bed": digits,
    "digits-two-beds": lambda: digits(2),
}


def expand(text: str, environment: Mapping[str, str]) -> str:
    """What kubelet makes of a literal: `$$` is `$`, `$(NAME)` the variable if it is known; the rest stays.

    After k8s.io/kubernetes/third_party/forked/golang/expansion: an operator that is not followed by `$` or by a closed
    parenthesis is text.
    """

    def replaced(match: re.Match[str]) -> str:
        found = match[0]
        return "$" if found == "$$" else environment.get(found[2:-1], found)

    return re.sub(r"\$\$|\$\([^)]*\)", replaced, text)


def pod_templates(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates of every pod that the objects would start."""
    found: list[dict[str, Any]] = []
    for one in objects:
        if one["kind"] == "RayJob":
            ray = one["spec"]["rayClusterSpec"]
            found += [ray["headGroupSpec"]["template"], *(group["template"] for group in ray["workerGroupSpecs"])]
        elif one["kind"] == "Job":
            found.append(one["spec"]["template"])
    return found
