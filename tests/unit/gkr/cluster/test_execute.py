from __future__ import annotations

import pytest

from gkr.cluster.execute import Target, choose_pod
from gkr.cluster.logs import PodRef
from spec.errors import NotFoundError, RefusedError


def ref(name: str, learner: str, role: str, node: str, *, running: bool = True) -> PodRef:
    group = "trainer" if role == "trainer" else role
    return PodRef("bed", "gkr-0", name, learner, role, group, node, "ray", 0, running=running)


PODS = [
    ref("east-head", "east", "head", "bed-0"),
    ref("west-t-0", "west", "trainer", "n-9"),
    ref("east-t-0", "east", "trainer", "n-0"),
    ref("east-t-1", "east", "trainer", "n-1"),
    ref("syncer", "run", "syncer", "bed-0"),
    ref("west-t-1", "west", "trainer", "n-8", running=False),
]


@pytest.mark.parametrize(("target", "want"), [
    (Target(), "east-t-0"),
    (Target(learner="west"), "west-t-0"),
    (Target(role="head"), "east-head"),
    (Target(role="syncer"), "syncer"),
    (Target(node="n-1"), "east-t-1"),
    (Target(node="1"), "east-t-1"),
    (Target(learner="east", group="trainer", node="0"), "east-t-0"),
    (Target(pod="east-h"), "east-head"),
])  # fmt: skip
def test_the_pod_that_is_meant(target: Target, want: str) -> None:
    assert choose_pod(PODS, target=target, learners=["east", "west"], run="r").name == want


def test_a_pod_that_does_not_run_and_one_that_is_not_there_are_told_apart() -> None:
    with pytest.raises(RefusedError, match="is not running: west-t-1"):
        choose_pod(PODS, target=Target(pod="west-t-1"), learners=["east"], run="r")
    with pytest.raises(NotFoundError) as caught:
        choose_pod(PODS, target=Target(learner="north", node="n-1"), learners=["east"], run="r")
    assert "learner north, node n-1" in caught.value.message
    assert "east-t-0 (trainer on n-0)" in caught.value.hint
    with pytest.raises(NotFoundError):
        choose_pod(PODS, target=Target(node="7"), learners=["east"], run="r")
    with pytest.raises(NotFoundError):
        choose_pod([], target=Target(), learners=["east"], run="r")
