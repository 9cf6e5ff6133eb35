"""The local stacks on the bed: two regions up, unchanged, changed, trained on, and down with nothing left.

On a bed that is up for stacks (`make cluster REGIONS=2 FOR=stacks`); operators, queues and fabric objects are really
installed, and the digits run in real pods. Tests build on each other in the order of this file, because a region takes
minutes to come up: an earlier one that fails takes the later ones with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.engine.place import ROOT, place
from spec.facts import ClusterFacts
from spec.plan import Plan
from spec.summary import Summary
from tests.builders.gcp_double.cloud import Cloud
from tools.bed import addons, facts, images
from tools.bed.holder import holder
from tools.bed.layout import Bed, Wanted, beds
from tools.bed.lifecycle import remembered
from tools.bed.run import kubectl

STACKS = ("local.bed-a", "local.bed-b")
SECONDS = 900.0
"""Of one make target, on a busy machine."""
FEW = "train.samples=5120 train.evaluation.final_samples=64 train.checkpoint.every_steps=10 sync.inner_steps=10"
SHARED = "services.judge.shared=true"
"""The judge is the one that the first stack keeps running, found through its facts."""
BY_THE_BED = {"default", "kube-node-lease", "kube-public", "kube-system", "bed-system"}

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(2 * SECONDS + 60),
    pytest.mark.skipif(os.geteuid() != 0 or bool(os.environ.get("KUBECONFIG")), reason="needs the bed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Both stacks up, with state, list of clusters and runs in a folder of their own."""
    if any(holder(bed) is None for bed in beds(2)) or not remembered().for_stacks:
        pytest.skip("no bed is up for stacks: make cluster REGIONS=2 FOR=stacks")
    found = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STACKS", "CONFIG", "RUNS"):
            patch.setenv(f"GKR_{name}", f"{found / name.lower()}")
        for stack in STACKS:
            assert "create" in make("up", stack)
        yield found


def make(target: str, stack: str, *more: str) -> str:
    """One target as a person calls it; its stdout."""
    double = [] if target == "train" else ["CLOUD=double"]
    started = time.monotonic()
    command = ["make", target, f"STACK={stack}", *double, *more]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    print(f"make {target} STACK={stack}: {time.monotonic() - started:.0f} s")  # noqa: T201
    return done.stdout


def names(bed: Bed, *kinds: str) -> set[str]:
    found = kubectl(bed, "get", ",".join(kinds), "-A", "-o", "json", "--ignore-not-found")
    return {one["metadata"]["name"] for one in json.loads(found or '{"items": []}')["items"]}


def published(bed: Bed) -> ClusterFacts:
    found = json.loads(kubectl(bed, "get", "configmap", facts.NAME, "-n", facts.NAMESPACE, "-o", "json"))
    return ClusterFacts.read_json(found["data"][facts.KEY])


def test_a_second_preview_has_no_change(folder: Path) -> None:
    del folder
    for stack in STACKS:
        said = make("preview", stack)
        assert f"### {stack}: no change" in said
        assert f"### {stack}.platform: no change" in said


def test_what_the_stacks_install_is_there(folder: Path) -> None:
    del folder
    first, second = beds(2)
    assert {"gvnic-1", "rdma-0", "rdma-7"} <= names(first, "networks.networking.gke.io")
    assert {f"vpc{index}" for index in range(1, 9)} == names(second, "networks.networking.gke.io")
    assert {"research"} == names(first, "clusterqueues") == names(second, "localqueues")
    assert {"kueue-controller-manager", "kuberay-operator"} <= names(first, "deployments")
    assert {f"gke-ultra-{index}" for index in range(4)} == names(first, "nodes") - {first.node}


def test_the_facts_say_what_the_bed_says_of_itself_where_it_matters(folder: Path) -> None:
    """The bed's own facts were run against; a stack's must send pods, buckets and syncers to the same places."""
    del folder
    built = {recipe.name: recipe.reference for recipe in images.all_recipes()}
    for bed in beds(2):
        ours = published(bed)
        wanted = Wanted(fake={pool.machine: pool.nodes for pool in ours.pools if pool.row.gpus}, regions=2)
        cores, memory = ours.pools[0].node_cpu, ours.pools[0].node_memory
        own = facts.cluster_facts(
            bed, wanted=wanted, cores=cores, memory=memory, image=built["hostroot"], mounts=images.mounts()
        )
        same = ("region", "bucket", "queues", "syncer", "namespaces", "site", "backend", "priorities")
        assert ours.model_dump(include=set(same)) == own.model_dump(include=set(same))
        assert addons.bucket_keys(bed).keys() == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def test_a_changed_number_of_nodes_is_an_update(folder: Path) -> None:
    del folder
    first = beds(1)[0]
    for nodes in (6, 4):
        change = ("--set", f"gpu_pools[0].nodes={nodes}", "--only", "region", "--cloud", "double", "-o", "json")
        command = [".venv/bin/python", "-m", "infra.run", "up", STACKS[0], *change]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=SECONDS)
        (told,) = json.loads(done.stdout)
        assert {kind: count for kind, count in told["done"].items() if kind != "same"} == {"update": 1}
        assert len(names(first, "nodes")) == nodes + 1


def test_the_digits_train_on_both_stacks(folder: Path) -> None:
    make("train", ",".join(STACKS), f"SET={FEW} {SHARED}")
    [path] = (folder / "runs").glob("digits/2*/summary.json")
    summary = Summary.read_json(path.read_bytes())
    assert summary.status == "succeeded"
    assert summary.sync is not None
    assert (summary.sync.ledger_imbalance, summary.sync.learners_agree, summary.sync.rounds) == (0, True, 4)
    assert [one.cluster for one in summary.learners] == ["bed-a", "bed-b"]
    plan = Plan.read_json(path.with_name("plan.json").read_bytes())
    assert {one.name for one in plan.home.services if one.is_shared} == {"judge"}, "none of the run's own"
    assert summary.services["judge"].requests > 0
    assert summary.evaluation is not None
    assert summary.evaluation.samples == 64
    assert names(beds(1)[0], "rayjobs.ray.io"), "what ran is left behind, so that `down` has to take it along"


def test_down_leaves_nothing(folder: Path) -> None:
    for stack in (*STACKS, "local.global"):
        make("down", stack)
    for bed in beds(2):
        assert names(bed, "nodes") == {bed.node}
        assert names(bed, "namespaces") == BY_THE_BED
        assert _types(bed) == set()
        hooks = names(bed, "validatingwebhookconfigurations", "mutatingwebhookconfigurations")
        assert hooks == set()
        services = json.loads(kubectl(bed, "get", "apiservices", "-o", "json"))["items"]
        assert [one for one in services if "service" in one["spec"]] == []
        roles: Any = names(bed, "clusterroles", "clusterrolebindings")
        assert [one for one in roles if one.startswith(("kueue", "kuberay", "gkr-"))] == []
    assert Cloud(place(double=True).cloud).things() == []
    listed = subprocess.run(
        [".venv/bin/gkr", "clusters", "list", "-o", "json"], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    assert json.loads(listed.stdout) == []
    assert not list((folder / "stacks").rglob("kubeconfigs/*.json"))


def _types(bed: Bed) -> set[str]:
    return names(bed, "customresourcedefinitions")
