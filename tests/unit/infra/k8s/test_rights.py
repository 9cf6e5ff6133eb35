"""What researchers may do in a cluster: what `gkr` does for them, in the namespaces of experiments only."""

from __future__ import annotations

from gkr.cluster.kinds import KINDS
from gkr.cluster.preflight import RIGHTS
from infra.components.k8s.rights import LOOKS, RULES, rights_objects
from infra.facts import NAMESPACE
from tests.builders.platforms import platform, run_platform

PLATFORM = "prod.us-east5.platform"
RENDERED = (
    "ConfigMap", "Job", "NetworkPolicy", "PodDisruptionBudget", "RayJob", "Secret", "Service", "ServiceAccount",
)  # fmt: skip
"""Kinds that a run consists of."""


def allows(verb: str, group: str, resource: str) -> bool:
    return any(verb in one["verbs"] and group in one["apiGroups"] and resource in one["resources"] for one in RULES)


def test_a_researcher_may_do_what_gkr_asks_for_before_a_launch() -> None:
    wanted = [(one.verb, one.group, f"{one.resource}/{one.subresource}".rstrip("/")) for one in RIGHTS]
    wanted += [
        (verb, KINDS[kind].group, KINDS[kind].plural) for kind in RENDERED for verb in ("create", "patch", "delete")
    ]
    assert [one for one in wanted if not allows(*one)] == []


def test_the_queues_of_the_whole_cluster_are_for_looking_only() -> None:
    assert {verb for one in LOOKS for verb in one["verbs"]} == {"get", "list", "watch"}
    kinds = {name: kind for name, kind in KINDS.items() if kind.group == "kueue.x-k8s.io"}
    assert {kind.plural for kind in kinds.values()} <= set(LOOKS[0]["resources"])
    role, binding, *_ = rights_objects(["gkr-0"], researchers=["user:one@example.com"])
    assert (role["kind"], binding["kind"], binding["roleRef"]["kind"]) == (
        "ClusterRole", "ClusterRoleBinding", "ClusterRole",
    )  # fmt: skip
    assert role["metadata"] == binding["metadata"] == {"name": binding["roleRef"]["name"]}


def test_nobody_reads_all_secrets_or_gives_rights_away() -> None:
    assert allows("get", "", "secrets")
    assert not any(allows(verb, "", "secrets") for verb in ("list", "watch"))
    assert not any("*" in [*one["verbs"], *one["apiGroups"], *one["resources"]] for one in RULES)
    groups = {group for one in RULES for group in one["apiGroups"]}
    assert "rbac.authorization.k8s.io" not in groups


def test_members_are_named_as_a_cluster_sees_them() -> None:
    members = [
        "group:research@example.com", "user:one@example.com", "serviceAccount:ci@p.iam.gserviceaccount.com",
        "principal://iam.googleapis.com/a/subject/b", "principalSet://iam.googleapis.com/a/group/b",
    ]  # fmt: skip
    *_, binding = rights_objects(["gkr-0"], researchers=members)
    assert [(one["kind"], one["name"]) for one in binding["subjects"]] == [
        ("Group", "research@example.com"),
        ("User", "one@example.com"),
        ("User", "ci@p.iam.gserviceaccount.com"),
        ("User", "principal://iam.googleapis.com/a/subject/b"),
        ("Group", "principalSet://iam.googleapis.com/a/group/b"),
    ]
    assert rights_objects(["gkr-0"], researchers=[]) == []


def test_a_platform_gives_them_to_the_researchers_of_its_environment() -> None:
    bound = run_platform(PLATFORM).of("kubernetes:rbac.authorization.k8s.io/v1:RoleBinding")
    assert sorted(one.inputs["metadata"]["namespace"] for one in bound) == platform(PLATFORM).namespaces
    assert NAMESPACE not in {one.inputs["metadata"]["namespace"] for one in bound}
    assert {one.inputs["subjects"][0]["name"] for one in bound} == {"research@example.com"}
