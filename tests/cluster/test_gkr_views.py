"""What `gkr` shows of a real cluster: why, gpus, nodes, queues, logs, exec. KUBECONFIG if given, else the bed.

The waiting cases need the bed's fake nodes (FAKE="a3-ultra=64,a3-mega=32"): 64 nodes of 8 H200, 32 of 8 H100-MEGA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from gkr.cluster.connection import Connection, connect
from gkr.cluster.logs_reading import Follower, Request
from gkr.cluster.places import LearnerPlace, Places
from gkr.cluster.registry import cached_facts, read_registry
from gkr.main import main
from gkr.runs import find_run
from spec.errors import EXIT_NOT_FOUND, EXIT_OK

NAME = "views"
WAIT_SECONDS = 180.0
IMAGE_SECONDS = 60.0
GPUS_SECONDS = 3.0
TRIES = 5

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> Path:
    """A folder with the cluster added."""
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path / 'gkr'}")
    monkeypatch.setenv("GKR_RUNS", f"{tmp_path / 'runs'}")
    monkeypatch.chdir(tmp_path)
    assert main(["clusters", "add", NAME, "--kubeconfig", f"{kubeconfig}"]) == EXIT_OK
    return tmp_path


@pytest.fixture
def connection(place: Path) -> Iterator[Connection]:
    del place
    with closing(connect(read_registry().entries[NAME])) as found:
        yield found


@pytest.fixture
def fake_nodes(connection: Connection) -> None:
    """Skips where the fake nodes are missing or others use them."""
    pools = {pool.machine: pool.nodes for pool in cached_facts(read_registry().entries[NAME]).pools}
    if pools.get("a3-ultra", 0) != 64 or pools.get("a3-mega", 0) != 32:
        pytest.skip('needs the bed with FAKE="a3-ultra=64,a3-mega=32"')
    _wait("free GPUs", lambda: all(one["used"] == 0 for one in _json("gpus", "--cluster", NAME)[NAME]))


def _json(*arguments: str) -> Any:
    """What a command says in JSON, in a process of its own as a person starts it."""
    done = _gkr(*arguments, "-o", "json")
    assert done.returncode == EXIT_OK, done.stderr
    return json.loads(done.stdout)


def _gkr(*arguments: str, stdin: str | None = None, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gkr", *arguments]
    given: dict[str, Any] = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).resolve().parents[2]}"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=seconds, env=environment, **given
    )


def _why(experiment: str) -> dict[str, Any]:
    (verdict,) = _json("why", experiment)["verdicts"]
    return verdict


def _wait(what: str, done: Callable[[], bool], *, seconds: float = WAIT_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"no {what} within {seconds:g} s"
        time.sleep(0.5)


@contextmanager
def _launched(name: str, *, gpu: str = "", nodes: int = 1, run: str = "sleep 3600", **more: str) -> Generator[str]:
    """An experiment on the cluster; cancelled afterwards."""
    resources = f"gpu: {gpu}" if gpu else "cpu: 100m, memory: 512Mi, shm: 64Mi"
    document = {
        "version": 1,
        "name": name,
        "groups": [{"name": "trainer", "nodes": nodes, "resources": yaml.safe_load(f"{{{resources}}}")}],
        "run": run,
        "timeouts": {"grace": "2s"},
        **more,
    }
    Path(f"{name}.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    assert main(["launch", f"{name}.yaml", "--cluster", NAME, "-d"]) == EXIT_OK
    own = find_run(name).name
    try:
        yield own
    finally:
        main(["cancel", own, "--now"])


@contextmanager
def _pods(connection: Connection, documents: list[dict[str, Any]]) -> Generator[None]:
    """Pods of the test's own, gone afterwards."""
    for one in documents:
        connection.create({"apiVersion": "v1", "kind": "Pod", **one})
    try:
        yield
    finally:
        for one in documents:
            own = one["metadata"]
            connection.delete("Pod", own["name"], namespace=own["namespace"], grace_seconds=0)


@pytest.mark.usefixtures("fake_nodes")
def test_the_second_experiment_waits_and_why_says_who_holds_what_and_what_frees_it() -> None:
    with _launched("large", gpu="H200:8", nodes=64) as large:
        _wait("512 GPUs in use", lambda: _gpus("H200")["used"] == 512)
        assert _gpus("H200")["holders"] == {f"large ({large})": 512}
        with _launched("second", gpu="H200:8", nodes=2) as second:
            _wait("verdict on quota", lambda: _why("second")["level"] == 3 and bool(_why("second")["numbers"]))
            found = _why("second")
            assert (found["level_name"], found["remedy"]) == ("quota", "wait")
            assert found["numbers"]["more_needed"] == 16
            assert (found["numbers"]["quota"], found["numbers"]["used"]) == (512, 512)
            assert 1 <= found["numbers"]["position"] <= found["numbers"]["waiting"]
            assert f"large ({large}) 512 GPUs" in found["evidence"][1]
            assert f"wait until large ({large}) ends" in found["action"]
            (queue,) = _json("queues", "--cluster", NAME)[NAME]
            assert (f"large ({large})", 512) in [(one["who"], one["gpus"]) for one in queue["holding"]]
            assert (f"second ({second})", 16) in [(one["who"], one["gpus"]) for one in queue["waiting"]]


@pytest.mark.usefixtures("fake_nodes")
def test_eight_free_gpus_on_four_nodes_are_shown_as_scattered(connection: Connection) -> None:
    with _pods(connection, [_holder(at, gpus=6 if at < 4 else 8) for at in range(32)]):
        _wait("8 free GPUs", lambda: _gpus("H100-MEGA")["free"] == 8)
        assert _gpus("H100-MEGA")["largest_on_node"] == 2
        with _launched("frag", gpu="H100-MEGA:8"):
            _wait("verdict", lambda: "scattered" in _why("frag")["verdict"])
            found = _why("frag")
            assert (
                "8 H100-MEGA are free, but scattered: at most 2 on one node, 8 are asked for on one" in found["verdict"]
            )
            assert (found["numbers"]["free"], found["numbers"]["largest_on_node"]) == (8, 2)
            assert found["numbers"]["nodes_with_free"] == 4
            assert "holds (views)" in found["evidence"][1]
            assert "`resources: {gpu: H100-MEGA:2}`" in found["action"]


@pytest.mark.usefixtures("place")
def test_an_image_that_does_not_exist_is_reported_within_a_minute_in_the_runtimes_own_words() -> None:
    with _launched("noimage", image="localhost/gkr/no-such-image:1") as run:
        _wait("verdict on the image", lambda: _why("noimage")["level_name"] == "started", seconds=IMAGE_SECONDS)
        _wait("the runtime's words", lambda: "runtime:" in "".join(_why("noimage")["evidence"]), seconds=IMAGE_SECONDS)
        found = _why("noimage")
        assert found["verdict"].startswith("image localhost/gkr/no-such-image:1: ")
        assert "no-such-image" in found["evidence"][0]
        assert found["remedy"] in {"change", "admin"}
        text = _gkr("why", run).stdout
        assert len(text.splitlines()) <= 6, text


@pytest.mark.usefixtures("fake_nodes")
def test_gpus_are_shown_in_time() -> None:
    """The best of a few: one alone says how busy the machine is."""
    fastest = float("inf")
    for _ in range(TRIES):
        started = time.monotonic()
        found = _json("gpus", "--cluster", NAME)[NAME]
        fastest = min(fastest, time.monotonic() - started)
        for one in found:
            assert one["total"] == one["free"] + one["used"] + one["broken"]
        assert {one["gpu"]: one["total"] for one in found} == {"H200": 512, "H100-MEGA": 256}
        if fastest < GPUS_SECONDS:
            return
    pytest.fail(f"gkr gpus took {fastest:.1f} s at best")


@pytest.mark.usefixtures("fake_nodes")
def test_a_cordoned_node_is_broken(connection: Connection) -> None:
    connection.patch("Node", "gke-a3-mega-5", {"spec": {"unschedulable": True}})
    try:
        assert _gpus("H100-MEGA")["broken_nodes"] == {"gke-a3-mega-5": "cordoned"}
        (node,) = _json("nodes", "--cluster", NAME, "--broken")[NAME]
        assert (node["name"], node["machine"], node["gpus"], node["state"]) == (
            "gke-a3-mega-5",
            "a3-mega",
            8,
            "cordoned",
        )
    finally:
        connection.patch("Node", "gke-a3-mega-5", {"spec": {"unschedulable": None}})


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_logs_and_exec_of_a_run() -> None:
    """A whole run of two pods: Ray's start, the driver, two commands of a minute."""
    script = 'for i in $(seq 1 30); do echo "line $i of $GKR_NODE_RANK"; sleep 2; done'
    with _launched("talks", nodes=2, run=script) as run:
        with _following(run, "--rank", "1") as follower:
            _wait("rank 1", lambda: "line 1 of 1" in _gkr("logs", run, "--rank", "1").stdout)
            said = _gkr("exec", run, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
            assert (said.returncode, said.stdout, said.stderr) == (7, "out\n", "err\n")
            assert _gkr("exec", run, "-i", "--role", "head", "--", "cat", stdin="piped").stdout == "piped"
            assert _gkr("exec", run, "--", "no-such-command").returncode == EXIT_NOT_FOUND
            # The nodes start on their own: what rank 1 has said tells nothing of how far rank 0 is.
            _wait("rank 0", lambda: "line 2 of 0" in _gkr("logs", run, "--rank", "0").stdout)
            last = _gkr("logs", run, "--rank", "0", "--grep", "line [12] of")
            assert last.stdout == "talks/rank-0#1 | line 1 of 0\ntalks/rank-0#1 | line 2 of 0\n"
            stdout, _ = follower.communicate(timeout=WAIT_SECONDS)
        assert follower.returncode == EXIT_OK
        assert stdout.splitlines() == [f"talks/rank-1#1 | line {at} of 1" for at in range(1, 31)]
        _wait("pods to go", lambda: _gkr("exec", run, "--", "true").returncode == EXIT_NOT_FOUND)
        gone = _gkr("logs", run, "--rank", "0", "--tail", "1")
        assert gone.stdout == "talks/rank-0#1 | line 30 of 0\n"
        assert _why(run)["remedy"] == "none"


def test_late_pods_and_restarted_containers_join_and_no_line_is_lost_or_comes_twice(connection: Connection) -> None:
    script = "for i in 1 2 3 4 5; do echo $i; sleep 0.3; done; exit 1"
    early, late = _talker("early", script), _talker("late", script.replace("exit 1", "sleep 600"))
    namespace = early["metadata"]["namespace"]
    run = early["metadata"]["labels"]["gkr/run"]
    places = Places(
        "talk", run, (LearnerPlace("talk", NAME, namespace, "talk"),), {NAME: read_registry().entries[NAME]}
    )
    follower = Follower(places, {NAME: connection}, request=Request(), wants=lambda _: True, container=None)
    heard: dict[str, list[str]] = defaultdict(list)

    def complete() -> bool:
        for line in follower.lines(wait_seconds=0.2):
            heard[line.source.prefix].append(line.text)
        return len(heard) >= 3 and all(len(lines) >= 5 for lines in heard.values())

    with _pods(connection, [early]):
        follower.start()
        try:
            _wait("the first lines", lambda: complete() or bool(heard))
            with _pods(connection, [late]):
                _wait("both pods and the second try", complete)
        finally:
            follower.stop.set()
    one, two = early["metadata"]["name"], late["metadata"]["name"]
    whole = ["1", "2", "3", "4", "5"]
    assert heard[f"talk/{one}#1"] == heard[f"talk/{one}#2"] == heard[f"talk/{two}#1"] == whole


@contextmanager
def _following(run: str, *more: str) -> Generator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).resolve().parents[2]}"}
    command = [sys.executable, "-m", "gkr", "logs", "-f", run, *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _gpus(kind: str) -> dict[str, Any]:
    return next(one for one in _json("gpus", "--cluster", NAME)[NAME] if one["gpu"] == kind)


def _holder(index: int, *, gpus: int) -> dict[str, Any]:
    """Bound by name, so that it stands exactly there."""
    own = {"gkr/experiment": "holds", "gkr/run": "views"}
    container = {"name": "holds", "image": "pause", "resources": {"limits": {"nvidia.com/gpu": f"{gpus}"}}}
    return {
        "metadata": {"name": f"views-holds-{index}", "namespace": "gkr-1", "labels": own},
        "spec": {
            "nodeName": f"gke-a3-mega-{index}",
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
        },
    }


def _talker(name: str, script: str) -> dict[str, Any]:
    site = cached_facts(read_registry().entries[NAME]).site
    own = {"gkr/experiment": "talk", "gkr/run": f"talk-{os.getpid()}", "gkr/learner": "talk", "gkr/role": "trainer"}
    container = {
        "name": "talk",
        "image": site.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-c", script],
        "volumeMounts": [{"name": one.name, "mountPath": one.mount_path, "readOnly": True} for one in site.mounts],
    }
    volumes = [{"name": one.name, "hostPath": {"path": one.host_path}} for one in site.mounts]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}
    return {"metadata": {"name": f"views-{name}-{os.getpid()}", "namespace": "gkr-1", "labels": own}, "spec": spec}
