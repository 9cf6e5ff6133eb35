"""What makes a bare cluster into a region: DNS, operators, queue, bucket, namespaces, fake nodes, facts.

Promises: idempotent (what is there as it should be is not touched), nothing is awaited without a deadline, and an error
names the part that is not ready with its last log lines. Called once the node is Ready, and again by every `up`.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spec.errors import EXIT_USAGE, GkrError, UnreachableError
from spec.machines import machine
from spec.units import parse_bytes, parse_cpu
from tools.bed import bucket, dns, facts, fake_nodes, images, kuberay, kueue, kwok
from tools.bed.layout import Bed, Wanted
from tools.bed.processes import ensure, running, stop
from tools.bed.run import CommandError, kubectl

APPLY_SECONDS = 120.0
READY_SECONDS = 180.0
WEBHOOK_SECONDS = 60.0
NODES_SECONDS = 240.0
REGISTER_SECONDS = 60.0
POLL_SECONDS = 0.3
APPLIED = "gkr/applied"
"""Annotation of a namespace: digest of the manifests that were last applied to it in full."""
SYSTEM_CPU = 0.3
SYSTEM_MEMORY = 2**30
"""What the bed's own pods ask for, rounded up; the rest is the queue's."""
LOG_LINES = 15

Say = Callable[[str], None]


@dataclass(frozen=True)
class RealNode:
    """What the one real node offers."""

    cores: float
    memory: int
    storage: int
    gpus: int
    gpus_allocatable: int

    @property
    def quota(self) -> dict[str, str]:
        """What experiments may ask for in all, as Kueue's quota."""
        return {
            "cpu": f"{int((self.cores - SYSTEM_CPU) * 1000)}m",
            "memory": str(self.memory_for_experiments),
            kueue.GPU: str(self.gpus),
            "ephemeral-storage": str(self.storage),
        }

    @property
    def memory_for_experiments(self) -> int:
        return (self.memory - SYSTEM_MEMORY) // 2**20 * 2**20


def install(bed: Bed, *, wanted: Wanted, say: Say) -> None:
    """Bring everything up that runs on top of a Ready node; of a cluster for stacks only what no stack brings."""
    built = {recipe.name: recipe.reference for recipe in images.all_recipes()}
    apply(bed, [facts.namespace(bucket.NAMESPACE, labels={})])
    keys = bucket_keys(bed)
    apply(bed, [bucket.secret(bucket.NAMESPACE, keys=keys)])
    if wanted.for_stacks:
        _provide_small(bed, built)
        if fake_nodes.present(bed):
            ensure(bed, kwok.component(bed))
        for one in SMALL:
            _await_rollout(bed, *one)
        say("images, dns and bucket ready; the rest is left to the stacks")
        return
    apply(bed, facts.namespaces())
    apply(bed, [bucket.secret(namespace, keys=keys) for namespace in facts.NAMESPACES])
    _label_node(bed)
    with ThreadPoolExecutor(max_workers=5) as pool:
        parts: list[tuple[str, Future[Any]]] = [
            ("images, dns and bucket", pool.submit(_provide_small, bed, built)),
            ("kuberay", pool.submit(_apply_operator, bed, kuberay.NAMESPACE, kuberay.objects(built["kuberay"]))),
            ("kueue", pool.submit(_apply_operator, bed, kueue.NAMESPACE, kueue.objects(built["kueue"]))),
            ("fake nodes", pool.submit(_provide_nodes, bed, wanted, say)),
        ]
        for name, part in parts:
            part.result()
            say(f"{name} applied")
        for rollout in [pool.submit(_await_rollout, bed, *one) for one in ROLLOUTS]:
            rollout.result()
    say("operators ready")
    real = _provide_gpus(bed, count=wanted.gpus)
    _provide_queues(bed, wanted=wanted, real=real)
    document = facts.cluster_facts(
        bed, wanted=wanted, cores=real.cores, memory=real.memory_for_experiments, image=built["hostroot"],
        mounts=images.mounts(),
    )  # fmt: skip
    apply(bed, [facts.config_map(document)])
    say("queues and facts applied")
    _register(bed, say=say)


SMALL = ((dns.NAMESPACE, dns.NAME), (bucket.NAMESPACE, bucket.NAME))
ROLLOUTS = (*SMALL, (kuberay.NAMESPACE, kuberay.NAME), (kueue.NAMESPACE, kueue.NAME))
"""Deployments that must be there, as (namespace, name)."""


def apply(bed: Bed, objects: Sequence[dict[str, Any]]) -> None:
    """Server-side: a client-side apply cannot hold resource types of a megabyte."""
    for one in objects:
        if one["kind"] == "Deployment":
            # The bed's own pods belong on the real node; on a fake one they would only pretend to run.
            one["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": bed.node}
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    arguments = ("apply", "--server-side", "--force-conflicts", "--validate=false", "-f", "-")
    kubectl(bed, *arguments, stdin=text, deadline_seconds=APPLY_SECONDS)


def _provide_small(bed: Bed, built: dict[str, str]) -> None:
    """Images first: a pod that is there before its image waits for kubelet's next round, which costs seconds."""
    images.provide(bed, recipes=images.all_recipes())
    (bed.bucket / bucket.bucket_name(bed.name)).mkdir(parents=True, exist_ok=True)
    names = dns.objects(built["coredns"], address=bed.dns_service)
    apply(bed, [*names, *bucket.objects(built["versitygw"], folder=bed.bucket, address=bed.address)])


def bucket_keys(bed: Bed) -> dict[str, str]:
    """The bucket's keys: those that the cluster has, else new ones."""
    found = kubectl(bed, "get", "secret", bucket.SECRET, "-n", bucket.NAMESPACE, "--ignore-not-found", "-o", "json")
    return bucket.keys_of(json.loads(found)["data"]) if found.strip() else bucket.new_keys()


def _label_node(bed: Bed) -> None:
    labels = {
        **machine("local-cpu").labels,
        "topology.kubernetes.io/region": bed.region,
        "topology.kubernetes.io/zone": f"{bed.region}-a",
    }
    kubectl(bed, "label", "node", bed.node, "--overwrite", *(f"{key}={value}" for key, value in labels.items()))


def _apply_operator(bed: Bed, namespace: str, objects: list[dict[str, Any]]) -> None:
    """Apply an operator's megabytes only if they are others than last time."""
    digest = hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()[:16]
    found = kubectl(bed, "get", "namespace", namespace, "--ignore-not-found", "-o", "json")
    applied = json.loads(found)["metadata"].get("annotations", {}).get(APPLIED) if found.strip() else None
    if applied == digest:
        return
    apply(bed, objects)
    kubectl(bed, "annotate", "namespace", namespace, "--overwrite", f"{APPLIED}={digest}")


def _await_rollout(bed: Bed, namespace: str, name: str) -> None:
    target = f"deployment/{name}"
    seconds = f"--timeout={READY_SECONDS:.0f}s"
    try:
        kubectl(bed, "rollout", "status", target, "-n", namespace, seconds, deadline_seconds=READY_SECONDS + 10)
    except GkrError:
        raise UnreachableError(
            f"{name} of {bed.name} is not ready after {READY_SECONDS:.0f} s{_tail(bed, namespace, target)}"
        ) from None


def _tail(bed: Bed, namespace: str, target: str) -> str:
    """The last lines of a deployment's log, and what Kubernetes says of its pods."""
    said: list[str] = []
    for arguments in (
        ("get", "pods", "-n", namespace, "-o", "wide"),
        ("get", "events", "-n", namespace, "--field-selector=type=Warning", "--sort-by=.lastTimestamp"),
        ("logs", target, "-n", namespace, f"--tail={LOG_LINES}"),
    ):
        try:
            said += kubectl(bed, *arguments, deadline_seconds=20).splitlines()[-LOG_LINES:]
        except GkrError as error:
            said.append(error.message)
    return "".join(f"\n  {line}" for line in said)


def _provide_nodes(bed: Bed, wanted: Wanted, say: Say) -> None:
    """Fake nodes and the process that plays their kubelets; without any there is no such process."""
    present = fake_nodes.present(bed)
    process = running(bed).get(kwok.NAME)
    if not wanted.fake and not present:
        if process is not None:
            stop(process.process)
        return
    ensure(bed, kwok.component(bed))
    todo = fake_nodes.provide(bed, wanted=wanted.fake)
    if todo.create or todo.remove:
        say(f"fake nodes: {len(todo.create)} created, {len(todo.remove)} removed")
    _await_nodes(bed, count=sum(wanted.fake.values()))


def _await_nodes(bed: Bed, *, count: int) -> None:
    path = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'
    deadline = time.monotonic() + NODES_SECONDS
    ready = 0
    while time.monotonic() < deadline:
        found = kubectl(bed, "get", "nodes", "-l", fake_nodes.MACHINE_LABEL, "-o", f"jsonpath={path}")
        ready = found.split().count("True")
        if ready == count:
            return
        time.sleep(POLL_SECONDS)
    raise UnreachableError(f"{ready} of {count} fake nodes of {bed.name} are Ready after {NODES_SECONDS:.0f} s")


def _real_node(bed: Bed) -> RealNode:
    status = json.loads(kubectl(bed, "get", "node", bed.node, "-o", "json"))["status"]
    room = cast("dict[str, str]", status["allocatable"])
    return RealNode(
        cores=parse_cpu(room["cpu"]),
        memory=_bytes(room["memory"]),
        storage=_bytes(room.get("ephemeral-storage", "0")),
        gpus=int(status["capacity"].get(kueue.GPU, "0")),
        gpus_allocatable=int(room.get(kueue.GPU, "0")),
    )


def _bytes(quantity: str) -> int:
    """A size as the API server writes it, with its unit or in plain bytes."""
    return int(quantity) if quantity.isdecimal() else parse_bytes(quantity)


def _provide_gpus(bed: Bed, *, count: int) -> RealNode:
    """Let the real node claim GPUs; kubelet takes what the status says without a device plugin."""
    real = _real_node(bed)
    if real.gpus != count:
        path = f"/status/capacity/{kueue.GPU.replace('/', '~1')}"
        patch = json.dumps([{"op": "add", "path": path, "value": str(count)}])
        kubectl(bed, "patch", "node", bed.node, "--subresource=status", "--type=json", "-p", patch)
    deadline = time.monotonic() + WEBHOOK_SECONDS
    while time.monotonic() < deadline:
        real = _real_node(bed)
        if real.gpus_allocatable == count:
            return real
        time.sleep(POLL_SECONDS)
    raise UnreachableError(f"{bed.node} offers {real.gpus_allocatable} of {count} GPUs after {WEBHOOK_SECONDS:.0f} s")


def _provide_queues(bed: Bed, *, wanted: Wanted, real: RealNode) -> None:
    """Kueue is Ready a moment before its webhooks have their certificate, so the first tries may be refused."""
    objects = kueue.queues(wanted.fake, real=real.quota, namespaces=facts.NAMESPACES, selector=facts.MANAGED)
    deadline = time.monotonic() + WEBHOOK_SECONDS
    while True:
        try:
            apply(bed, objects)
            break
        except CommandError as error:
            if "webhook" not in error.stderr or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    _remove_flavors(bed, kept={"cpu", *wanted.fake})


def _remove_flavors(bed: Bed, *, kept: set[str]) -> None:
    """Flavors of machines that are gone; the queue no longer names them."""
    found = kubectl(bed, "get", "resourceflavors", "-o", "jsonpath={.items[*].metadata.name}").split()
    surplus = [name for name in found if name not in kept]
    if surplus:
        kubectl(bed, "delete", "resourceflavors", "--wait=false", *surplus)


def _register(bed: Bed, *, say: Say) -> None:
    """Tell the user's `gkr` of the cluster, so that an experiment can name it."""
    program = Path(sys.prefix) / "bin" / "gkr"
    command = [str(program), "clusters", "add", bed.name, "--kubeconfig", str(bed.kubeconfig), "--replace"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REGISTER_SECONDS)
    except FileNotFoundError:
        say(f"gkr is not installed in {sys.prefix}: {bed.name} is not in its configuration")
        return
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{' '.join(command[1:])} did not end within {REGISTER_SECONDS:.0f} s") from None
    if done.returncode == EXIT_USAGE:
        say(f"this gkr has no `clusters add`: {bed.name} is not in its configuration")
    elif done.returncode:
        raise GkrError(f"gkr does not take {bed.name}: {done.stderr.strip()[-500:]}", hint=" ".join(command[1:]))
