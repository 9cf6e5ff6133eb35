"""A Ray cluster of pretended pods on this machine: real `ray start` under the real main process of a pod.

Each pod has a folder, a loopback address and an environment of its own, as on Kubernetes; what it shares with the
others is the bucket. `delete` is what deleting a pod is: everything in it gets SIGKILL, and a new one with an empty
folder comes a moment later. A container that ends by itself is started again in the same folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from spec.plan import LearnerPlan, Plan
from spec.sync_keys import ENVIRONMENT
from tests.builders.local_runs import REPOSITORY

BIN = Path(sys.executable).parent
HEAD_SECONDS = 20.0
_PORTS = (
    "node-manager", "object-manager", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent",
    "metrics-export",
)  # fmt: skip
TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass
class Pod:
    """One pod and its successors under the same role."""

    name: str
    role: str
    group: str
    address: str
    resources: dict[str, int]
    folder: Path
    number: int = 0
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def unique(self) -> str:
        return f"{self.name}-{self.number}"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.unique


@dataclass
class RayCluster:
    """The pods of one learner. `tick` often: it is kubelet and operator."""

    plan: Plan
    learner: LearnerPlan
    folder: Path
    port: int
    first_address: int
    first_port: int = 20_000
    keys: Path | None = None
    """Folder with each learner's keys of the sync, where there is a syncer."""
    pods: dict[str, Pod] = field(default_factory=dict[str, Pod])
    driver: subprocess.Popen[bytes] | None = None
    drivers: int = 0
    _ended_at: float = 0.0
    _ray_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="gr-", dir="/tmp")))
    """Short: Unix sockets lie in it."""

    def start(self) -> None:
        """All pods; the driver when they have joined."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.plan_path.write_text(self.plan.write_json())
        self._add("head", role="head", group="head", resources={})
        for group in self.learner.groups:
            for index, _ in enumerate(self.learner.group(group)):
                self._add(f"{group}-{index}", role="trainer", group=group, resources={f"gkr_group_{group}": 1})
        for service in self.learner.services:
            for index in range(service.replicas):
                name = f"svc-{service.name}"
                self._add(f"{name}-{index}", role="service", group=name, resources={f"gkr_service_{service.name}": 1})
        for pod in self.pods.values():
            self._run(pod)
        self._submit()

    @property
    def plan_path(self) -> Path:
        return self.folder / "plan.json"

    def tick(self) -> int | None:
        """Start again what ended; the driver's exit code once it has ended by itself."""
        for pod in self.pods.values():
            if pod.process is None or pod.process.poll() is not None:
                _kill_all(pod.unique)
                self._run(pod)
                if pod.role == "head":
                    self._submit()
        assert self.driver is not None
        code = self.driver.poll()
        if code in (None, 0):
            self._ended_at = 0.0
            return code
        # Where the head died, the driver dies of it first, and nobody hears of that.
        self._ended_at = self._ended_at or time.monotonic()
        return code if time.monotonic() - self._ended_at > HEAD_SECONDS else None

    def delete(self, name: str) -> None:
        """A pod goes with everything in it; its successor knows nothing."""
        pod = self.pods[name]
        _kill_all(pod.unique)
        if pod.process is not None:
            pod.process.wait(timeout=20)
        pod.process = None
        pod.number += 1

    def close(self) -> None:
        """Nothing of it stays."""
        for pod in self.pods.values():
            _kill_all(pod.unique)
            if pod.process is not None:
                pod.process.wait(timeout=20)
        if self.driver is not None:
            self.driver.wait(timeout=20)
        shutil.rmtree(self._ray_dir, ignore_errors=True)

    def _add(self, name: str, *, role: str, group: str, resources: dict[str, int]) -> None:
        address = f"127.0.0.{self.first_address + len(self.pods)}"
        self.pods[name] = Pod(f"{self.learner.name}-{name}", role, group, address, resources, self.folder / "pods")

    def _run(self, pod: Pod) -> None:
        pod.run_dir.mkdir(parents=True, exist_ok=True)
        pod.starts += 1
        first = self.first_port + 100 * list(self.pods.values()).index(pod)
        command = f"{BIN}/ray start --block --node-ip-address={pod.address} --object-store-memory={80 * 2**20} "
        command += f"--temp-dir={self._ray_dir / f'{pod.unique}-{pod.starts}'} "  # names collide in a common one
        # So do ports: one that is taken ends the raylet, and `ray start` waits for it all the same.
        command += "".join(f"--{name}-port={first + index} " for index, name in enumerate(_PORTS))
        command += f"--min-worker-port={first + 20} --max-worker-port={first + 99} "
        if pod.role == "head":
            command += f"--head --port={self.port} --num-cpus=0 --include-dashboard=false"
        else:  # as the init container of a worker pod does
            wait = f"until {BIN}/ray health-check --address {self._head} >/dev/null 2>&1; do sleep 1; done; "
            command = f"{wait}exec {command}--address={self._head} --num-cpus=1"
            command += f" --resources='{json.dumps(pod.resources)}'"
        with (pod.run_dir / f"container-{pod.starts}.txt").open("wb") as output:
            pod.process = subprocess.Popen(
                [sys.executable, "-m", "training.pod", "--role", pod.role, "--", "bash", "-c", command],
                stdout=output,
                stderr=output,
                cwd=pod.run_dir,
                env=self._environment(pod),
                start_new_session=True,
            )

    @property
    def _head(self) -> str:
        return f"{self.pods['head'].address}:{self.port}"

    def _submit(self) -> None:
        """HTTPMode: a new head is given the job again."""
        if self.driver is not None:
            self.driver.wait(timeout=20)
        pod = self.pods["head"]
        self.drivers += 1
        with (self.folder / f"driver-{self.drivers}.txt").open("wb") as output:
            self.driver = subprocess.Popen(
                ["bash", "-c", f"until {BIN}/ray status >/dev/null 2>&1; do sleep 0.5; done; exec {sys.executable} "
                 "-m training.driver"],
                stdout=output, stderr=output, cwd=pod.run_dir, start_new_session=True,
                env={**self._environment(pod), "RAY_ADDRESS": self._head},
            )  # fmt: skip

    def _environment(self, pod: Pod) -> dict[str, str]:
        keys = {} if self.keys is None else {ENVIRONMENT: str(self.keys / self.learner.name)}
        return {
            **os.environ,
            **self.plan.env,
            **keys,
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "GKR_LEARNER": self.learner.name,
            "GKR_PLAN": str(self.plan_path),
            "GKR_RUN_DIR": str(pod.run_dir),
            "GKR_ROLE": pod.role,
            "GKR_GROUP": pod.group,
            "GKR_POD": pod.unique,
            "GKR_POD_NODE": "here",
            "GKR_POD_IP": pod.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
            "RAY_raylet_start_wait_time_s": "60",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }


def _kill_all(pod: str) -> None:
    """Everything that was started in a pod, as the end of its process namespace would; by its environment."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = [one for one in psutil.process_iter() if _in_pod(one, pod)]
        if not found:
            return
        for one in found:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.05)  # not psutil's wait: it would collect children that Popen waits for


def _in_pod(process: psutil.Process, pod: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("GKR_POD") == pod
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
