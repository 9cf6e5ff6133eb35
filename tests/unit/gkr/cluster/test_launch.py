"""Launching and cancelling on a double of the API server: all or nothing, and only what belongs to the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gkr.cluster.backend import ClusterBackend, Watch
from gkr.cluster.cancel import remove
from gkr.cluster.connection import connect
from gkr.cluster.launch import Prepared, connected, launch
from gkr.cluster.registry import ClusterEntry, add_entry
from gkr.runs import Run, read_state
from spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, GkrError, RefusedError
from spec.facts import ClusterFacts, Site
from tests.builders.api_double import ApiDouble, serving
from tests.builders.cluster_runs import PAIR, TINY, entry, facts, furnish, prepared, started

TRAINED = 'train: {recipe: digits, model: {conditioning: class}}\ndata: {manifest: "{bucket}/data/manifest.json"}'
SECRET_ENV = "name: tiny\nenv: {TOKEN: }"


@pytest.fixture
def double() -> Iterator[ApiDouble]:
    with serving(ApiDouble()) as running:
        furnish(running)
        yield running


@pytest.fixture
def other() -> Iterator[ApiDouble]:
    with serving(ApiDouble()) as running:
        furnish(running)
        yield running


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path / 'gkr'}")
    monkeypatch.setattr("gkr.cluster.backend.FLUSH_SECONDS", 0.0)


def _quiet(_: str) -> None:
    return


def _tiny(double: ApiDouble, folder: Path, *, text: str = TINY, env: dict[str, str] | None = None) -> Prepared:
    found, one = facts(folder / "bucket"), entry(double, folder)
    add_entry(one, facts=found, replace=True)
    return prepared(text, [found], [one], env=env)


def _across(double: ApiDouble, other: ApiDouble, folder: Path) -> tuple[str, list[ClusterFacts], list[ClusterEntry]]:
    """An experiment with a learner in each of two clusters, the clusters' facts, and the way to them."""
    clusters = [facts(folder / "b0"), facts(folder / "b1", name="far")]
    text = PAIR.replace("west, cluster: any", "west, cluster: far").replace(
        "east, cluster: any", "east, cluster: double"
    )
    return text, clusters, [entry(double, folder), entry(other, folder, name="far")]


def _launch(prepared: Prepared, folder: Path) -> Run:
    return launch(prepared, root=folder / "runs", say=_quiet)


def _kinds_created(double: ApiDouble) -> list[str]:
    urls = [url.partition("?")[0] for method, url in double.requests if method == "PATCH" and "dryRun" not in url]
    return [url.split("/")[-2] for url in urls]


def test_objects_are_created_in_order_after_a_dry_run_of_all_of_them(double: ApiDouble, tmp_path: Path) -> None:
    run = _launch(_tiny(double, tmp_path), tmp_path)
    assert double.names("RayJob") == ["tiny-3fa9c1"]
    created = _kinds_created(double)
    assert created[-1] == "rayjobs"
    dry = [index for index, (_, url) in enumerate(double.requests) if "dryRun" in url]
    real = [index for index, (method, url) in enumerate(double.requests) if method == "PATCH" and "dryRun" not in url]
    assert len(dry) == len(real)
    assert max(dry) < min(real)
    assert read_state(run.path).status == "preparing"
    assert (tmp_path / "bucket" / "runs" / "tiny" / run.name / "plan.json").exists()


def test_values_of_the_caller_are_in_a_secret_and_nowhere_else(
    double: ApiDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t-$x")
    ready = _tiny(double, tmp_path, text=TINY.replace("name: tiny", SECRET_ENV), env={"TOKEN": "s3cr3t-$x"})
    run = _launch(ready, tmp_path)
    (secret,) = (one for (kind, _, _), one in double.objects.items() if kind == "Secret")
    assert secret["stringData"] == {"TOKEN": "s3cr3t-$x"}
    assert "s3cr3t" not in json.dumps([one for (kind, _, _), one in double.objects.items() if kind != "Secret"])
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]


def test_keys_of_the_sync_are_in_secrets_that_go_with_their_jobs_and_nowhere_else(
    double: ApiDouble, other: ApiDouble, tmp_path: Path
) -> None:
    text, clusters, entries = _across(double, other, tmp_path)
    text = text.replace("run: |\n  echo hello", TRAINED)
    ready = prepared(text, clusters, entries)
    run, syncer = _launch(ready, tmp_path), ready.plan.syncer
    assert syncer is not None
    east, west = ready.plan.learner("east").job, ready.plan.learner("west").job
    found = {name: (cluster, one) for cluster in (double, other) for (kind, _, name), one in cluster.objects.items()
             if kind == "Secret"}  # fmt: skip
    assert set(found) == {f"{syncer.name}-keys", f"{east}-keys", f"{west}-keys"}
    assert found[f"{west}-keys"][0] is other
    for name, kind in ((syncer.name, "Job"), (east, "RayJob"), (west, "RayJob")):
        cluster, secret = found[f"{name}-keys"]
        [owner] = secret["metadata"]["ownerReferences"]
        [uid] = [one["metadata"]["uid"] for key, one in cluster.objects.items() if (key[0], key[2]) == (kind, name)]
        assert (owner["kind"], owner["name"], owner["uid"]) == (kind, name, uid)
        assert secret["immutable"] is True
    assert len({one["stringData"]["token"] for _, one in found.values()}) == 1
    assert len({one["stringData"]["tls.key"] for _, one in found.values()}) == 3
    secret_texts = [one["stringData"][name] for _, one in found.values() for name in ("tls.key", "token")]
    others = [one for cluster in (double, other) for (kind, _, _), one in cluster.objects.items() if kind != "Secret"]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for text in secret_texts:
        assert text not in json.dumps(others)
        assert not [data for data in written if text.encode() in data]
    assert run.path.exists()


def test_a_command_with_services_gets_keys_without_a_syncer(double: ApiDouble, tmp_path: Path) -> None:
    text = TINY + "services:\n  judge: {kind: evaluate, replicas: 2}\n"
    ready = prepared(text, [facts(tmp_path / "bucket")], [entry(double, tmp_path)])
    _launch(ready, tmp_path)
    [secret] = [one for (kind, _, _), one in double.objects.items() if kind == "Secret"]
    assert secret["metadata"]["name"] == f"{ready.plan.home.job}-keys"
    assert [one["kind"] for one in secret["metadata"]["ownerReferences"]] == ["RayJob"]
    assert len(secret["stringData"]["token"]) == 64


def test_what_was_created_is_removed_when_a_later_creation_fails(
    double: ApiDouble, other: ApiDouble, tmp_path: Path
) -> None:
    text, clusters, entries = _across(double, other, tmp_path)
    ready = prepared(text, clusters, entries)
    # Dry-run passes, the creation itself does not: a rule that looks at what is there only then.
    job = ready.plan.learner("west").job
    answer = other.answer

    def refuse(method: str, url: str, body: bytes, token: str) -> tuple[int, object]:
        if method == "PATCH" and "dryRun" not in url and url.partition("?")[0].endswith(f"/rayjobs/{job}"):
            other.rejected["RayJob", ready.plan.learner("west").namespace, job] = "no"
        return answer(method, url, body, token)

    other.answer = refuse  # type: ignore[method-assign]
    with pytest.raises(RefusedError, match="denied the request: no"):
        _launch(ready, tmp_path)
    for cluster in (double, other):
        assert [cluster.names(kind) for kind in ("RayJob", "ConfigMap", "ServiceAccount", "Service", "Job")] == [[]] * 5
    (folder,) = (tmp_path / "runs" / "pair").iterdir()
    state = read_state(folder)
    assert (state.status, state.exit_code) == ("failed", EXIT_FAILED)
    assert state.reason.startswith("could not be created")


def test_every_problem_is_named_at_once_and_nothing_is_created(double: ApiDouble, tmp_path: Path) -> None:
    site = Site(image="localhost/trainer:1", bucket_secret="gkr-bucket", service_account="runner")
    found, one = facts(tmp_path / "bucket", site=site), entry(double, tmp_path)
    del double.objects["WorkloadPriorityClass", "", "normal"]
    del double.objects["LocalQueue", "gkr-0", "research"]
    double.denied |= {("create", "pods/exec"), ("delete", "rayjobs")}
    text = TINY.replace("name: tiny", "name: tiny\nsecrets: [hf-token]")
    with pytest.raises(RefusedError) as caught:
        _launch(prepared(text, [found], [one]), tmp_path)
    message = f"{caught.value}"
    for part in (
        'no priority "normal"', 'no queue "research"', "no secret hf-token", "no secret gkr-bucket",
        "no service account runner", "create pods/exec, delete rayjobs", "priorities there: high, low",
    ):  # fmt: skip
        assert part in message, message
    assert _kinds_created(double) == []
    assert not (tmp_path / "runs").exists()


def test_a_second_run_across_clusters_with_the_same_home_is_refused_until_the_first_has_ended(
    double: ApiDouble, other: ApiDouble, tmp_path: Path
) -> None:
    """The home cluster has one address at which learners of other clusters find a syncer."""
    text, clusters, entries = _across(double, other, tmp_path)
    text = text.replace("run: |\n  echo hello", TRAINED)
    first = _launch(prepared(text, clusters, entries), tmp_path)
    second = prepared(text.replace("name: pair", "name: second"), clusters, entries, run="20261130-150000-second")
    with pytest.raises(RefusedError, match="has the address") as caught:
        _launch(second, tmp_path)
    assert first.name in caught.value.message
    assert "gkr cancel pair" in (caught.value.hint or "")
    assert double.names("Job") == [one for one in double.names("Job") if "pair" in one], "nothing was created"
    (job,) = (one for (kind, _, _), one in double.objects.items() if kind == "Job")
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    _launch(second, tmp_path)
    assert len(double.names("Job")) == 2


def test_server_side_refusal_is_quoted(double: ApiDouble, tmp_path: Path) -> None:
    ready = _tiny(double, tmp_path)
    double.rejected["RayJob", "gkr-0", ready.plan.home.job] = "image is not from our registry"
    with pytest.raises(RefusedError, match="image is not from our registry"):
        _launch(ready, tmp_path)
    assert _kinds_created(double) == []


def test_missing_namespace_is_one_problem(double: ApiDouble, tmp_path: Path) -> None:
    del double.objects["Namespace", "", "gkr-0"]
    with pytest.raises(RefusedError, match='there is no namespace "gkr-0"'):
        _launch(_tiny(double, tmp_path), tmp_path)


def test_quota_that_can_never_fit_comes_with_numbers(double: ApiDouble, tmp_path: Path) -> None:
    text = TINY.replace("nodes: 2", "nodes: 8").replace("memory: 2Gi", "memory: 32Gi").replace("cpu: 1", "cpu: 8")
    with pytest.raises(RefusedError) as caught:
        _launch(_tiny(double, tmp_path, text=text), tmp_path)
    assert "group trainer asks for 260Gi memory (8 x 33280Mi)" in caught.value.message
    assert "never has more than 256Gi" in caught.value.message


@pytest.mark.parametrize("phase", ["", "Suspended", "Initializing", "Running", "Complete", "Failed"])
def test_cancel_waits_until_no_pod_and_no_workload_is_left(double: ApiDouble, tmp_path: Path, phase: str) -> None:
    run = _launch(_tiny(double, tmp_path), tmp_path)
    if phase:
        started(double, phase=phase)
    double.put("Pod", "another", namespace="gkr-0", metadata={"labels": {"gkr/run": "20990101-000000-ffffff"}})
    double.put("Workload", "another", namespace="gkr-0")
    double.linger = 2
    status = ClusterBackend().cancel(run, now=True, timeout_seconds=20)
    assert (double.names("Pod"), double.names("Workload")) == (["another"], ["another"])
    for kind in ("RayJob", "ConfigMap", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "Secret"):
        assert double.names(kind) == [], kind
    ended = {"Complete": ("succeeded", EXIT_OK), "Failed": ("failed", EXIT_FAILED)}
    want = ended.get(phase, ("cancelled", EXIT_CANCELLED))
    assert (status, read_state(run.path).exit_code) == want
    assert ClusterBackend().cancel(run, now=True, timeout_seconds=20) == status, "a second time is fine"


def test_cancel_goes_where_the_run_is_when_context_and_registry_have_changed(
    double: ApiDouble, other: ApiDouble, tmp_path: Path
) -> None:
    run = _launch(_tiny(double, tmp_path), tmp_path)
    victim = other.put("RayJob", "tiny-3fa9c1", namespace="gkr-0", metadata={"labels": {"gkr/run": run.name}})
    path = tmp_path / "double.kubeconfig"
    path.write_text(path.read_text().replace("current-context: double", "current-context: other"))
    add_entry(entry(other, tmp_path, name="two", context="other"), facts=facts(tmp_path / "b", name="two"))
    add_entry(
        ClusterEntry("double", f"{tmp_path / 'two.kubeconfig'}", "other"), facts=facts(tmp_path / "b"), replace=True
    )
    ClusterBackend().cancel(run, now=True, timeout_seconds=20)
    assert double.names("RayJob") == []
    assert other.objects["RayJob", "gkr-0", "tiny-3fa9c1"] is victim


def test_what_is_left_after_the_deadline_is_named(double: ApiDouble, tmp_path: Path) -> None:
    ready = _tiny(double, tmp_path)
    run = _launch(ready, tmp_path)
    started(double)
    double.linger = 1_000_000
    with connected(ready.places) as connections:
        left = remove(ready.places, connections=connections, now=False, timeout_seconds=0.3)
    assert left == ["RayJob tiny-3fa9c1", "Pod tiny-3fa9c1-head", "Workload rayjob-tiny-3fa9c1"]
    with pytest.raises(GkrError, match="is not gone"):
        ClusterBackend().cancel(run, now=True, timeout_seconds=0.2)


def test_watching_writes_what_the_objects_say_and_ends_with_the_fate(double: ApiDouble, tmp_path: Path) -> None:
    run = _launch(_tiny(double, tmp_path), tmp_path)
    started(double)
    with closing(Watch(run)) as watch:
        assert watch.refresh()
        assert read_state(run.path).status == "running"
        started(double, phase="Complete")
        assert not watch.refresh()
        watch.finish()
    assert read_state(run.path).exit_code == EXIT_OK
    assert (run.path / "summary.json").exists()
    assert (run.path / "report.html").exists()


def test_run_whose_objects_were_deleted_by_hand_has_failed(double: ApiDouble, tmp_path: Path) -> None:
    run = _launch(_tiny(double, tmp_path), tmp_path)
    del double.objects["RayJob", "gkr-0", "tiny-3fa9c1"]
    with closing(Watch(run)) as watch:
        assert not watch.refresh()
    assert "gone from the cluster" in read_state(run.path).reason


def test_connections_are_closed(double: ApiDouble, tmp_path: Path) -> None:
    connection = connect(entry(double, tmp_path))
    connection.list("Pod", namespace="gkr-0")
    connection.close()
    with pytest.raises(RuntimeError):
        connection.list("Pod", namespace="gkr-0")
