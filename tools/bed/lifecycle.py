"""Up, down and what is there.

`up` may be called at any time: it takes over what runs as it should, mends what does not, and cleans up after a call
that was killed. Two calls wait for each other. `down` leaves nothing but images and certificates.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from spec.errors import GkrError, RefusedError, UnreachableError
from tools.bed import certificates, control_plane, groups, network, node, requirements
from tools.bed.holder import POLL_SECONDS, hold, holder, log_end, owner, release, remove_mount_points
from tools.bed.layout import MOST_REGIONS, Bed, Wanted, beds, state_root
from tools.bed.processes import Component, ensure, running, start, stop, wait_ready
from tools.bed.run import ctr, kubectl
from tools.binaries import CLUSTER_TOOLS

LOCKS = Path("/run/lock")
"""Of the machine, not of a state folder: namespaces and devices have names of the machine."""
LOCK_SECONDS = 900.0
NODE_SECONDS = 120.0
CORE_TOOLS = ("kubernetes", "etcd")
COMPONENTS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "containerd", "kubelet", "kube-proxy",
)  # fmt: skip

Say = Callable[[str], None]


def up(wanted: Wanted, *, say: Say, rate: str = network.LINK_RATE, bare: bool = False) -> None:
    """Bring up what is wanted and return when all of it is ready. `bare`: without add-ons."""
    requirements.check()
    with locked(say):
        requirements.provide_packages(say=say)
        requirements.provide_binaries(CORE_TOOLS if bare else CLUSTER_TOOLS)
        started = time.monotonic()
        every = beds(wanted.regions)
        for bed in beds(MOST_REGIONS):
            _check_owner(bed)
        check_use(wanted)
        remember(wanted)
        for bed in beds(MOST_REGIONS)[wanted.regions :]:
            remove(bed)
        _for_all(every, lambda bed: raise_core(bed, say=_stopwatch(bed, say)))
        if len(every) > 1:
            network.connect(every, rate=rate)
        if not bare:
            from tools.bed import addons

            _for_all(every, lambda bed: addons.install(bed, wanted=wanted, say=_stopwatch(bed, say)))
        say(f"ready in {time.monotonic() - started:.1f} s")
    for bed in every:
        say(f"{bed.name}: {bed.server}  export KUBECONFIG={bed.kubeconfig}")


def raise_core(bed: Bed, *, say: Say) -> None:
    """Control plane and node. Returns when the node is Ready."""
    fresh = holder(bed) is None or not certificates.current(bed)
    if fresh:
        remove(bed)
        bed.data.mkdir(parents=True, exist_ok=True)
    certificates.provide(bed)
    network.create(bed)
    node.write_settings(bed)
    bed.pod_logs.mkdir(parents=True, exist_ok=True)
    hold(bed)
    if fresh:
        say("namespaces and certificates")
    with ThreadPoolExecutor(max_workers=4) as pool:
        runtime = pool.submit(_runtime, bed)
        ensure(bed, control_plane.etcd(bed))
        ensure(bed, control_plane.apiserver(bed))
        say("API server ready")
        runtime.result()
        _all_ready(bed, [node.kubelet(bed), control_plane.controller_manager(bed), control_plane.scheduler(bed)])
    # kube-proxy reads the node's address once, and ends itself when it changes, also from none to the first.
    _await_node(bed, path='{.status.addresses[?(@.type=="InternalIP")].address}', value=bed.address)
    _all_ready(bed, [node.kube_proxy(bed)])
    _await_node(bed, path='{.status.conditions[?(@.type=="Ready")].status}', value="True")
    say("node Ready")


def _runtime(bed: Bed) -> None:
    """containerd, without the containers of an earlier life: their processes ended with it, its images stay."""
    component = node.containerd(bed)
    ensure(bed, component)
    if "kubelet" in running(bed):
        return
    lines = ctr(bed, "tasks", "list").splitlines()[1:]
    live = {line.split()[0] for line in lines if line.split()[-1] == "RUNNING"}
    dead = [name for name in ctr(bed, "containers", "list", "--quiet").split() if name not in live]
    if not dead:
        return
    ctr(bed, "containers", "delete", *dead)
    # What the plugin for Kubernetes read at its start has to be forgotten as well.
    stop(running(bed)[component.name].process)
    ensure(bed, component)


def _all_ready(bed: Bed, components: Sequence[Component]) -> None:
    processes = [start(bed, component) for component in components]
    for component, process in zip(components, processes, strict=True):
        wait_ready(bed, component, process)


def _await_node(bed: Bed, *, path: str, value: str) -> None:
    """Wait until the API server says so of the node."""
    deadline = time.monotonic() + NODE_SECONDS
    said = "nothing"
    while time.monotonic() < deadline:
        try:
            said = kubectl(bed, "get", "node", bed.node, f"-o=jsonpath={path}", deadline_seconds=10)
        except GkrError as error:
            said = error.message
        if said == value:
            return
        time.sleep(POLL_SECONDS)
    raise UnreachableError(
        f"node {bed.node} of {bed.name} is not Ready after {NODE_SECONDS:g} s: {path} says {said}, not {value}"
        f"{log_end(bed, 'kubelet')}"
    )


def down(*, say: Say, purge: bool = False) -> None:
    """End everything. `purge`: forget images and certificates too."""
    requirements.check()
    started = time.monotonic()
    with locked(say):
        every = beds(MOST_REGIONS)
        for bed in every:
            _check_owner(bed)
        _for_all(every, remove)
        remove_mount_points()
        if purge:
            shutil.rmtree(state_root(), ignore_errors=True)
    say(f"down in {time.monotonic() - started:.1f} s")


def remove(bed: Bed) -> None:
    """Whatever there is of a bed, also of one whose `up` was killed: processes, devices, namespaces, groups, data."""
    release(bed)
    network.remove(bed)
    groups.remove(bed)
    shutil.rmtree(bed.data, ignore_errors=True)
    shutil.rmtree(bed.pod_logs, ignore_errors=True)


def _check_owner(bed: Bed) -> None:
    found = owner(bed)
    if found is not None and found != bed.folder:
        raise RefusedError(
            f"a cluster of another state folder runs on this machine: {found.parent}",
            hint=f"GKR_BED={found.parent} make cluster-down, or GKR_BED_FIRST=4 to have another beside it",
        )


def check_use(wanted: Wanted) -> None:
    """What one use has installed would be in the way of the other's, which would own half of it."""
    if holder(beds(1)[0]) is None or remembered().for_stacks == wanted.for_stacks:
        return
    now, then = ("stacks", "experiments") if wanted.for_stacks else ("experiments", "stacks")
    raise RefusedError(
        f"the cluster that is up was brought up for {then}, and holds what would be in the way of {now}",
        hint=f"make cluster-down (after make down of its stacks), then make cluster FOR={now}",
    )


@dataclass(frozen=True)
class Status:
    """What is there of a region."""

    name: str
    server: str
    kubeconfig: str
    up: bool
    missing: list[str]
    pids: dict[str, int]
    nodes: dict[str, int]
    """Ready and other nodes; empty if the API server does not answer."""


def status() -> list[Status]:
    """Every region of which there is something."""
    requirements.check()
    return [_status(bed) for bed in beds(MOST_REGIONS) if network.exists(bed)]


def _status(bed: Bed) -> Status:
    _check_owner(bed)
    pids = {name: found.process.pid for name, found in sorted(running(bed).items())}
    missing = [name for name in COMPONENTS if name not in pids]
    nodes: dict[str, int] = {}
    if "kube-apiserver" in pids:
        try:
            lines = kubectl(bed, "get", "nodes", "--no-headers", deadline_seconds=20).splitlines()
        except GkrError as error:
            missing.append(f"an answer of the API server ({error.message})")
        else:
            ready = sum(line.split()[1].startswith("Ready") for line in lines)
            nodes = {"ready": ready, "other": len(lines) - ready}
    return Status(bed.name, bed.server, f"{bed.kubeconfig}", not missing, missing, pids, nodes)


def remember(wanted: Wanted) -> None:
    """Keep what was asked for, so that the next call may leave out what should stay as it is."""
    state_root().mkdir(parents=True, exist_ok=True)
    (state_root() / "wanted.json").write_text(json.dumps(asdict(wanted)))


def remembered() -> Wanted:
    """What was asked for, if that bed is still up."""
    path = state_root() / "wanted.json"
    if holder(beds(1)[0]) is None or not path.is_file():
        return Wanted()
    fields = cast("dict[str, Any]", json.loads(path.read_text()))
    return replace(Wanted(), **fields)


@contextmanager
def locked(say: Say) -> Generator[None]:
    """One change at a time of the beds that have these names."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    path = LOCKS / f"{beds(1)[0].netns}.lock"
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not waiting:
                    say("another call is changing the cluster; waiting for it")
                    waiting = True
                if time.monotonic() > deadline:
                    raise UnreachableError(f"another call has held {path} for {LOCK_SECONDS:g} s") from None
                time.sleep(0.2)
        yield


def _for_all(every: Sequence[Bed], work: Callable[[Bed], None]) -> None:
    """Regions at the same time; the first error is the one that counts."""
    with ThreadPoolExecutor(max_workers=len(every)) as pool:
        tasks: list[Future[None]] = [pool.submit(work, bed) for bed in every]
        for task in tasks:
            task.result()


def _stopwatch(bed: Bed, say: Say) -> Say:
    started = time.monotonic()
    return lambda text: say(f"{bed.name:6} {time.monotonic() - started:5.1f} s  {text}")


def to_stderr(text: str) -> None:
    """How the command line says things: results alone go to stdout."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
