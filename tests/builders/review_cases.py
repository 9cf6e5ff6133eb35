"""Changes that a reviewer meets, as the engine's previews; `tests/golden/infra/review` has the comment of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.builders.previews import (
    BUCKET,
    CLUSTER,
    LABELS,
    NETWORK,
    POOL,
    around,
    bucket,
    cluster,
    cpu_pool,
    digest,
    protected_error,
    replaced,
    step,
    ultra_pool,
)

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
PASSWORD = "hunter2-correct-horse"
"""Must never come out of a review."""


@dataclass(frozen=True)
class Case:
    """A preview, the labels of the change, and whether it may land."""

    text: str
    labels: tuple[str, ...] = ()
    blocked: bool = False
    never: tuple[str, ...] = field(default=())
    """Texts that must not be in the comment."""


def no_change() -> Case:
    return Case(digest([*around(), step("same", POOL, "ultra-1", old=ultra_pool(), protect=True)]))


def nodes_added() -> Case:
    old, new = ultra_pool(nodes=256), ultra_pool(nodes=320)
    pool = step("update", POOL, "ultra-1", old=old, new=new, protect=True, diff={"nodeCount": "update"})
    return Case(digest([*around(), pool]))


def driver_changed() -> Case:
    """The pool is protected: the engine refuses as well, and no label helps."""
    old, new = ultra_pool(), ultra_pool(driver="DEFAULT")
    path = "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig.gpuDriverVersion"
    steps = replaced(
        POOL, "ultra-1", old=old, new=new, protect=True, diff={path: "update-replace"}, reasons=["nodeConfig"]
    )
    return Case(digest([*around(), *steps], diagnostics=[protected_error(POOL, "ultra-1")]), ("allow-loss",), True)


def order_of_networks_changed() -> Case:
    """Unprotected, and the provider names only the field's top: the table finds what is below it."""
    old, new = ultra_pool(), ultra_pool()
    networks = new["networkConfig"]["additionalNodeNetworkConfigs"]
    networks[1], networks[2] = networks[2], networks[1]
    return Case(
        digest([*around(), *replaced(POOL, "ultra-1", old=old, new=new, reasons=["networkConfig"])]), blocked=True
    )


def pool_removed_and_allowed() -> Case:
    return Case(digest([*around(), step("delete", POOL, "ultra-1", old=ultra_pool())]), ("allow-loss",))


def reservation_changed() -> Case:
    old, new = ultra_pool(), ultra_pool()
    new["nodeConfig"]["reservationAffinity"]["values"] = [
        "projects/example-gkr-prod/reservations/ultra-east5/reservationBlocks/ultra-east5-block-0009"
    ]
    path = "nodeConfig.reservationAffinity.values[0]"
    return Case(
        digest([*around(), *replaced(POOL, "ultra-1", old=old, new=new, diff={path: "update-replace"})]), blocked=True
    )


def image_type_changed() -> Case:
    """Updated in place, but every node is made anew, which takes the GPUs from what runs on them."""
    old, new = ultra_pool(), ultra_pool()
    new["nodeConfig"]["imageType"] = "UBUNTU_CONTAINERD"
    diff = {"nodeConfig.imageType": "update", "nodeConfig.gpudirectStrategy": "add"}
    new["nodeConfig"]["gpudirectStrategy"] = "RDMA"
    pool = step("update", POOL, "ultra-1", old=old, new=new, protect=True, diff=diff)
    return Case(digest([*around(), pool]), blocked=True)


def nodes_without_gpus_made_anew() -> Case:
    """A CPU pool's nodes may come and go."""
    old, new = cpu_pool(), cpu_pool()
    new["nodeConfig"]["imageType"] = "UBUNTU_CONTAINERD"
    pool = step("update", POOL, "cpu-2", old=old, new=new, protect=True, diff={"nodeConfig.imageType": "update"})
    return Case(digest([*around(), pool]))


def cluster_replaced() -> Case:
    """The heaviest: the cluster and, with it, every pool; a fabric network and the bucket go as well."""
    new = {**cluster(), "datapathProvider": "LEGACY_DATAPATH"}
    fabric = {"name": "us-east5-rdma", "networkProfile": "us-east5-a-vpc-roce"}
    pool_after = {**ultra_pool(), "cluster": UNKNOWN}
    steps = [
        *replaced(CLUSTER, "us-east5", old=cluster(), new=new, diff={"datapathProvider": "update-replace"}),
        step("same", POOL, "cpu", old=cpu_pool()),
        *replaced(POOL, "ultra-1", old=ultra_pool(), new=pool_after, reasons=["cluster"]),
        step("delete", NETWORK, "us-east5-rdma", old=fabric),
        step("delete", BUCKET, "us-east5", old=bucket(), retainOnDelete=True),
        step("delete", BUCKET, "scratch", old={**bucket(), "name": "example-gkr-prod-scratch"}),
    ]
    return Case(digest(steps), blocked=True)


def new_region() -> Case:
    steps = [
        step("create", CLUSTER, "us-east5", new=cluster(), protect=True),
        step("create", POOL, "cpu", new=cpu_pool()),
        step("create", POOL, "ultra-1", new=ultra_pool(), protect=True),
        step("create", POOL, "ultra-spot", new=ultra_pool(nodes=None, capacity="spot")),
        step("create", POOL, "ultra-flex", new=ultra_pool(nodes=None, capacity="flex-start")),
        step("create", BUCKET, "us-east5", new=bucket(), protect=True),
    ]
    return Case(digest(steps))


def against_policy() -> Case:
    pool = ultra_pool(capacity="on-demand")
    pool["nodeConfig"]["taints"] = []
    pool["networkConfig"] = {"enablePrivateNodes": False, "additionalNodeNetworkConfigs": []}
    firewall = {"allows": [{"protocol": "tcp", "ports": ["7070"]}], "sourceRanges": ["0.0.0.0/0"]}
    steps = [
        *around(),
        step("create", POOL, "wild", new=pool),
        step("create", "gcp:compute/firewall:Firewall", "open", new=firewall),
        step("create", "gcp:serviceaccount/key:Key", "ci", new={"serviceAccountId": "ci"}),
        step("create", "gcp:projects/iAMMember:IAMMember", "ci", new={"role": "roles/editor", "member": UNKNOWN}),
    ]
    return Case(digest(steps), ("something-else",), True)


def failed() -> Case:
    """The program stopped half way; also an allowed loss does not make such a preview pass."""
    message = f"error: Running program failed with an unhandled exception: REDIS_PASSWORD={PASSWORD}"
    return Case(
        digest(around()[:2], diagnostics=[{"severity": "error", "message": message}, {"severity": "info#err"}]),
        ("allow-loss", "allow-policy"), True, (PASSWORD,),
    )  # fmt: skip


def secrets_changed() -> Case:
    """A platform's objects: values that the engine masks, and values that nobody told it to mask."""
    config, secret = "kubernetes:core/v1:ConfigMap", "kubernetes:core/v1:Secret"
    deployment = "kubernetes:apps/v1:Deployment"
    name = {"name": "gkr-redis", "namespace": "gkr-system"}

    def pod(value: str) -> dict[str, Any]:
        digest_of_image = "us-docker.pkg.dev/example/gkr/services@sha256:" + "1" * 64
        env = [{"name": "REDIS_PASSWORD", "value": value}, {"name": "LEVEL", "value": "info"}]
        container = {"name": "main", "image": digest_of_image, "env": env}
        return {"metadata": name, "spec": {"template": {"spec": {"containers": [container]}}}}

    steps = [
        step("update", secret, "redis", old={"metadata": name, "stringData": "[secret]"},
             new={"metadata": name, "stringData": "[secret]"}, diff={"stringData": "update"}),
        *replaced(config, "facts", old={"metadata": name, "data": {"facts.json": "{}", "key": PASSWORD}},
                  new={"metadata": name, "data": {"facts.json": "{1}", "key": f"{PASSWORD}-2"}},
                  diff={'data["facts.json"]': "update-replace", "data.key": "update-replace"}),
        step("update", deployment, "redis", old=pod(PASSWORD), new=pod(f"{PASSWORD}-2"),
             diff={"spec.template.spec.containers[0].env[0].value": "update"}),
    ]  # fmt: skip
    return Case(digest(steps), blocked=True, never=(PASSWORD,))


def hostile_names() -> Case:
    """A name is text from a branch: it must not break the table, start HTML or call people."""
    name = "a|b`c <img src=x> @everyone\n## heading"
    old = {**cpu_pool(), "description": "x"}
    return Case(
        digest([step("delete", POOL, name, old=old), step("update", BUCKET, "b", protect=True, old=bucket(),
                new={**bucket(), "labels": {**LABELS, "note": name}}, diff={"labels.note": "add"})]),
        never=("<img", "@everyone"),
    )  # fmt: skip


CASES: dict[str, Callable[[], Case]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        no_change, nodes_added, driver_changed, order_of_networks_changed, pool_removed_and_allowed,
        reservation_changed, image_type_changed, nodes_without_gpus_made_anew, cluster_replaced, new_region,
        against_policy, failed, secrets_changed, hostile_names,
    )
}  # fmt: skip
