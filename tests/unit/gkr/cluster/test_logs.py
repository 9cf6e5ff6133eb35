from __future__ import annotations

import pytest

from gkr.cluster.logs import (
    Chooser,
    Line,
    PodRef,
    Seen,
    Source,
    first_failure,
    latest_only,
    merged,
    pod_ref,
    read_line,
    wanted_pods,
)  # fmt: skip
from gkr.logs import Selection
from tests.builders.kube_objects import labels, pod


def ref(name: str = "big-trainer-0", **changes: object) -> PodRef:
    fields = {
        "cluster": "bed", "namespace": "gkr-0", "name": name, "learner": "big", "role": "trainer", "group": "trainer",
        "node": "n-0", "container": "ray", "restarts": 0, **changes,
    }  # fmt: skip
    return PodRef(**fields)  # type: ignore[arg-type]


def at(second: int, text: str, *, of: PodRef | None = None) -> Line:
    return read_line(f"2026-11-30T18:17:{second:02d}.000000000Z {text}", pod=of or ref(), attempt=1)


def test_a_line_names_its_process_and_any_other_is_the_pods_own() -> None:
    found = at(1, "big/2/service-encoder-3 | loss | 0.5")
    assert (found.source.prefix, found.text) == ("big/service-encoder-3#2", "loss | 0.5")
    own = at(1, "bash: python: command not found")
    assert (own.source.prefix, own.text) == ("big/big-trainer-0#1", "bash: python: command not found")
    assert at(1, "big/1/rank-0 | ").text == ""


def test_a_progress_bar_is_its_last_state() -> None:
    assert at(1, "big/1/rank-0 | 10%\r50%\r100%").text == "100%"


def test_after_a_reconnect_nothing_is_lost_and_nothing_comes_twice() -> None:
    server = [("t1", "a"), ("t2", "b"), ("t2", "b"), ("t2", "c"), ("t3", "d")]
    for broken_after in range(len(server) + 1):
        seen = Seen()
        out = [text for stamp, text in server[:broken_after] if seen.is_new(stamp, text)]
        for _ in range(2):  # the server starts again at the last second, and once more
            seen.reconnect()
            again = [one for one in server if one[0] >= seen.last]
            out += [text for stamp, text in again if seen.is_new(stamp, text)]
        assert out == ["a", "b", "b", "c", "d"], broken_after


def test_lines_of_all_pods_stand_in_the_order_of_their_times_and_the_tail_is_per_process() -> None:
    lines = [at(3, "big/1/rank-0 | c"), at(1, "big/1/rank-0 | a"), at(2, "big/1/rank-1 | b", of=ref("big-trainer-1"))]
    everything, none = merged(lines)
    assert [line.text for line in everything] == ["a", "b", "c"]
    assert not none
    kept, left_out = merged(lines, tail=1)
    assert [line.text for line in kept] == ["b", "c"]
    assert left_out == {"big/rank-0#1": 1}


def test_by_default_drivers_rank_0_and_whoever_printed_a_traceback() -> None:
    chooser = Chooser(Selection(), own_lines=False)
    lines = [
        at(1, "big/1/driver-0 | d"),
        at(2, "big/1/rank-0 | r"),
        at(3, "big/1/rank-1 | quiet"),
        at(4, "big/1/rank-1 | Traceback (most recent call last):"),
        at(5, "big/1/rank-1 | ValueError: x"),
        at(6, "Ray runtime started"),
    ]
    shown = [line.text for line in lines if chooser.shows(line)]
    assert shown == ["d", "r", "Traceback (most recent call last):", "ValueError: x"]
    bad = Chooser(Selection(), own_lines=False, failed=frozenset({"big-trainer-0"}))
    assert bad.shows(lines[-1])


@pytest.mark.parametrize(("selection", "want"), [
    (Selection(rank=1), ["r1"]),
    (Selection(service="encoder"), ["s"]),
    (Selection(role="driver"), ["d", "w"]),
    (Selection(role="trainer"), ["r0", "r1"]),
    (Selection(learner="west"), ["w"]),
    (Selection(attempt=2), ["w"]),
    (Selection(everything=True), ["d", "r0", "r1", "s", "w"]),
])  # fmt: skip
def test_a_choice_is_met_exactly(selection: Selection, want: list[str]) -> None:
    lines = [
        at(1, "big/1/driver-0 | d"), at(1, "big/1/rank-0 | r0"), at(1, "big/1/rank-1 | r1"),
        at(1, "big/1/service-encoder-0 | s"), at(1, "west/2/driver-0 | w"),
    ]  # fmt: skip
    chooser = Chooser(selection, own_lines=False)
    assert [line.text for line in lines if chooser.shows(line)] == want


def test_of_each_process_the_latest_attempt_or_the_one_before() -> None:
    lines = [at(1, "big/1/driver-0 | d1"), at(2, "big/1/rank-0 | r1"), at(3, "big/2/rank-0 | r2")]
    assert [line.text for line in latest_only(lines)] == ["d1", "r2"]
    assert [line.text for line in latest_only(lines, previous=True)] == ["r1"]


def test_the_first_failure_is_the_earliest_traceback_else_the_pod_that_ended_first() -> None:
    lines = [
        at(1, "big/1/rank-1 | fine"),
        at(2, "big/1/rank-1 | Traceback (most recent call last):"),
        at(3, "big/1/rank-0 | Traceback (most recent call last):"),
    ]
    assert {line.source.index for line in first_failure(lines, pods=[])} == {1}
    own = [at(1, "oops", of=ref("p-1")), at(2, "later", of=ref("p-2"))]
    pods = [ref("p-2", failed_at=9.0), ref("p-1", failed_at=5.0)]
    assert [line.text for line in first_failure(own, pods=pods)] == ["oops"]


def test_pods_are_chosen_by_what_they_can_hold() -> None:
    pods = [
        ref("head", role="head", group="head", node="bed-0"),
        ref("t-0"),
        ref("t-1", node="n-1"),
        ref("s-0", role="service", group="svc-encoder", node="n-2"),
        ref("syncer", learner="run", role="syncer", group=""),
    ]

    def names(selection: Selection | None = None, **given: str | None) -> list[str]:
        asked: dict[str, str | None] = {"group": None, "node": None, "pod": None, **given}
        return [one.name for one in wanted_pods(pods, selection=selection or Selection(), **asked)]

    assert names() == ["head", "t-0", "t-1", "s-0", "syncer"]
    assert names(Selection(rank=3)) == ["t-0", "t-1"]
    assert names(Selection(service="encoder")) == ["s-0"]
    assert names(Selection(role="head")) == ["head"]
    assert names(Selection(learner="run")) == ["syncer"]
    assert names(group="trainer", node="n-1") == ["t-1"]
    assert names(pod="t-") == ["t-0", "t-1"]


def test_what_a_pod_says_about_its_container() -> None:
    ended = {"exitCode": 1, "finishedAt": "1970-01-01T00:00:09Z"}
    status = [{"name": "ray", "restartCount": 2, "state": {"running": {}}, "lastState": {"terminated": ended}}]
    found = pod_ref(pod("p", node_name="n-7", containers=status), cluster="bed")
    assert (found.container, found.restarts, found.failed_at, found.running, found.ended) == (
        "ray",
        2,
        9.0,
        True,
        False,
    )
    assert not found.broken
    assert pod_ref(pod("p", node_name="n-7", containers=status, ready=False), cluster="bed").broken
    syncer = pod_ref(pod("s", phase="Succeeded", own_labels=labels(role="syncer") | {"gkr/learner": ""}), cluster="bed")
    assert (syncer.learner, syncer.running, syncer.ended) == ("run", False, True)


def test_a_source_is_named_as_its_file_is() -> None:
    assert Source("east", 2, "rank", 0, "p").prefix == "east/rank-0#2"
