"""A person's own command (`run:`), once per node: the same start, watch and fence as ranks have, without a zygote.

The command runs under a keeper (`python -m training.command_jobs`), a process that owns everything the command starts:
it ends it all when the command ends, when it is fenced, and when the agent dies. Must not look into the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spec.errors import GkrError
from spec.plan import LearnerPlan, Plan
from training.family import Family, shell_code
from training.node import Exit, Snapshot

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL."""
FENCE_DEADLINE_SECONDS = 20.0
_TICK_SECONDS = 0.1


@dataclass(slots=True)
class CommandNode:
    """The command of one node. Everything is asked by polling."""

    folder: Path
    epoch: int = 0
    _keeper: subprocess.Popen[bytes] | None = None
    _job: str = ""
    _exits: list[Exit] = field(default_factory=list[Exit])

    def spawn(
        self, job: str, *, script: str, environment: Mapping[str, str], log: Path, working: Path | None, epoch: int
    ) -> dict[str, int]:
        """Start the command for a new epoch; the process id of its keeper."""
        if epoch <= self.epoch:
            raise GkrError(
                f"epoch {epoch} is not newer than {self.epoch}",
                hint="an older driver is still commanding this node; end it",
            )
        self.fence(epoch)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "run.sh"
        path.write_text(script)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "training.command_jobs", str(working or self.folder), "bash", str(path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._job = job
        return {job: self._keeper.pid}

    def fence(self, epoch: int) -> None:
        """End everything older than `epoch` and wait until it is gone."""
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            assert keeper.stdin is not None
            keeper.stdin.close()  # what it waits for
            try:
                keeper.wait(timeout=FENCE_DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait(timeout=5)
        self.epoch = max(self.epoch, epoch)
        self._exits = []

    def poll(self) -> Snapshot:
        """Read what happened; never waits."""
        if self._keeper is not None and self._keeper.poll() is not None:
            keeper, self._keeper = self._keeper, None
            assert keeper.stdin is not None
            keeper.stdin.close()
            code = keeper.returncode
            self._exits.append(Exit(job=self._job, pid=keeper.pid, code=code, monotonic=time.monotonic(), reason=None))
        running = {self._job: self._keeper.pid} if self._keeper is not None else {}
        return Snapshot(
            epoch=self.epoch, monotonic=time.monotonic(), running=running, exits=list(self._exits), pages={}, events=[]
        )

    def close(self) -> None:
        """End the command."""
        self.fence(self.epoch)


def command_environment(
    plan: Plan, *, learner: LearnerPlan, node: str, attempt: int, master: tuple[str, int]
) -> dict[str, str]:
    """What is promised to a person's command."""
    rank = next(index for index, one in enumerate(learner.nodes) if one.name == node)
    place = learner.nodes[rank]
    return {
        "GKR_NODES": str(len(learner.nodes)),
        "GKR_NODE_RANK": str(rank),
        "GKR_NODE": node,
        "GKR_GROUP": place.group,
        "GKR_GPUS": str(place.gpus),
        "GKR_MASTER_ADDR": master[0],
        "GKR_MASTER_PORT": str(master[1]),
        "GKR_EXPERIMENT": plan.experiment,
        "GKR_RUN": plan.run,
        "GKR_LEARNER": learner.name,
        "GKR_ATTEMPT": str(attempt),
        "GKR_CHECKPOINTS": learner.checkpoints,
        "GKR_DATA_MANIFEST": learner.data_manifest,
    }


def working_folder(plan: Plan, *, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the command starts: in the code that came with the experiment, if some did."""
    code = environment.get("GKR_CODE_DIR") or plan.code
    return Path(code) if code else None


def main(arguments: list[str] | None = None) -> int:
    """The keeper of `FOLDER COMMAND...`: until it ends or standard input closes; ends as shells do (128 + signal)."""
    working, *command = sys.argv[1:] if arguments is None else arguments
    family = Family(command, folder=working)
    while family.reap() is None:
        if select.select([0], [], [], _TICK_SECONDS)[0] and not os.read(0, 4096):
            family.signal(signal.SIGTERM)
            until = time.monotonic() + GRACE_SECONDS
            while family.reap() is None and time.monotonic() < until:
                time.sleep(0.02)
            break
    family.kill()
    return shell_code(family.code if family.code is not None else -signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
