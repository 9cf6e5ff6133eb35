"""The bed itself, on one of its own beside the one that other tests use: state folder, names and addresses differ.

Bare: control plane and node without add-ons, which is what `up` and `down` have to start, mend and remove.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from gkr.runs import process_birth
from spec.errors import EXIT_REFUSED
from tools.bed import images, network
from tools.bed.holder import Process, holder, members
from tools.bed.layout import Bed, bed
from tools.bed.processes import running
from tools.bed.run import ctr, inside, kubectl

ROOT = Path(__file__).resolve().parents[2]
FIRST = "4"
UP_SECONDS = 120.0
POD = "prober"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or bool(os.environ.get("KUBECONFIG")), reason="a bed needs root, and be wanted"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Another state folder and other addresses than those of the bed that may be up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GKR_BED", f"{tmp_path_factory.mktemp('state')}")
        patch.setenv("GKR_BED_FIRST", FIRST)
        yield
        command("down", "--purge")


@pytest.fixture(scope="module")
def one(environment: None) -> Bed:
    """A bare bed with a running pod."""
    command("up", "--bare")
    found = bed(0)
    wanted = tuple(recipe for recipe in images.all_recipes() if recipe.name in {"pause", "hostroot"})
    images.provide(found, recipes=wanted)
    start_pod(found, image=wanted[-1].reference)
    return found


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tools.bed", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=UP_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_pod(one: Bed, *, image: str) -> None:
    container = {
        "name": POD,
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["/usr/bin/sleep", "3600"],
        "volumeMounts": [{"name": "usr", "mountPath": "/usr", "readOnly": True}],
    }
    volumes = [{"name": "usr", "hostPath": {"path": "/usr"}}]
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": volumes}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD, "namespace": "default"}, "spec": spec}
    await_account(one)
    kubectl(one, "apply", "-f", "-", stdin=json.dumps(pod))
    kubectl(one, "wait", "--for=condition=Ready", f"pod/{POD}", "--timeout=60s", deadline_seconds=90)


def await_account(one: Bed) -> None:
    """No pod is admitted before the controller manager made the namespace's account."""
    kubectl(one, "wait", "--for=create", "serviceaccount/default", "--timeout=60s", deadline_seconds=90)


CONNECT = """
import socket, sys
kind = socket.SOCK_STREAM if sys.argv[1] == "tcp" else socket.SOCK_DGRAM
try:
    with socket.socket(socket.AF_INET, kind) as one:
        one.settimeout(3)
        one.connect((sys.argv[2], int(sys.argv[3])))
        one.send(b"hello")
    print("connected")
except OSError as error:
    print(f"refused: {error}")
"""


def from_pod(one: Bed, kind: str, address: str, port: int) -> str:
    program = ["/usr/bin/python3", "-c", CONNECT, kind, address, f"{port}"]
    return kubectl(one, "exec", POD, "--", *program, deadline_seconds=30).strip()


def from_node(one: Bed, kind: str, address: str, port: int) -> str:
    return inside(one, ["/usr/bin/python3", "-c", CONNECT, kind, address, f"{port}"], deadline_seconds=30).strip()


def host_addresses(one: Bed) -> list[str]:
    """Every IPv4 address of this machine that is not loopback, the bed's own end of the pair among them."""
    done = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, text=True, check=True, timeout=10)
    devices = cast("list[dict[str, Any]]", json.loads(done.stdout))
    found = [str(info["local"]) for device in devices for info in device["addr_info"]]
    assert one.host_address in found
    return [address for address in found if not address.startswith("127.")]


def test_a_pod_reaches_its_api_server_and_nothing_outside(one: Bed) -> None:
    """Real listeners on every address of the machine: what came through would be heard."""
    assert from_pod(one, "tcp", one.api_service, 443) == "connected"
    with ExitStack() as stack:
        streams = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = streams.getsockname()[1]
        packets = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        packets.bind(("0.0.0.0", port))
        for address in host_addresses(one):
            for attempt in (from_pod, from_node):
                assert attempt(one, "tcp", address, port).startswith("refused"), address
                attempt(one, "udp", address, port)  # sending into the void is no error
        for listener in (streams, packets):
            listener.settimeout(0.5)
        with pytest.raises(TimeoutError):
            streams.accept()
        with pytest.raises(TimeoutError):
            packets.recv(100)


@pytest.mark.parametrize("address", ["169.254.169.254", "198.51.100.7", "10.96.36.131"])
def test_nothing_has_a_route_to_other_machines(one: Bed, address: str) -> None:
    """The clouds' metadata address, which every Ray head probes; anybody; a cluster address of another bed."""
    for attempt in (from_pod, from_node):
        assert "unreachable" in attempt(one, "tcp", address, 80)


def test_the_host_reaches_the_api_server(one: Bed) -> None:
    with socket.create_connection((one.address, 6443), timeout=5):
        pass


def test_a_second_up_leaves_everything_running(one: Bed) -> None:
    processes = running(one)
    tasks = ctr(one, "tasks", "list", "--quiet").split()
    assert len(tasks) == 2  # the pod's and its sandbox's
    assert command("up", "--bare").strip() == f"{one.kubeconfig}"
    assert running(one) == processes
    assert set(ctr(one, "tasks", "list", "--quiet").split()) == set(tasks)


def test_up_mends_what_ended(one: Bed) -> None:
    before = running(one)
    os.kill(before["kube-scheduler"].process.pid, signal.SIGKILL)
    command("up", "--bare")
    after = running(one)
    assert after["kube-scheduler"].process != before["kube-scheduler"].process
    assert {name: found for name, found in after.items() if name != "kube-scheduler"} == {
        name: found for name, found in before.items() if name != "kube-scheduler"
    }


def test_containers_are_limited_below_the_beds_own_group(one: Bed) -> None:
    tops = [path for path in Path("/sys/fs/cgroup").rglob(one.netns) if path.is_dir()]
    assert tops
    for top in tops:
        groups = [path for path in (top / "k8s.io").glob("*") if path.is_dir()]
        assert len(groups) == 2, top


def left_of(one: Bed) -> list[str]:
    """Whatever of a bed the machine still has: processes, namespaces, devices, groups, mounts."""
    found = [f"process {process.pid}" for process, _ in members(one)]
    for entry in Path("/proc").iterdir():
        # Of processes that have just ended and of some that are not ours nothing is told.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if entry.name.isdigit() and f"{one.folder}".encode() in (entry / "environ").read_bytes():
                found.append(f"process {entry.name}: {(entry / 'cmdline').read_bytes()[:80]!r}")
    paths = [Path("/run/netns") / one.netns, Path("/sys/class/net") / one.host_device]
    found += [f"{path}" for path in paths if path.exists()]
    found += [f"{path}" for path in Path("/sys/fs/cgroup").rglob(one.netns)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [line for line in mounts if f"{one.folder}" in line or one.netns in line]
    if one.data.exists():
        found.append(f"{one.data}")
    return found


def everything(one: Bed) -> list[Process]:
    """Every process of the bed, containers too: all descend from the one that holds its namespaces."""
    first = holder(one)
    assert first is not None
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, todo = [first.pid], [first.pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    births = {pid: process_birth(pid) for pid in found}
    return [Process(pid, birth) for pid, birth in births.items() if birth is not None]


def test_down_leaves_nothing_and_up_begins_anew(one: Bed) -> None:
    processes = everything(one)
    names = {Path(f"/proc/{process.pid}/comm").read_text().strip() for process in processes}
    assert {"etcd", "kubelet", "containerd-shim", "pause", "sleep"} <= names
    started = time.monotonic()
    command("down")
    assert time.monotonic() - started < 10
    assert left_of(one) == []
    assert not [process for process in processes if process.alive]
    assert one.images.is_dir()
    command("up", "--bare")
    assert kubectl(one, "get", "pods", "-A", "-o", "name").strip() == ""
    assert ctr(one, "containers", "list", "--quiet").strip() == ""
    assert "localhost/gkr/pause:1" in ctr(one, "images", "list", "--quiet")


def killed_up(one: Bed, *, when: Callable[[], bool]) -> None:
    """`up`, ended by SIGKILL in the moment in which something of it is there."""
    with subprocess.Popen(
        [sys.executable, "-m", "tools.bed", "up", "--bare"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 60
        while not when():
            assert time.monotonic() < deadline
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"up ended with {process.wait(timeout=0.01)} before it could be killed")
        process.kill()
        process.wait(timeout=10)


@pytest.mark.parametrize("stage", ["namespace", "holder", "etcd", "kube-apiserver", "kubelet"])
def test_what_a_killed_up_left_is_removed_by_down(one: Bed, stage: str) -> None:
    stages = {"namespace": lambda: network.exists(one), "holder": lambda: holder(one) is not None}
    command("down")
    killed_up(one, when=stages.get(stage, lambda: stage in running(one)))
    assert network.exists(one)
    command("down")
    assert left_of(one) == []


@pytest.mark.parametrize("stage", ["namespace", "etcd", "kubelet"])
def test_what_a_killed_up_left_is_taken_over_by_the_next(one: Bed, stage: str) -> None:
    command("down")
    killed_up(one, when=lambda: network.exists(one) if stage == "namespace" else stage in running(one))
    command("up", "--bare")
    assert "bed-4 " in kubectl(one, "get", "nodes", "--no-headers")
    status = json.loads(command("status", "-o", "json"))
    assert [(found["up"], found["nodes"]) for found in status] == [(True, {"ready": 1, "other": 0})]


def test_another_state_folder_is_told_who_has_the_names(
    one: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command("up", "--bare")
    monkeypatch.setenv("GKR_BED", f"{tmp_path}")
    for action in (["up", "--bare"], ["down"]):
        done = subprocess.run(
            [sys.executable, "-m", "tools.bed", *action],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=UP_SECONDS,
        )  # fmt: skip
        assert done.returncode == EXIT_REFUSED
        assert f"GKR_BED={one.folder.parent} make cluster-down" in done.stderr
    assert holder(one) is not None
