"""What the real syncer shows while it serves: its status as `gkr` reads it, and its metrics."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gkr.local.asking import ask_local_syncer
from gkr.runs import Run
from gkr.sync_keys import SYNCER, write_keys
from spec.errors import EXIT_CONFIG, EXIT_UNREACHABLE, UnreachableError
from spec.sync_keys import ENVIRONMENT, SyncKeys
from spec.sync_status import SyncStatus, ask_syncer
from tests.builders.sync_world import DEADLINE, ROOT, Server, make_plan, start_server, together, wait_until
from tests.unit.training.sync.conftest import Join, Serve


def ask(server: Server, path: str, *, keys: SyncKeys | None = None) -> bytes:
    return ask_syncer(server.control, run=server.plan.run, path=path, keys=keys, timeout_seconds=DEADLINE)


def read(server: Server) -> SyncStatus:
    return SyncStatus.read_json(ask(server, "status"))


def test_status_and_metrics_show_the_round_that_waits_and_the_one_that_was_merged(serve: Serve, learn: Join) -> None:
    server = serve()
    east, west = learn(server, "east"), learn(server, "west")
    together(east.join, west.join)
    together(east.round, west.round)
    waiting = threading.Thread(target=east.round)
    waiting.start()
    wait_until(lambda: read(server).fragments[0].arrived == ["east"])
    status = read(server)
    (fragment,) = status.fragments
    assert (fragment.version, fragment.round, fragment.arrived, fragment.waiting_for) == (1, 2, ["east"], ["west"])
    assert "west" in fragment.why
    assert fragment.until is not None
    assert fragment.outer_gradient_norm > 0
    assert {one.learner: one.merged_samples for one in status.members} == {"east": 40, "west": 40}

    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(ask(server, "metrics").decode())
        for sample in family.samples
    }
    assert found["gkr_sync_merges_total",] == 1
    assert found["gkr_sync_merge_seconds_count",] == 1
    assert found["gkr_sync_participants_sum",] == 2
    assert found["gkr_sync_contributions_total", "merged"] == 2
    for name in ("bytes_in_total", "bytes_out_total", "transfer_rate"):
        assert found[f"gkr_sync_{name}", "east"] > 0, name
    assert found["gkr_sync_publish_seconds_count",] == 1
    assert found["gkr_sync_state_bytes", "0"] > 0
    assert found["gkr_sync_displacement_norm", "0", "west"] > 0
    assert 0 < found["gkr_sync_duty_cycle",] < 1
    assert found["gkr_sync_outer_gradient_norm", "0"] == pytest.approx(fragment.outer_gradient_norm)
    west.round()
    waiting.join(timeout=DEADLINE)
    assert not waiting.is_alive()


def _ask_in_pod(folder: Path, *, path: str, keys: Path) -> subprocess.CompletedProcess[bytes]:
    pod = {"GKR_RUN_DIR": f"{folder}", "GKR_PLAN": f"{folder / 'plan.json'}", ENVIRONMENT: f"{keys}"}
    command = [sys.executable, "-m", "training.sync.ask", path]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **pod}, capture_output=True, timeout=DEADLINE, check=False
    )


def test_a_process_in_the_syncers_pod_may_ask_it_and_nobody_without_the_runs_keys(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    write_keys(tmp_path / "keys", plan=plan)
    own = tmp_path / "keys" / SYNCER
    server = start_server(tmp_path, plan)
    try:
        answer = _ask_in_pod(tmp_path, path="status", keys=own)
        assert answer.returncode == 0, answer.stderr
        assert SyncStatus.read_json(answer.stdout).state == "SEEDING"
        assert b"gkr_sync_epoch 1.0" in _ask_in_pod(tmp_path, path="metrics", keys=own).stdout
        state = tmp_path / "run" / "state"
        shutil.copytree(tmp_path / "keys", state / "keys")
        shutil.copy(tmp_path / "syncer.json", state)
        here = ask_local_syncer(Run("toy", plan.run, tmp_path / "run", created=0.0), path="status")
        assert SyncStatus.read_json(here).run == plan.run
        with pytest.raises(UnreachableError, match="TLS only"):
            ask(server, "status")
        write_keys(tmp_path / "strangers", plan=plan)
        refused = _ask_in_pod(tmp_path, path="status", keys=tmp_path / "strangers" / SYNCER)
        assert (refused.returncode, refused.stdout) == (EXIT_UNREACHABLE, b"")
    finally:
        server.kill()
    wait_until(lambda: server.process.poll() is not None)
    (tmp_path / "syncer.json").unlink()
    early = _ask_in_pod(tmp_path, path="status", keys=own)
    assert early.returncode == EXIT_CONFIG
    assert b"does not serve yet" in early.stderr
