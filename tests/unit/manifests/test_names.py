"""Names stay legal and unique at every length that `spec` lets through."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from manifests import labels, names
from manifests.render import render
from spec.names import LONGEST_NAME, LONGEST_RAYCLUSTER, LONGEST_RAYJOB, rayjob_excess, rayjob_name, syncer_name
from spec.plan import Plan
from tests.builders.experiments import RUN
from tests.builders.plans import digits

DIGITS = digits()
name = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""The strictest grammar that any of our objects must keep: services and Ray's."""


def named(experiment: str, learners: list[str], group: str, services: list[str]) -> Plan:
    """The digits plan under other names, as `resolve` would have named it."""
    changed: list[Any] = []
    for one, own in zip(DIGITS.learners, learners, strict=True):
        nodes = [node.model_copy(update={"group": group, "name": f"{group}-0"}) for node in one.nodes]
        renamed = [
            service.model_copy(update={"name": new}) for service, new in zip(one.services, services, strict=False)
        ]
        job = rayjob_name(experiment, learner=own, run=RUN)
        changed.append(
            one.model_copy(
                update={"name": own, "job": job, "nodes": nodes, "services": renamed, "namespace": "research"}
            )
        )
    assert DIGITS.syncer is not None
    syncer = DIGITS.syncer.model_copy(update={"name": syncer_name(experiment, run=RUN), "namespace": "research"})
    return DIGITS.model_copy(update={"experiment": experiment, "learners": changed, "syncer": syncer})


@given(
    name,
    st.lists(name, min_size=2, max_size=2, unique=True),
    name,
    st.lists(name, min_size=3, max_size=3, unique=True),
)
def test_names_are_legal_and_unique_whatever_spec_lets_through(
    experiment: str, learners: list[str], group: str, services: list[str]
) -> None:
    assume(group != "head")
    assume(group not in {f"svc-{service}" for service in services})
    assume(all(rayjob_excess(experiment, learner=one, longest_group=group) <= 0 for one in learners))
    check(named(experiment, learners, group, services))


def test_the_longest_names_are_legal() -> None:
    experiment = "e" * 20
    learners, group = ["a" * 13, "b" * 13], "gg"
    assert max(rayjob_excess(experiment, learner=one, longest_group=group) for one in learners) == 0
    services = [letter * LONGEST_NAME for letter in "xyz"]
    check(named(experiment, learners, group, services))


def check(plan: Plan) -> None:
    objects = [one for found in render(plan).values() for one in found]
    seen = [(one["kind"], one["metadata"]["namespace"], one["metadata"]["name"]) for one in objects]
    assert len(set(seen)) == len(seen)
    assert all(DNS_1035.fullmatch(found) for _, _, found in seen)
    assert all(LABEL_VALUE.fullmatch(value) for one in objects for value in one["metadata"]["labels"].values())
    for learner in plan.learners:
        assert DNS_1035.fullmatch(names.env_secret(learner))
        assert DNS_1035.fullmatch(names.keys_secret(learner.job))
    assert plan.syncer is None or DNS_1035.fullmatch(names.keys_secret(plan.syncer.name))
    for learner in plan.learners:
        assert len(learner.job) <= LONGEST_RAYJOB
        cluster = f"{learner.job}-x1y2z"
        assert len(cluster) <= LONGEST_RAYCLUSTER
        assert len(f"{cluster}-head-svc") <= 63
    for learner in plan.learners:
        [job] = [one for one in objects if one["kind"] == "RayJob" and one["metadata"]["name"] == learner.job]
        groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        found = [group["groupName"] for group in groups]
        assert found == [*learner.groups, *(f"svc-{service.name}" for service in learner.services)]
        assert len(set(found)) == len(found)
        for group in groups:
            own = group["template"]["metadata"]["labels"]
            assert own[labels.GROUP] == group["groupName"]
            assert all(LABEL_VALUE.fullmatch(value) for value in own.values())
            prefix = f"{learner.job}-x1y2z-{group['groupName']}"[:50]  # where KubeRay cuts
            assert DNS_1035.fullmatch(f"{prefix}-worker-x1y2z")
