"""Ways to train one model in two places, in one run: same task, same samples, same machine.

- `data-parallel`: one learner with all ranks, which average gradients at every step; the batch is that of all learners.
- `barrier`, `decoupled`: two learners and our syncer.
- `torchft`: the released torchft's DiLoCo over gloo, installed from the index into an environment of its own.

Each without faults and with SIGKILL of one learner every 30 s, on the digits and on the language model. Learners are
plain processes (`tools.fleet`), started again at once when killed. Then, on the digits in decoupled mode: what codecs
and the two ways to average weights cost in loss and bytes. Loss is that of the final shared weights on 256 held-out
samples, and that of the averaged ones beside it; merged samples per second run from the first step to the last merge;
blocked is the share of a learner's time in which it does not train because of the sync.

    python -m benchmarks.sync_head_to_head [--rounds 24] [--tasks digits text] [--contenders barrier torchft]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._environment import make_environment
from spec import events as ev
from spec.experiment import DataSource
from spec.fold import fold
from spec.plan import Plan
from spec.sync import SyncConfig
from spec.train import TrainConfig
from tools.fleet import Fleet, make_plan, wait_for_all, write_json
from training.models.weights import SUFFIX, load_model
from training.processes import free_port
from training.validation import SAMPLES, held_out_batch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "sync_head_to_head.json"
TORCHFT = "torchft==0.2.0"
"""Installed alone: it is to run with this environment's torch."""
TORCHFT_NEEDS = "opentelemetry-exporter-otlp-proto-http"
NAMES = ("east", "west")
INNER_STEPS = 20
KILL_SECONDS = 30.0
DEADLINE_SECONDS = 1200.0
CONTENDERS = ("data-parallel", "barrier", "decoupled", "torchft")
DIGITS: dict[str, Any] = {
    "batch": 64, "learning_rate": 4e-3, "dtype": "float32", "loader_workers": 0, "ema_decay": 0.95, "log_every": 1,
    "model": {"width": 64, "depth": 4, "heads": 4, "mlp_ratio": 2.0, "conditioning": "class"},
    "checkpoint": {"every_steps": INNER_STEPS},
}  # fmt: skip
TEXT: dict[str, Any] = DIGITS | {
    "batch": 32, "model": {"kind": "lm", "context": 64, "width": 64, "depth": 3, "heads": 4},
}  # fmt: skip
TASKS: dict[str, tuple[DataSource, dict[str, Any]]] = {
    "digits": ("sklearn-digits", DIGITS), "text": ("python-docstrings", TEXT),
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One run."""

    task: str
    contender: str
    setting: str
    """What differs from the default."""
    rounds: int
    """Of all learners; the budget."""
    kills: int
    loss: float
    """Of the shared weights."""
    published_loss: float | None
    """Of the averaged weights that are published; none where nothing is."""
    samples_per_second: float
    seconds: float
    blocked_share: float
    lost_samples: int | None
    """None where nobody counts them."""
    bytes_up: int | None


def train_config(task: str, *, rounds: int, **changes: Any) -> TrainConfig:
    """The budget is `rounds` rounds of all learners."""
    fields = TASKS[task][1]
    samples = rounds * INNER_STEPS * fields["batch"] * len(NAMES)
    return TrainConfig.model_validate({**fields, "samples": samples, "warmup_samples": samples // 20, **changes})


def ours(
    folder: Path, *, task: str, contender: str, rounds: int, with_kills: bool, setting: str = "", **sync: Any
) -> Result:
    """A run of this project's trainer and syncer."""
    together = contender == "data-parallel"
    train = train_config(task, rounds=rounds)
    if together:
        train = train.model_copy(update={"batch": train.batch * len(NAMES)})
    config = SyncConfig.model_validate({
        "mode": "decoupled" if contender == "decoupled" else "barrier", "inner_steps": INNER_STEPS,
        "lease": "10s", "heartbeat": "1s",
        # One learner has nobody to be merged with: its own weights are the shared ones.
        **({"outer_learning_rate": 1.0, "outer_momentum": 0.0} if together else {"outer_momentum": 0.5}), **sync,
    })  # fmt: skip
    names = ("all",) if together else NAMES
    learners = dict.fromkeys(map(str, names), len(NAMES) // len(names))
    plan = make_plan(folder, learners=learners, train=train, sync=config, source=TASKS[task][0])
    fleet = Fleet(plan, folder=folder)
    with fleet.running():
        killer = Killer(
            list(learners), with_kills=with_kills, kill=lambda name: bool(fleet.signal_learner(name, signal.SIGKILL)),
            has_begun=lambda: all(page is not None and page.steps_run for page in map(fleet.page, learners)),
        )  # fmt: skip
        wait_for_all([fleet], deadline_seconds=DEADLINE_SECONDS, each_tick=killer.tick)
    events = fleet.events()
    summary = fold(events, plan)
    assert summary.sync is not None
    assert (summary.sync.ledger_imbalance, summary.sync.learners_agree) == (0, True), summary.sync
    merges = [one for one in events if isinstance(one, ev.SyncMerged)]
    first = min(one.time for one in events if isinstance(one, ev.StepMetrics))
    seconds = merges[-1].time - first
    blocked = sum(
        sum(getattr(one.blocked_seconds, cause) for cause in ("snapshot", "barrier", "apply", "max_ahead"))
        for one in summary.learners
    )
    return Result(
        task=task, contender=contender, setting=setting, rounds=rounds, kills=killer.kills,
        loss=[one.loss for one in events if isinstance(one, ev.Validation)][-1],
        published_loss=published_loss(folder, plan=plan, merges=merges),
        samples_per_second=sum(one.ledger.merged for one in summary.learners) / seconds, seconds=seconds,
        blocked_share=blocked / (len(learners) * seconds),
        lost_samples=sum(one.ledger.lost for one in summary.learners),
        bytes_up=sum(one.bytes_in for one in merges),
    )  # fmt: skip


@torch.no_grad()
def published_loss(folder: Path, *, plan: Plan, merges: list[ev.SyncMerged]) -> float | None:
    """Of the last model that was published, on the samples on which the trainer validates."""
    assert plan.train is not None
    newest = next((one.model_sha256 for one in reversed(merges) if one.model_sha256), None)
    if newest is None:
        return None
    model, _ = load_model(folder / "sync" / "models" / f"{newest}{SUFFIX}")
    batch = held_out_batch(
        plan.home.data_manifest, count=SAMPLES, own=slice(None), train=plan.train, conditions=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    return float(batch.losses(model).double().mean())


class Killer:
    """SIGKILL of one learner after the other, every KILL_SECONDS from the moment all have begun."""

    def __init__(
        self, names: Sequence[str], *, with_kills: bool, kill: Callable[[str], bool], has_begun: Callable[[], bool]
    ) -> None:
        self._names, self._with_kills, self._kill, self._has_begun = names, with_kills, kill, has_begun
        self._next: float | None = None
        self.kills = 0

    def tick(self) -> None:
        """Called often."""
        if not self._with_kills:
            return
        now = time.monotonic()
        if self._next is None:
            self._next = now + KILL_SECONDS if self._has_begun() else None
        elif now >= self._next and self._kill(self._names[self.kills % len(self._names)]):
            self.kills, self._next = self.kills + 1, now + KILL_SECONDS


def make_torchft() -> Path:
    """The folder of programs of an environment with torchft."""
    programs, missing = make_environment("torchft", packages={"torchft": [["--no-deps", TORCHFT], [TORCHFT_NEEDS]]})
    if missing:
        raise RuntimeError(f"torchft cannot be installed: {missing['torchft']}")
    return programs


def torchft(folder: Path, *, programs: Path, task: str, rounds: int, with_kills: bool) -> Result:
    """A run of torchft: a lighthouse and a replica per learner, started again when killed."""
    train = train_config(task, rounds=rounds)
    sync = SyncConfig.model_validate({"inner_steps": INNER_STEPS, "outer_momentum": 0.5})
    plan = make_plan(folder, learners=dict.fromkeys(NAMES, 1), train=train, sync=sync, source=TASKS[task][0])
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    (folder / "task.json").write_text(json.dumps({
        "train": train.model_dump(mode="json"), "sync": sync.model_dump(mode="json", exclude_defaults=True),
        "lighthouse": f"http://127.0.0.1:{port}", "manifest": plan.home.data_manifest, "names": NAMES,
    }))  # fmt: skip
    lighthouse = subprocess.Popen(
        [programs / "torchft_lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"],
        stderr=subprocess.DEVNULL,
    )
    replicas: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str) -> None:
        with (folder / f"{name}.log").open("ab") as log:
            replicas[name] = subprocess.Popen(
                [programs / "python", str(Path(__file__).with_name("_torchft_learner.py")), str(folder / "task.json"),
                 str(NAMES.index(name))],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stderr=log, stdout=log,
            )  # fmt: skip

    def kill(name: str) -> bool:
        if replicas[name].poll() is not None:
            return False
        replicas[name].kill()
        return True

    def lines() -> list[dict[str, Any]]:
        texts = [path.read_text() for path in folder.glob("torchft-*.jsonl")]
        return sorted((json.loads(line) for text in texts for line in text.splitlines()), key=lambda one: one["time"])

    killer = Killer(
        NAMES,
        with_kills=with_kills,
        kill=kill,
        has_begun=lambda: len({one["replica"] for one in lines()}) == len(NAMES),
    )
    until = time.monotonic() + DEADLINE_SECONDS
    try:
        for name in NAMES:
            start(name)
        while not all(one.poll() == 0 for one in replicas.values()):
            killer.tick()
            for name, one in replicas.items():
                if one.poll() == -signal.SIGKILL:
                    start(name)
                elif one.poll():
                    raise RuntimeError(f"torchft's {name} ended: {(folder / f'{name}.log').read_text()[-3000:]}")
            if time.monotonic() > until:
                raise TimeoutError(f"torchft not finished after {DEADLINE_SECONDS:g} s; logs in {folder}")
            time.sleep(0.1)
    finally:
        for one in (*replicas.values(), lighthouse):
            one.kill()
            one.wait(20)
    said = lines()
    steps = [one for one in said if one["kind"] == "step"]
    reached = next(one["time"] for one in said if one["committed"] >= rounds * len(NAMES))
    seconds = reached - steps[0]["time"]
    final = [one for one in said if one["kind"] == "final"]
    blocked: dict[tuple[int, int], float] = {(one["replica"], one["pid"]): one["blocked"] for one in said}
    return Result(
        task=task, contender="torchft", setting="", rounds=rounds, kills=killer.kills,
        loss=final[-1]["loss"], published_loss=None,
        samples_per_second=train.samples / seconds, seconds=seconds,
        blocked_share=sum(blocked.values()) / (len(NAMES) * seconds), lost_samples=None, bytes_up=None,
    )  # fmt: skip


def settings(folder: Path, *, rounds: int, say: Callable[[Result], None]) -> None:
    """Codecs and averages, on the digits in decoupled mode, which all have one run with the defaults."""
    for name, sync in {
        "codec bf16": {"codec": "bf16"}, "codec int8": {"codec": "int8"}, "ema syncer": {"ema": "syncer"},
        "4 fragments": {"fragments": 4},
    }.items():  # fmt: skip
        where = folder / name.replace(" ", "-")
        say(ours(where, task="digits", contender="decoupled", rounds=rounds, with_kills=False, setting=name, **sync))


def main() -> int:
    """Run everything that was asked for, print a line for each, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--faults", nargs="+", choices=("none", "kills"), default=["none", "kills"])
    parser.add_argument("--no-settings", action="store_true", help="leave out codecs, averages and fragments")
    parser.add_argument("--folder", type=Path, help="where runs are kept (default: a temporary folder)")
    given = parser.parse_args()
    results: list[Result] = []

    def say(one: Result) -> None:
        results.append(one)
        print(
            f"{one.task:7s} {one.contender:14s} {one.setting:12s} kills {one.kills}  loss {one.loss:.4f}  "
            f"{one.samples_per_second:7.1f} merged samples/s  blocked {one.blocked_share:6.1%}  {one.seconds:5.0f} s",
            flush=True,
        )
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                 "load": os.getloadavg()[0], "inner_steps": INNER_STEPS}  # fmt: skip
        write_json(RESULTS, {**about, "runs": [asdict(one) for one in results]})

    with tempfile.TemporaryDirectory(prefix="gkr-bench-") as temporary:
        folder: Path = given.folder or Path(temporary)
        programs = make_torchft() if "torchft" in given.contenders else Path()
        for task in given.tasks:
            for faults in given.faults:
                for contender in given.contenders:
                    where = folder / f"{task}-{contender}-{faults}"
                    named: dict[str, Any] = {"task": task, "rounds": given.rounds, "with_kills": faults == "kills"}
                    say(torchft(where, programs=programs, **named) if contender == "torchft"
                        else ours(where, contender=contender, **named))  # fmt: skip
        if not given.no_settings:
            settings(folder, rounds=given.rounds, say=say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
