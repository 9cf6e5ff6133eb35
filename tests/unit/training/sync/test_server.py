"""The real syncer process on loopback with learners in threads: what a run looks like, and what it survives."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from spec.errors import EXIT_CONFIG, EXIT_REFUSED, UnreachableError
from spec.events import Note, SyncWaiting
from spec.sync import SyncConfig
from tests.builders.sync_world import (
    DEADLINE,
    LAYOUT,
    ROUND_SAMPLES,
    Server,
    ToyLearner,
    ema_of,
    make_plan,
    seed_weights,
    spawn_server,
    start_server,
    together,
    wait_until,
)
from tests.unit.training.sync.conftest import Join, Serve
from training.sync.adopt import LearnerSyncState, restart
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Layout
from training.sync.transport import SyncRefusedError

SHORT_LEASE = SyncConfig.model_validate(
    {"round_deadline": "20s", "lease": "1s", "heartbeat": "100ms", "outer_momentum": 0.5}
)


def theta_of(server: Server) -> bytes:
    """Bits of the committed weights, from the state file that HEAD names."""
    head = json.loads((server.folder / "sync/HEAD.json").read_text())
    return load_file(server.folder / "sync/states" / head["states"][0]["file"])["theta"].tobytes()


def pair(server: Server, learn: Join) -> tuple[ToyLearner, ToyLearner]:
    east, west = learn(server, "east", ranks=2), learn(server, "west")
    together(east.join, west.join)
    return east, west


def meet(*learners: ToyLearner) -> None:
    """A round in which all have sent before the first one asks for its verdict, which is when the deadline begins."""
    for one in learners:
        one.run()
    sent = [(one, one.upload()) for one in learners]
    together(*(lambda one=one, what=what: one.take(one.clients[0].commit(what)) for one, what in sent))


def test_five_rounds_leave_all_learners_with_the_same_bits(serve: Serve, learn: Join) -> None:
    server = serve()
    east, west = pair(server, learn)
    together(east.finish, west.finish)
    assert [one.kind for one in east.verdicts] == ["merged"] * 5
    assert east.theta.tobytes() == west.theta.tobytes() == theta_of(server)
    assert east.fingerprints == west.fingerprints
    status = east.clients[0].status()
    assert (status.version, status.state, status.final, status.samples_total) == (5, "FINAL", True, 400)
    assert {one.round: one.theta_sha256 for one in server.merges()} == east.fingerprints
    assert server.ledger().merged == {"east": 200, "west": 200}
    assert [one.final for one in server.merges()] == [False] * 4 + [True]
    assert server.ledger().final
    assert server.terminate() == 0


def test_each_merge_publishes_the_averaged_model(serve: Serve, learn: Join) -> None:
    server = serve()
    east, west = pair(server, learn)
    before = east.theta
    assert before.tobytes() == seed_weights().tobytes()
    locals_: list[np.ndarray] = []
    for one in (east, west):
        one.run()
        locals_.append(before + (ema_of(one.theta) - before))
    together(*(lambda one=one: one.take(one.clients[0].commit(one.upload())) for one in (east, west)))
    digest = server.merges()[-1].model_sha256
    connection = http.client.HTTPConnection(server.bulk, timeout=DEADLINE)
    connection.request("GET", f"/v1/{server.plan.run}/models/{digest}")
    response = connection.getresponse()
    path = server.folder / "model.safetensors"
    path.write_bytes(response.read())
    connection.close()
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        assert set(file.keys()) == set(LAYOUT.shapes())
        scale = file.get_tensor("scale")
        weight = file.get_tensor("head.weight")
    assert server.plan.train is not None
    assert metadata == {"config": server.plan.train.model.model_dump_json(), "version": "1", "experiment": "toy"}
    mean = (locals_[0] * 0.5 + locals_[1] * 0.5)[LAYOUT.offset("head.weight") :][:35].reshape(7, 5)
    assert scale.shape == ()
    np.testing.assert_array_equal(weight, mean)


def test_a_syncer_killed_in_an_open_round_comes_back_and_nothing_is_lost(
    serve: Serve, learn: Join, tmp_path: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    server = serve()
    east, west = pair(server, learn)
    together(east.round, west.round)
    west.run()

    def die_while_east_waits() -> Server:
        wait_until(lambda: west.clients[0].status().arrived == ["east"])
        server.kill()
        restarted = serve(again=server)
        # East's parts died with the syncer: both of its ranks notice and send them again without being told.
        wait_until(lambda: west.clients[0].status().arrived == ["east"])
        west.take(west.clients[0].commit(west.upload()))
        return restarted

    _, again = together(east.round, die_while_east_waits)
    assert isinstance(again, Server)
    together(east.finish, west.finish)
    assert east.theta.tobytes() == west.theta.tobytes() == theta_of(again)
    assert again.ledger().merged == {"east": 200, "west": 200}
    assert [one.round for one in again.merges()] == [1, 2, 3, 4, 5]
    assert again.merges()[-1].epoch == 2
    calm = Server(undisturbed, make_plan(undisturbed), spawn_server(undisturbed, make_plan(undisturbed)), "", "")
    try:
        wait_until(lambda: (undisturbed / "syncer.json").exists())
        found = json.loads((undisturbed / "syncer.json").read_text())
        calm.control, calm.bulk = found["control"], found["bulk"]
        others = pair(calm, learn)
        together(others[0].finish, others[1].finish)
        assert theta_of(calm) == theta_of(again)
    finally:
        calm.kill()


def test_contributions_sent_twice_count_once(serve: Serve, learn: Join) -> None:
    server = serve()
    east, west = pair(server, learn)
    east.run()
    west.run()
    first, second = east.upload(), west.upload()
    extra = learn(server, "east").clients[0]
    answers = together(
        lambda: east.clients[0].commit(first), lambda: extra.commit(first), lambda: west.clients[0].commit(second)
    )
    assert answers[0] == answers[1]
    assert east.clients[0].commit(first) == answers[0]
    assert server.ledger().merged == {"east": ROUND_SAMPLES, "west": ROUND_SAMPLES}


def test_a_late_joiner_takes_the_shared_weights_and_the_next_round(serve: Serve, learn: Join, tmp_path: Path) -> None:
    config = SHORT_LEASE.model_copy(update={"round_deadline": 5.0, "lease": 20.0})
    server = serve(make_plan(tmp_path, config=config))
    east = learn(server, "east")
    east.join()
    assert east.round().round_members == ["east"]
    west = learn(server, "west")
    west.join()
    assert west.step.base_version == 1
    assert west.theta.tobytes() == east.theta.tobytes()
    meet(east, west)
    assert east.verdicts[-1].round_members == ["east", "west"]


def test_a_learner_that_falls_silent_is_not_waited_for(serve: Serve, learn: Join, tmp_path: Path) -> None:
    config = SHORT_LEASE.model_copy(update={"lease": 8.0})
    server = serve(make_plan(tmp_path, config=config))
    east, west = pair(server, learn)
    together(east.round, west.round)
    west.close()
    assert east.round().round_members == ["east"]
    assert any("west has been silent" in one.text for one in server.events() if isinstance(one, Note))
    back = learn(server, "west")
    found = back.join()
    assert (found.generation, found.last_seq, found.cursor) == (2, 1, ROUND_SAMPLES)
    assert restart(LearnerSyncState(fragments=(west.step,)), registration=found).mode == "exact"


def test_a_late_learner_carries_its_progress_into_the_next_round(serve: Serve, learn: Join, tmp_path: Path) -> None:
    config = SHORT_LEASE.model_copy(update={"round_deadline": 5.0, "lease": 20.0})
    server = serve(make_plan(tmp_path, config=config))
    east, west = pair(server, learn)
    west.run()
    progress = west.theta - west.anchor
    assert east.round().round_members == ["east"]
    verdict = west.take(west.clients[0].commit(west.upload()))
    assert (verdict.kind, west.step.pending_samples) == ("late", ROUND_SAMPLES)
    np.testing.assert_allclose(west.theta, east.theta + progress, atol=1e-6)
    meet(east, west)
    assert west.verdicts[-1].kind == "merged"
    assert server.ledger().merged == {"east": 2 * ROUND_SAMPLES, "west": 2 * ROUND_SAMPLES}
    assert west.theta.tobytes() == east.theta.tobytes()


def test_no_process_can_seed_a_run_that_has_weights(serve: Serve, learn: Join) -> None:
    server = serve()
    east, west = pair(server, learn)
    assert west.registration is not None
    assert east.registration is not None
    with pytest.raises(SyncRefusedError, match="only learner 'east' seeds"):
        west.clients[0].put_seed(seed_weights(), generation=west.registration.generation)
    with pytest.raises(SyncRefusedError, match="version 0 is committed"):
        east.clients[0].put_seed(seed_weights() + 1, generation=east.registration.generation)
    weights = seed_weights()
    east.clients[0].put_seed(weights, generation=east.registration.generation, ema=ema_of(weights))
    assert east.clients[0].status().version == 0
    fresh = learn(server, "east")
    assert not fresh.join().seed_needed
    with pytest.raises(SyncRefusedError, match="newer process"):
        east.clients[0].put_seed(weights, generation=east.registration.generation)


def test_of_two_syncers_on_one_store_exactly_one_commits(serve: Serve, learn: Join) -> None:
    first = serve()
    east, west = pair(first, learn)
    together(east.round, west.round)
    other_folder = first.folder / "other"
    other_folder.mkdir()
    second = spawn_server(other_folder, first.plan)
    try:
        assert first.process.wait(DEADLINE) == EXIT_REFUSED
        log = (first.folder / "syncer.log").read_text()
        assert "another syncer has taken over this run (epoch 2, mine is 1)" in log
        wait_until(lambda: (other_folder / "syncer.json").exists())
        found = json.loads((other_folder / "syncer.json").read_text())
        client = SyncClient(found["control"], bulk=found["bulk"], run=first.plan.run, learner="east", layout=LAYOUT)
        assert client.status().epoch == 2
        assert client.fetch(1).tobytes() == east.theta.tobytes()
        client.close()
    finally:
        second.kill()
        second.wait(DEADLINE)


def test_a_restarted_learner_whose_contribution_waits_goes_on_after_the_merge(serve: Serve, learn: Join) -> None:
    server = serve()
    east, west = pair(server, learn)
    checkpoint = east.step
    east.run()
    contribution = east.upload()
    waiting = learn(server, "east").clients[0]
    back = learn(server, "east")

    def come_back() -> None:
        wait_until(lambda: back.clients[0].status().arrived == ["east"])
        found = back.clients[0].register(contract_hash(server.plan), world_size=1)
        assert restart(LearnerSyncState(fragments=(checkpoint,)), registration=found).mode == "wait"
        west.round()
        back.clients[0].wait_version(found.version + 1)
        found = back.clients[0].register(contract_hash(server.plan), world_size=1)
        decision = restart(LearnerSyncState(fragments=(checkpoint,)), registration=found)
        assert (decision.mode, decision.state.cursor) == ("shared", ROUND_SAMPLES)
        assert decision.state.fragments[0].base_version == 1

    verdict, _ = together(lambda: waiting.commit(contribution), come_back)
    assert getattr(verdict, "kind", "") == "fenced"
    assert server.ledger().merged == {"east": ROUND_SAMPLES, "west": ROUND_SAMPLES}
    wait_until(lambda: east.clients[0].fenced)


def test_waiting_in_vain_ends_with_the_name_of_who_is_missing(serve: Serve, learn: Join) -> None:
    server = serve()
    east, _ = pair(server, learn)
    impatient = SyncClient(
        server.control, bulk=server.bulk, run=server.plan.run, learner="east", layout=LAYOUT,
        barrier_timeout_seconds=0.5, slice_seconds=0.2,
    )  # fmt: skip
    east.run()
    with pytest.raises(UnreachableError, match="round 1 has east and waits for west"):
        impatient.commit(east.upload())
    impatient.close()
    waits = [one for one in server.events() if isinstance(one, SyncWaiting)]
    assert (waits[-1].arrived, waits[-1].waiting_for) == (["east"], ["west"])
    assert waits[-1].deadline is not None


def test_wrong_run_contract_layout_and_learner_are_refused_with_the_reason(serve: Serve) -> None:
    server = serve()
    contract = contract_hash(server.plan)

    def refuse(
        reason: str, *, run: str = "r1", learner: str = "east", layout: Layout = LAYOUT, terms: str = contract
    ) -> None:
        client = SyncClient(server.control, bulk=server.bulk, run=run, learner=learner, layout=layout)
        try:
            with pytest.raises(SyncRefusedError) as caught:
                client.register(terms, world_size=1)
            assert caught.value.reason == reason
        finally:
            client.close()

    refuse("unknown_run", run="other")
    refuse("contract", terms="x")
    refuse("unknown_learner", learner="mars")
    first = SyncClient(server.control, bulk=server.bulk, run="r1", learner="east", layout=LAYOUT)
    first.register(contract, world_size=1)
    first.close()
    refuse("layout", layout=Layout.from_shapes({"w": [3]}))


def test_two_runs_on_one_host_with_equal_learner_names_do_not_mix(tmp_path: Path, learn: Join) -> None:
    """Whoever comes to the other run's ports is told so, whatever its name; each run is what it is alone."""
    momenta = {"r1": 0.5, "r2": 0.9}

    def begin(place: str, run: str) -> Server:
        config = SHORT_LEASE.model_copy(update={"outer_momentum": momenta[run], "lease": 20.0})
        (tmp_path / place).mkdir()
        return start_server(tmp_path / place, make_plan(tmp_path / place, run=run, config=config))

    servers = {place: begin(place, place[:2]) for place in ("r1", "r2", "r1-alone", "r2-alone")}
    try:
        for run in momenta:
            east, west = pair(servers[f"{run}-alone"], learn)
            together(east.finish, west.finish)
        learners = [one for run in momenta for one in pair(servers[run], learn)]
        for run, other in (("r1", "r2"), ("r2", "r1")):
            client = SyncClient(
                servers[other].control, bulk=servers[other].bulk, run=run, learner="east", layout=LAYOUT
            )
            with pytest.raises(SyncRefusedError, match=rf"serves run '{other}', not '{run}'"):
                client.register(contract_hash(servers[run].plan), world_size=1)
            part = np.ones(LAYOUT.total, np.float32)
            with pytest.raises(SyncRefusedError, match=rf"serves run '{other}', not '{run}'"):
                client.put_part(part, ema=part, ranges=LAYOUT.whole, generation=1, seq=1, rank=0)
            client.close()
        together(*(one.finish for one in learners))
        found = {place: (theta_of(server), server.ledger().merged) for place, server in servers.items()}
        assert found["r1"] == found["r1-alone"]
        assert found["r2"] == found["r2-alone"]
        assert found["r1"][0] != found["r2"][0]
        assert all(one.registration is not None and one.registration.generation == 1 for one in learners)
    finally:
        for server in servers.values():
            server.kill()


def test_ports_that_are_taken_end_the_start_with_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as blocker:
        port = blocker.getsockname()[1]
        process = spawn_server(tmp_path, make_plan(tmp_path), "--control-port", str(port))
        assert process.wait(DEADLINE) == EXIT_CONFIG
    log = (tmp_path / "syncer.log").read_text()
    assert f"the syncer's control port {port} on 127.0.0.1 is taken by another process" in log
    assert "hint: end what listens there" in log
    assert "Traceback" not in log
    assert not (tmp_path / "sync").exists()


def test_an_unreadable_plan_and_a_foreign_store_end_the_start(tmp_path: Path, serve: Serve) -> None:
    serve(make_plan(tmp_path)).terminate()
    process = spawn_server(tmp_path, make_plan(tmp_path, run="another"))
    assert process.wait(DEADLINE) == EXIT_CONFIG
    assert "the store belongs to run 'r1', not to 'another'" in (tmp_path / "syncer.log").read_text()
    other = make_plan(tmp_path).model_copy(update={"syncer": None})
    process = spawn_server(tmp_path, other)
    assert process.wait(DEADLINE) == EXIT_CONFIG
    assert "has no syncer" in (tmp_path / "syncer.log").read_text()


def test_nothing_of_a_killed_syncer_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    server = start_server(tmp_path, make_plan(tmp_path), environment={"TMPDIR": f"{temporary}"})
    server.kill()
    assert not list(temporary.iterdir())


def test_the_syncer_dies_with_its_parent(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    endpoints = tmp_path / "syncer.json"
    script = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-m', 'training.sync.server', *sys.argv[1:]]).wait()"
    )
    arguments = ["--plan", tmp_path / "plan.json", "--endpoints", endpoints, "--events", tmp_path / "events.jsonl"]
    parent = subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stderr=subprocess.DEVNULL)
    try:
        wait_until(endpoints.exists)
        pid = json.loads(endpoints.read_text())["pid"]
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(DEADLINE)

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(gone)


def test_the_syncer_imports_no_torch() -> None:
    modules = "training.sync.server, training.sync.client, training.sync.adopt"
    code = f"import sys, {modules}; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout.split() == ["False", "False"]
