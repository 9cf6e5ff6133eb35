"""The digits experiment in real pods, and what may be taken away from it; a person's own command on every node.

On the bed only: pods need its lean image, and the second region and the link are its own. Minutes each, because a Ray
cluster starts, loses a part and starts again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gkr.cluster.connection import Connection
from gkr.main import main
from gkr.runs import FINAL, read_state
from gkr.syncing.asking import look as look_at_sync
from spec.errors import EXIT_OK
from spec.names import LONGEST_NAME
from spec.summary import Summary
from tests.builders.cluster_experiments import Look, delete_pod, launch
from tools.bed.layout import bed

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "recipes" / "digits.yaml"
START_SECONDS = 420.0
"""From launch to the first merged round, on a busy machine."""
ROUND_SECONDS = 240.0
END_SECONDS = 600.0
CUT_SECONDS = 60.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0 or bool(os.environ.get("KUBECONFIG")), reason="needs the bed's own image"),
]


def _bed(*arguments: str) -> str:
    command = [sys.executable, "-m", "tools.bed", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def second_region(place: Path) -> Iterator[None]:
    """A second cluster behind a link; taken down again so that the tests after this one have the machine."""
    del place
    _bed("up", "--regions", "2")
    assert main(["clusters", "add", "bed-1", "--kubeconfig", f"{bed(1).kubeconfig}"]) == EXIT_OK
    try:
        yield
    finally:
        _bed("link", "mend")
        _bed("up", "--regions", "1")


def _holds(summary: Summary, *, rounds: int) -> None:
    assert summary.status == "succeeded"
    assert summary.sync is not None
    assert summary.sync.ledger_imbalance == 0
    assert summary.sync.learners_agree
    assert summary.sync.rounds >= rounds
    assert summary.evaluation is not None
    assert summary.evaluation.samples > 0
    assert {"encoder", "sampler", "judge"} <= set(summary.services)
    assert summary.preflight.failed == 0


@pytest.mark.usefixtures("place")
def test_digits_loses_a_worker_pod_and_then_its_head_and_succeeds(connection: Connection) -> None:
    # So many that the other learner does not finish alone while one gets a new head and its services a machine.
    run = launch(DIGITS, clusters="bed", overrides=["train.samples=100000"])
    try:
        look = Look(run)
        look.until("two rounds", lambda _: look.rounds() >= 2, seconds=START_SECONDS)
        asked = look_at_sync(run)
        assert (asked.source, asked.trouble) == ("syncer", ""), "asked in the syncer's pod, with the run's keys"
        assert asked.status.version >= 2
        delete_pod(connection, run=run, learner="west", role="trainer")
        look.until("step of west's second attempt", lambda _: look.stepped("west", attempt=2), seconds=ROUND_SECONDS)
        before = look.attempts("east")
        delete_pod(connection, run=run, learner="east", role="head")
        look.until("step after east's head", lambda _: look.stepped("east", attempt=before + 1), seconds=ROUND_SECONDS)
        summary = look.summary(seconds=END_SECONDS)
        _holds(summary, rounds=8)
        restarts = {one.name: one.restarts for one in summary.learners}
        assert restarts["east"] >= 1
        assert restarts["west"] >= 1
        assert {one.learner for one in summary.recoveries} >= {"east", "west"}
    finally:
        assert main(["cancel", run.name, "--now"]) == EXIT_OK


@pytest.mark.usefixtures("place")
def test_digits_decoupled_loses_its_syncer_half_way_and_succeeds(connection: Connection) -> None:
    overrides = ["train.samples=40000", "sync.mode=decoupled", "sync.fragments=2", "sync.codec=bf16"]
    run = launch(DIGITS, clusters="bed", overrides=overrides)
    try:
        look = Look(run)
        look.until("four merges", lambda _: look.rounds() >= 4, seconds=START_SECONDS)
        delete_pod(connection, run=run, role="syncer")
        before = look.rounds()
        look.until("merges by the next syncer", lambda _: look.rounds() >= before + 2, seconds=ROUND_SECONDS)
        _holds(look.summary(seconds=END_SECONDS), rounds=8)
    finally:
        assert main(["cancel", run.name, "--now"]) == EXIT_OK


@pytest.mark.usefixtures("second_region")
def test_digits_across_two_regions_succeeds_though_their_link_is_cut_for_a_minute() -> None:
    run = launch(DIGITS, clusters="bed,bed-1", overrides=["train.samples=80000"])
    try:
        look = Look(run)
        look.until("two rounds", lambda _: look.rounds() >= 2, seconds=START_SECONDS)
        _bed("link", "cut")
        look.for_at_least(CUT_SECONDS)
        at_mending = look.rounds()
        _bed("link", "mend")
        summary = look.summary(seconds=END_SECONDS)
        _holds(summary, rounds=at_mending + 1)
        assert {one.cluster for one in summary.learners} == {"bed", "bed-1"}
    finally:
        assert main(["cancel", run.name, "--now"]) == EXIT_OK


NASTY = {
    "DOLLAR": "$HOME $$ $(PATH) ${X}",
    "QUOTES": 'it\'s "quoted"',
    "BACKTICKS": "`id` \\ back",
    "LINES": "one\ntwo\n\n three",
    "COLON": "a: b",
    "EQUALS": "x=y==z",
    "WORDS": "größe 模型 ✓",
}
SCRIPT = """
python3 - <<'END'
import json, os
own = {name: value for name, value in os.environ.items() if name.startswith("GKR_")}
print("SAW " + json.dumps({**{name: os.environ.get(name) for name in %r}, **own}))
END
cat <<"RAW"
raw: $HOME `id` 'single' "double" \\n
RAW
test "$GKR_NODE_RANK" -lt "$GKR_NODES"
"""


def test_a_command_runs_once_on_every_node_with_its_environment_byte_for_byte(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest name that fits, two nodes, values and a script that a careless renderer would break."""
    name = ("n" * LONGEST_NAME)[: LONGEST_NAME - 20]
    script = textwrap.indent(SCRIPT % sorted(NASTY), "  ")
    group = "{name: trainer, nodes: 2, resources: {cpu: 100m, memory: 512Mi, shm: 64Mi}}"
    text = f"version: 1\nname: {name}\ngroups: [{group}]\nenv: {json.dumps(NASTY)}\nrun: |\n{script}"
    (place / "own.yaml").write_text(text)
    run = launch(place / "own.yaml", clusters="bed")
    try:
        Look(run).until("end", lambda _: read_state(run.path).status in FINAL, seconds=START_SECONDS)
        capsys.readouterr()
        assert main(["logs", run.name, "--all"]) == EXIT_OK
        lines = capsys.readouterr().out.splitlines()
        seen = [json.loads(line.partition("SAW ")[2]) for line in lines if "SAW " in line]
        assert len(seen) == 2
        for one in seen:
            assert {key: one[key] for key in NASTY} == NASTY
            assert one["GKR_NODES"] == "2"
        assert sorted(one["GKR_NODE_RANK"] for one in seen) == ["0", "1"]
        assert len({one["GKR_MASTER_ADDR"] for one in seen}) == 1
        assert sum("raw: $HOME `id` 'single' \"double\" \\n" in line for line in lines) == 2
    finally:
        assert main(["cancel", run.name, "--now"]) == EXIT_OK
