from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gkr.cluster.capacity import read_nodes
from gkr.cluster.explain_facts import Facts, Level, Verdict
from gkr.cluster.why import explain, explain_local, lines
from spec.events import (
    AttemptEnded,
    AttemptStarted,
    Check,
    Preflight,
    RunStatus,
    StepMetrics,
    SyncWaiting,
)  # fmt: skip
from tests.builders.kube_objects import (
    NOW,
    RUN,
    cluster_queue,
    event,
    flavors,
    is_true,
    labels,
    local_queue,
    node,
    pending,
    pod,
    pod_set,
    rayjob,
    unscheduled,
    workload,
)  # fmt: skip

EXPECTED = {"head": 1, "trainer": 2}
CPU_FLAVOR = 'Flavor "cpu" does not support TopologyAwareScheduling, flavor a3-mega doesn\'t match node affinity'
FULL = (
    f"couldn't assign flavors to pod set trainer: {CPU_FLAVOR}, "
    "insufficient unused quota for memory in flavor a3-ultra, 5600Gi more needed, "
    "insufficient unused quota for nvidia.com/gpu in flavor a3-ultra, 16 more needed"
)


def facts(**changes: Any) -> Facts:
    """A learner of two nodes, admitted, every pod ready, driver running."""
    base = Facts(
        learner="big", cluster="bed", namespace="gkr-0", job="big-ca6905", queue="research", now=NOW,
        rayjob=rayjob(job="RUNNING"), workload=waiting(conditions=[*is_true("QuotaReserved"), *is_true("Admitted")]),
        local_queues=[local_queue()], cluster_queue=cluster_queue(), flavors=flavors(), expected=EXPECTED,
        pods=[head(), worker(0), worker(1)], priorities={"low": -100, "normal": 0, "high": 100},
    )  # fmt: skip
    return replace(base, **changes)


def waiting(name: str = "rayjob-big-ca6905-1312c", *, count: int = 2, **changes: Any) -> dict[str, Any]:
    sets = [pod_set("head", count=1, gpus=0), pod_set(count=count, required=changes.pop("required", ""))]
    return workload(name, sets=sets, **changes)


def head(**changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"node_name": "bed-0", "own_labels": labels(role="head", group="head"), **changes}
    return pod("big-head", **own)


def worker(index: int, **changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"node_name": f"n-{index}", "gpus": 8, "accelerator": "nvidia-h200-141gb", **changes}
    return pod(f"big-trainer-{index}", **own)


def holder(name: str, gpus: int, **changes: Any) -> dict[str, Any]:
    sets = [pod_set(count=gpus // 8, experiment=name, run=f"run-{name}")]
    return workload(name, sets=sets, admitted={"trainer": {"a3-ultra": {"nvidia.com/gpu": str(gpus)}}}, **changes)


def queued(message: str, *, others: list[dict[str, Any]] | None = None, **changes: Any) -> Facts:
    """The same learner while Kueue has not admitted it, with Kueue's message."""
    own = waiting(conditions=pending(message, reason=changes.pop("reason", "Pending")), count=changes.pop("count", 2),
                  required=changes.pop("required", ""))  # fmt: skip
    return facts(workload=own, workloads=[own, *(others or [])], pods=[], **changes)


def test_who_holds_the_quota_what_would_free_it_and_the_place_in_the_queue() -> None:
    ahead = waiting("rayjob-first-1-1", conditions=pending(FULL), created="2026-11-30T10:00:00Z")
    found = explain(queued(FULL, others=[ahead, holder("tiny", 8), holder("large", 480), holder("mid", 24)]))
    assert (found.level, found.remedy) == (Level.QUOTA, "wait")
    assert found.text == "it waits for quota: 16 GPUs more of a3-ultra needed"
    assert found.evidence == (
        "asks for 16 GPUs; quota 512 GPUs, in use 512 GPUs, free 0 GPUs",
        "held by large (run-large) 480 GPUs for 2m00s, mid (run-mid) 24 GPUs for 2m00s, "
        "tiny (run-tiny) 8 GPUs for 2m00s",
        "number 2 of 2 that wait in queue research",
    )
    assert found.action.startswith("wait until mid (run-mid) ends")
    assert found.numbers == {
        "asked": 16, "more_needed": 16, "quota": 512, "used": 512, "free": 0, "position": 2, "waiting": 2,
    }  # fmt: skip


def test_a_higher_priority_is_offered_only_where_it_makes_room() -> None:
    normal = explain(queued(FULL, others=[holder("large", 512)])).action
    assert normal.endswith("`priority: high`, which makes room at once")
    assert "priority" not in explain(queued(FULL, others=[holder("large", 512, priority=100)])).action
    assert (
        "priority"
        not in explain(
            queued(FULL, others=[holder("large", 512)], cluster_queue=cluster_queue(preemption="Never"))
        ).action
    )


def test_several_holders_have_to_end_when_none_is_enough() -> None:
    message = FULL.replace("16 more", "96 more")
    found = explain(queued(message, others=[holder("a", 64), holder("b", 48), holder("c", 8)]))
    assert found.action.startswith("wait until a (run-a) and b (run-b) end")


@pytest.mark.parametrize("message", [
    f"couldn't assign flavors to pod set trainer: {CPU_FLAVOR}",
    'couldn\'t assign flavors to pod set head: Flavor "a3-mega" supports only TopologyAwareScheduling, '
    'Flavor "a3-ultra" supports only TopologyAwareScheduling',
])  # fmt: skip
def test_what_kueue_leaves_out_of_its_message_is_reckoned(message: str) -> None:
    full = explain(queued(message, others=[holder("large", 512)]))
    assert full.text == "it waits for quota: 16 GPUs more of a3-ultra needed"
    assert "large (run-large)" in full.action
    scattered = [node(f"n-{at}") for at in range(4)]
    pods = [pod(f"p-{at}", node_name=f"n-{at}", gpus=6, own_labels=labels("small", run="r1")) for at in range(4)]
    found = explain(
        queued(message, count=1, cluster_queue=cluster_queue(used=24), nodes=read_nodes(scattered, pods=pods))
    )
    assert found.text == "8 H200 are free, but scattered: at most 2 on one node, 8 are asked for on one"


def test_more_than_the_queue_has_is_a_request_to_change() -> None:
    message = (
        f"couldn't assign flavors to pod set trainer: {CPU_FLAVOR}, "
        "insufficient quota for nvidia.com/gpu in flavor a3-ultra, previously considered podsets requests (0) "
        "+ current podset request (520) > maximum capacity (512)"
    )
    found = explain(queued(message, count=65))
    assert (found.remedy, found.numbers) == ("change", {"asked": 520, "quota": 512})
    assert found.text == "it can never be admitted: it asks for 520 GPUs, queue research has 512 GPUs in all"


def test_a_flavor_without_gpus_is_no_obstacle_while_another_may_become_free() -> None:
    message = (
        "couldn't assign flavors to pod set w: insufficient quota for nvidia.com/gpu in flavor cpu, "
        "previously considered podsets requests (0) + current podset request (16) > maximum capacity (0), "
        "insufficient unused quota for nvidia.com/gpu in flavor a3-ultra, 8 more needed"
    )
    assert explain(queued(message)).text == "it waits for quota: 8 GPUs more of a3-ultra needed"


def test_the_topology_is_too_narrow_for_what_must_stand_together() -> None:
    message = 'couldn\'t assign flavors to pod set trainer: topology "gke" allows to fit only 16 out of 17 pod(s)'
    nodes = read_nodes([node(f"n-{at}") for at in range(64)], pods=[])
    level = "cloud.google.com/gce-topology-subblock"
    found = explain(queued(message, count=17, required=level, nodes=nodes))
    assert found.remedy == "change"
    assert found.text == "it insists on 17 nodes within one subblock, which has at most 16"


@pytest.mark.parametrize(("message", "reason", "remedy", "text"), [
    ("LocalQueue research doesn't exist", "Inadmissible", "change", 'there is no queue "research" in namespace gkr-0'),
    ("ClusterQueue research is inactive", "Inadmissible", "admin", "its queue takes nobody"),
    ("Workload namespace doesn't match ClusterQueue selector", "Pending", "admin", "its queue takes nobody"),
    ("stopped", "Suspended", "admin", "its queue takes nobody"),
    ("The workload is deactivated", "Deactivated", "change", "it is held: its Workload is deactivated"),
    (f"{FULL}. Pending the preemption of 1 workload(s)", "Pending", "wait",
     "experiments of lower priority are being stopped for it"),
    ("not enough", "WaitingForQuota", "wait", "it waits for quota that others use"),
    ("too much", "ExceedsMaxQuota", "change", "it asks for more than its queue has in all"),
    ("", "Pending", "wait", "Kueue has not admitted it yet"),
])  # fmt: skip
def test_other_reasons_of_kueue_old_and_granular(message: str, reason: str, remedy: str, text: str) -> None:
    found = explain(queued(message, reason=reason, flavors=[], cluster_queue=cluster_queue(active=False)))
    assert (found.level, found.remedy, found.text) == (Level.QUOTA, remedy, text)


def test_levels_before_the_quota() -> None:
    gone = explain(facts(rayjob=None))
    assert (gone.level, gone.text) == (Level.CREATED, "there is no RayJob big-ca6905 in namespace gkr-0")
    refused = explain(facts(rayjob=rayjob(deployment="ValidationFailed", message="spec is bad")))
    assert (refused.level, refused.remedy, refused.evidence) == (Level.CREATED, "change", ("spec is bad",))
    unseen = explain(facts(workload=None))
    assert (unseen.level, unseen.remedy) == (Level.QUEUED, "wait")
    typo = explain(facts(workload=None, local_queues=[local_queue("reserch")]))
    assert (typo.level, typo.remedy, typo.evidence) == (Level.QUEUED, "change", ("queues there: reserch",))
    job = rayjob()
    job["metadata"]["labels"] = {}
    assert "no queue label" in explain(facts(workload=None, rayjob=job)).text


def test_open_admission_checks_are_named() -> None:
    checks = [
        {"name": "provision", "state": "Pending", "message": "waits for nodes"},
        {"name": "done", "state": "Ready"},
    ]
    own = waiting(conditions=is_true("QuotaReserved"), status={"admissionChecks": checks})
    own["status"]["conditions"] = is_true("QuotaReserved")
    found = explain(facts(workload=own))
    assert (found.level, found.remedy, found.evidence) == (
        Level.CHECKS,
        "wait",
        ("provision: Pending waits for nodes",),
    )


def test_eight_free_gpus_on_four_nodes_do_not_place_a_pod_of_eight() -> None:
    message = (
        "0/97 nodes are available: 4 Insufficient nvidia.com/gpu, "
        "93 node(s) didn't match Pod's node affinity/selector. "
        "preemption: 0/97 nodes are available: 97 Preemption is not helpful for scheduling."
    )
    homeless = worker(0, node_name="", phase="Pending", conditions=unscheduled(message))
    nodes = [node(f"n-{at}") for at in range(4)]
    held = [pod(f"p-{at}", node_name=f"n-{at}", gpus=6, own_labels=labels("small", run="r1")) for at in range(4)]
    found = explain(facts(pods=[head(), homeless], nodes=read_nodes(nodes, pods=held)))
    assert (found.level, found.remedy) == (Level.PLACED, "wait")
    assert found.text.startswith("admitted, but not placeable: 8 H200 are free, but scattered: at most 2 on one node")
    assert found.evidence == (
        "group trainer needs 1 node with 8 free H200 each; 8 H200 free in all on 4 nodes, at most 2 on one node",
        "nearest: n-3 has 2 of 8 free; held by small (r1) 6",
        "scheduler: of 97 nodes: 4 Insufficient nvidia.com/gpu, 93 node(s) didn't match Pod's node affinity/selector",
    )
    assert "the end of small (r1) is enough" in found.action
    assert "`resources: {gpu: H200:2}`, of which 4 fit now" in found.action
    assert (found.numbers["free"], found.numbers["largest_on_node"], found.numbers["nodes_with_free"]) == (8, 2, 4)


@pytest.mark.parametrize(("cause", "remedy"), [
    ("2 Insufficient memory, 1 node(s) had untolerated taint {a: b}", "wait"),
    ("3 node(s) had untolerated taint {nvidia.com/gpu: present}", "admin"),
    ("3 node(s) were unschedulable", "admin"),
    ("3 node(s) didn't match Pod's node affinity/selector", "change"),
    ('3 persistentvolumeclaim "data" not found', "change"),
])  # fmt: skip
def test_other_causes_of_the_scheduler(cause: str, remedy: str) -> None:
    homeless = worker(0, node_name="", phase="Pending", conditions=unscheduled(f"0/3 nodes are available: {cause}."))
    found = explain(facts(pods=[head(), homeless]))
    assert (found.level, found.remedy, found.numbers["nodes"]) == (Level.PLACED, remedy, 3)


def test_broken_nodes_are_an_administrators_matter() -> None:
    state = unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    homeless = [worker(at, node_name="", phase="Pending", conditions=state) for at in range(2)]
    nodes = read_nodes([node("n-0"), node("n-1", ready=False)], pods=[])
    found = explain(facts(pods=homeless, nodes=nodes))
    assert found.remedy == "admin"
    assert "n-1 (not ready (NodeStatusUnknown))" in found.action


@pytest.mark.parametrize(("said", "remedy", "text"), [
    ('rpc error: code = NotFound desc = failed to pull and unpack image "r/x:1": failed to resolve reference "r/x:1": '
     "r/x:1: not found", "change", "image trainer:1: there is no such image"),
    ('failed to do request: Head "http://localhost/v2/x": dial tcp 127.0.0.1:80: connect: connection refused', "admin",
     "image trainer:1: its registry cannot be reached from the node"),
    ("pull access denied, authorization failed", "admin", "image trainer:1: the registry refuses the pull"),
])  # fmt: skip
def test_an_image_that_does_not_come_is_said_in_the_runtimes_own_words(said: str, remedy: str, text: str) -> None:
    back_off = f'Back-off pulling image "trainer:1": ErrImagePull: {said}'
    for reason, message in (("ErrImagePull", said), ("ImagePullBackOff", back_off)):
        status = [{"name": "ray", "state": {"waiting": {"reason": reason, "message": message}}}]
        found = explain(facts(pods=[head(phase="Pending", containers=status)]))
        assert (found.level, found.remedy, found.text) == (Level.STARTED, remedy, text)
        assert found.evidence[0] == f"runtime: {said.partition('desc = ')[2] or said}"


def test_the_runtimes_words_come_from_the_event_when_the_status_has_none() -> None:
    status = [
        {
            "name": "ray",
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "trainer:1"'}},
        }
    ]
    events = [event("big-head", reason="Failed", message='Failed to pull image "trainer:1": no space left on device')]
    found = explain(facts(pods=[head(phase="Pending", containers=status)], events=events))
    assert (found.text, found.remedy) == ("image trainer:1: the node's disk is full", "admin")


def test_a_missing_secret_is_named() -> None:
    status = [
        {
            "name": "ray",
            "state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'}},
        }
    ]
    found = explain(facts(pods=[head(), worker(0, phase="Pending", containers=status)]))
    assert (found.level, found.text) == (Level.STARTED, "secret hf-token is not in namespace gkr-0")


def test_an_old_warning_is_silent_once_something_good_followed() -> None:
    creating = [{"name": "ray", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    pods = [head(), worker(0, phase="Pending", containers=creating)]
    failed = event("big-trainer-0", reason="FailedMount", message="configmap not found", at="2026-11-30T18:16:00Z")
    later = event("big-trainer-0", reason="Pulled", message="ok", kind="Normal", at="2026-11-30T18:17:00Z")
    assert explain(facts(pods=pods, events=[failed])).text == "a volume cannot be mounted on n-0"
    assert explain(facts(pods=pods, events=[failed, later])).text == "1 of 2 pods are being started"


def test_pulling_is_progress() -> None:
    creating = [{"name": "ray", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    pulling = event("big-trainer-0", reason="Pulling", message='Pulling image "trainer:1"', kind="Normal")
    found = explain(facts(pods=[head(), worker(0, phase="Pending", containers=creating)], events=[pulling]))
    assert (found.remedy, found.evidence) == ("wait", ('Pulling image "trainer:1", 2m00s ago',))


def test_workers_that_wait_for_a_head_that_crashes_are_not_the_answer() -> None:
    init = [{"name": "wait-gcs-ready", "state": {"running": {"startedAt": "2026-11-30T18:16:00Z"}}}]
    ended = {
        "exitCode": 1,
        "reason": "Error",
        "finishedAt": "2026-11-30T18:17:00Z",
        "message": "Traceback\nImportError: x",
    }
    crash = [
        {
            "name": "ray",
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
    ]
    found = explain(facts(pods=[head(ready=False, containers=crash), worker(0, phase="Pending", init=init)]))
    assert (found.level, found.text) == (Level.RUNNING, "the container of big-head ended with code 1")
    assert found.evidence == ("on bed-0, group head, 3 restarts; 1 pod in all", "ImportError: x")
    starts = explain(facts(pods=[head(ready=False), worker(0, phase="Pending", init=init)]))
    assert starts.text == "Ray's head is not ready yet"


def test_too_little_memory_is_a_request_to_change() -> None:
    ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-30T18:17:00Z"}
    status = [{"name": "ray", "restartCount": 0, "state": {"terminated": ended}}]
    found = explain(facts(pods=[head(), worker(0, containers=status, phase="Failed")]))
    assert found.text == "the container of big-trainer-0 ended with code 137 (OOMKilled)"
    assert "raise `memory:` of group trainer" in found.action


def test_missing_workers_are_counted_by_group() -> None:
    found = explain(facts(pods=[head(), worker(0)]))
    assert (found.level, found.text) == (Level.RUNNING, "pods are ready: 1 of 2 of group trainer")
    assert found.evidence == ("1 pod not made yet",)


def _check(verdict: str) -> Check:
    return Check.model_validate(
        {
            "id": "ecc",
            "name": "ECC errors",
            "verdict": verdict,
            "value": "3",
            "threshold": "0",
            "hint": "replace the GPU",
        }
    )


def _started(at: float = NOW - 60) -> AttemptStarted:
    return AttemptStarted(time=at, source="driver/big", learner="big", attempt=2, epoch=2, world_size=16)


def _step(at: float, rate: float = 2.0) -> StepMetrics:
    return StepMetrics(
        time=at, source="rank/big/0", learner="big", attempt=2, step=40, position=1, round=1, loss=1.0,
        gradient_norm=1.0, learning_rate=1.0, steps_per_second=rate, samples_per_second=1.0,
    )  # fmt: skip


def test_the_runs_own_events_speak_when_all_pods_are_ready() -> None:
    assert (
        explain(facts(rayjob=rayjob(job="PENDING"))).text
        == "all pods are ready, and Ray has not started the driver yet"
    )
    waits = explain(facts())
    assert (waits.text, waits.evidence) == ("the driver waits for its agents", ("0 of 2 nodes have passed preflight",))
    failed = Preflight(time=NOW - 9, source="x", learner="big", node="trainer-1", checks=[_check("FAIL")], seconds=1)
    broken = explain(facts(happened=[failed]))
    assert (broken.remedy, broken.text) == ("admin", "preflight failed on 1 node")
    assert broken.evidence == ("trainer-1: ECC errors is 3, wanted 0",)
    assert broken.action == "replace the GPU"
    assert "no step is done yet" in explain(facts(happened=[failed, _started()])).text
    trains = explain(facts(happened=[_started(), _step(NOW - 1)]))
    assert (trains.remedy, trains.text) == ("none", "nothing blocks it: it trains")
    silent = explain(facts(happened=[_started(NOW - 900), _step(NOW - 600)]))
    assert (silent.remedy, silent.text) == ("change", "rank 0 has been silent for 10m00s")
    slow = explain(facts(happened=[_started(NOW - 900), _step(NOW - 600, rate=0.05)]))
    assert slow.remedy == "none"
    over = AttemptEnded(time=NOW - 5, source="x", learner="big", attempt=2, cause="node lost", samples_run=1)
    again = explain(facts(happened=[_started(), _step(NOW - 10), over]))
    assert again.text == "attempt 2 ended (node lost); the driver starts the next one"


def test_a_learner_that_waits_for_others_names_them() -> None:
    waits = SyncWaiting(
        time=NOW - 20, source="syncer", round=7, arrived=["big"], waiting_for=["west"], deadline=NOW + 40
    )
    found = explain(facts(happened=[_started(), _step(NOW - 21), waits]))
    assert found.text == "it waits in outer round 7 for the weights of west"
    assert found.evidence[0] == "for 20s; the round closes without them in 40s"


def test_a_run_whose_objects_are_gone_still_says_how_it_ended() -> None:
    over = RunStatus(time=NOW, source="gkr", status="failed", reason="rank 1 died", exit_code=100)
    found = explain(facts(rayjob=None, pods=[], happened=[over]))
    assert (found.text, found.evidence) == ("it has ended: failed", ("rank 1 died",))


def test_a_local_run_is_explained_by_its_events_alone() -> None:
    blank = Facts(
        learner="big", cluster="", namespace="", job="", queue="", now=NOW, happened=[_started(), _step(NOW - 1)]
    )
    assert explain_local(blank).text == "nothing blocks it: it trains"


def test_the_syncer_is_explained_without_a_queue() -> None:
    status = [{"name": "syncer", "state": {"waiting": {"reason": "InvalidImageName", "message": "bad"}}}]
    syncer = pod("big-syncer", node_name="bed-0", phase="Pending", containers=status, own_labels={})
    base = facts(learner="syncer", job="", rayjob=None, workload=None, pods=[syncer], expected={"syncer": 1})
    assert explain(base).level == Level.STARTED
    serves = replace(base, pods=[pod("big-syncer", node_name="bed-0", own_labels={"gkr/role": "syncer"})])
    assert explain(serves).text == "nothing blocks it: it waits for the first weights"
    open_round = SyncWaiting(time=NOW - 9, source="syncer", round=3, arrived=["east"], waiting_for=["west"])
    found = explain(replace(serves, happened=[open_round]))
    assert (found.text, found.remedy) == ("it waits for the weights of west", "wait")
    over = replace(base, pods=[pod("big-syncer", node_name="bed-0", phase="Succeeded", ready=False)])
    assert explain(over).text == "it has ended: succeeded"


def test_an_answer_is_short_and_its_commands_can_be_pasted() -> None:
    found = Verdict(Level.RUNNING, "it stands", "change", ("a", "b"), action="`gkr logs RUN --failed` shows it")
    assert lines("east", found, run=RUN) == [
        "east: it stands", "  a", "  b", f"  -> change the request: `gkr logs {RUN} --failed` shows it",
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        Verdict(Level.RUNNING, "it stands", "wait", ("1", "2", "3", "4"))
