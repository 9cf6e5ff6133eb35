"""Rules between stacks: each is broken once in stacks that are fine by themselves."""

from __future__ import annotations

import pytest

from spec.stack import check_all
from tests.builders.stack_files import NAMES, problems_between, shipped, stack_text

EAST, CENTRAL, SHARED = "prod.us-east5", "prod.us-central1", "prod.global"
EAST_PLATFORM, CENTRAL_PLATFORM = f"{EAST}.platform", f"{CENTRAL}.platform"
ULTRA_BLOCK = "projects/example-gkr-prod/reservations/ultra-east5/reservationBlocks/ultra-east5-block-0001"
NO_SERVICES = "apis=[container.googleapis.com, compute.googleapis.com, servicenetworking.googleapis.com]"
MEGA_POOLS = ("mega-1", "mega-2")
Change = tuple[str, str]
ONE_PROJECT: tuple[Change, ...] = tuple(
    (name, "project=example-gkr-prod") for name in ("dev.global", "dev.us-east4", "dev.us-east4.platform")
)
"""Development in production's project: allowed, but they share what the project has."""

RULES: dict[str, list[tuple[tuple[Change, ...], str, str, str, str]]] = {
    "no overlapping CIDRs within the primary VPC": [
        (((EAST, "network.nodes=10.0.16.0/20"),), EAST, "network.nodes", "of prod.us-central1", "free range"),
        (((EAST, "network.pods=10.64.0.0/13"),), EAST, "network.pods", "of prod.us-central1", "free range"),
        (((EAST, "network.services=10.48.16.0/20"),), EAST, "network.services", "of prod.us-central1", "free range"),
        (((EAST, "network.services=10.68.0.0/20"),), EAST, "network.services", "of prod.us-central1", "free range"),
        (((EAST, "network.pods=10.12.0.0/14"),), EAST, "network.pods", "would not admit these pods", "10.64.0.0/10"),
        (((EAST, "network.nodes=10.80.0.0/20"),), EAST, "network.nodes", "kept for pods", "free range"),
        (((EAST, "network.nodes=10.32.0.0/20"),), EAST, "network.nodes", "kept for file systems", "free range"),
        (((SHARED, "network.pods=10.64.0.0/14"),), CENTRAL, "network.pods", "outside 10.64.0.0/14", "free range"),
        (
            ((EAST, "fabrics.a3-ultra.range=10.48.16.0/20"), (EAST, "gpu_pools.ultra-1.nodes=60"),
             (EAST, "gpu_pools.ultra-2.nodes=60"), (EAST_PLATFORM, "kueue.queues=[{name: q, nodes: {ultra-1: 60}}]")),
            EAST, "fabrics.a3-ultra.range", "could not reach that region", "free range",
        ),
    ],
    "NETWORKS budget": [
        (((SHARED, "network.networks_quota=10"),), SHARED, "network.networks_quota", "need 11 networks", "NETWORKS"),
        (
            (*ONE_PROJECT, (SHARED, "network.networks_quota=19")), SHARED, "network.networks_quota",
            "need 20 networks (primary 2, dev.us-east4 8, prod.us-central1 8, prod.us-east5 2)", "NETWORKS",
        ),
    ],
    "a reservation used once": [
        (
            ((CENTRAL, "reservations.0.path=projects/example-gkr-prod/reservations/ultra-east5"),
             (CENTRAL, f"gpu_pools.mega-1.capacity.reservation={ULTRA_BLOCK}")),
            EAST, "gpu_pools[0].capacity.reservation", "prod.us-central1 already uses", "another block",
        ),
        (
            ((CENTRAL, "reservations.0.path=projects/example-gkr-prod/reservations/ultra-east5"),
             (CENTRAL, "gpu_pools.mega-1.capacity.reservation=projects/example-gkr-prod/reservations/ultra-east5")),
            EAST, "gpu_pools[1].capacity.reservation", "prod.us-central1 already uses", "another block",
        ),
    ],
    "syncer ports agree": [
        (((EAST, "syncer.control_port=7080"),), EAST, "syncer.control_port", "would drop the sync", "write 7070"),
        (((EAST, "syncer.bulk_port=7081"),), EAST, "syncer.bulk_port", "would drop the sync", "write 7071"),
    ],
    "names that exist once": [
        (((EAST, "cluster.name=us-central1"),), EAST, "cluster.name", "tell them apart", "another name"),
        (((EAST, "bucket.name=example-gkr-prod-us-central1"),), EAST, "bucket.name", "could not be made", "another"),
        (((EAST, "buckets=[{name: example-gkr-prod-data}]"),), EAST, "buckets[0].name", "could not be made", "another"),
        (
            (*ONE_PROJECT, ("dev.global", "network.name=gkr")), SHARED, "network.name",
            'network "example-gkr-prod/gkr" is also in dev.global', "another name",
        ),
    ],
    "what a region needs of the global stack": [
        (((EAST, "project=example-gkr-dev"),), EAST, "project", "in one project", "write example-gkr-prod"),
        (((SHARED, "network.services_access=null"),), EAST, "lustre", "no file system", "prod.global.yaml"),
        (((SHARED, NO_SERVICES),), EAST, "lustre", "not switch on lustre.googleapis.com", "add lustre.googleapis.com"),
        (
            ((SHARED, NO_SERVICES), *((CENTRAL, f"gpu_pools.{pool}.image_streaming=false") for pool in MEGA_POOLS)),
            EAST, "gpu_pools[0].image_streaming", "containerfilesystem.googleapis.com", "add containerfilesystem",
        ),
        (
            ((SHARED, NO_SERVICES), *((CENTRAL, f"gpu_pools.{pool}.image_streaming=false") for pool in MEGA_POOLS)),
            CENTRAL, "cpu_pool", "containerfilesystem.googleapis.com", "add containerfilesystem",
        ),
        (((SHARED, NO_SERVICES), (EAST, "cluster.fleet=true")), EAST, "cluster.fleet", "gkehub.googleapis.com", "add"),
        (
            ((SHARED, NO_SERVICES), (EAST, "cluster.addons.filestore=true")), EAST, "cluster.addons.filestore",
            "file.googleapis.com", "leave apis out",
        ),
    ],
    "what a platform needs of the region": [
        (((EAST_PLATFORM, "project=example-gkr-dev"),), EAST_PLATFORM, "project", "no identity", "example-gkr-prod"),
        (
            ((EAST_PLATFORM, "kueue.queues.research.nodes={cpu: 1, ultra-3: 1}"),), EAST_PLATFORM,
            "kueue.queues[0].nodes.ultra-3", 'no pool "ultra-3"', "did you mean",
        ),
        (
            ((EAST_PLATFORM, "kueue.queues.urgent.nodes.ultra-2=40"),), EAST_PLATFORM, "kueue.queues[1].nodes.ultra-2",
            "hand out 328 nodes of pool ultra-2, which has 320", "write 32",
        ),
        (
            ((EAST_PLATFORM, "kueue.queues=[{name: q, nodes: {cpu: 40}}]"),), EAST_PLATFORM, "kueue.queues",
            "stand idle", "ultra-1: 320",
        ),
        (
            ((EAST_PLATFORM, "installers={}"),), EAST_PLATFORM, "installers", "no installer gib_plugin",
            "installers.gib_plugin",
        ),
        (
            ((CENTRAL_PLATFORM, "installers.nri_injector=null"),), CENTRAL_PLATFORM, "installers",
            "no installer nri_injector", "installers.nri_injector",
        ),
        (
            ((EAST, "fabrics.a3-ultra={mode: dranet}"),), EAST, "fabrics.a3-ultra.mode", "none would start",
            "in place of mode: dranet",
        ),
        (
            ((EAST_PLATFORM, "shared.services.judge.resources.gpu=B200:1"),), EAST_PLATFORM,
            "shared.services.judge.resources.gpu", "would never start", "H200",
        ),
    ],
}  # fmt: skip
"""Rule -> (changes, stack that is to be mended, path in it, part of the message, part of the hint)."""
CASES = [(rule, *case) for rule, cases in RULES.items() for case in cases]


@pytest.mark.parametrize(
    ("changes", "stack", "path", "message", "hint"),
    [case[1:] for case in CASES],
    ids=[f"{case[0]}-{case[1][0][1]}" for case in CASES],
)
def test_a_broken_rule_names_the_file_to_mend(
    changes: tuple[Change, ...], stack: str, path: str, message: str, hint: str
) -> None:
    found = problems_between(*changes)
    hits = [one for one in found if one.path == path and message in one.message]
    assert len(hits) == 1, "\n".join(str(one) for one in found)
    assert hint in hits[0].hint
    changed = [text for name, text in changes if name == stack]
    assert hits[0].file in [f"stacks/Pulumi.{stack}.yaml", *(f"--set {text}" for text in changed)]


def test_the_other_place_is_shown() -> None:
    found = problems_between((EAST, "network.nodes=10.0.16.0/20"))
    text = stack_text(CENTRAL)
    line = text[: text.index("nodes: 10.0.16.0/20")].count("\n") + 1
    assert f"; see also stacks/Pulumi.prod.us-central1.yaml:{line}:" in found[0].message


@pytest.mark.parametrize("missing", ["prod.global", "prod.us-east5"])
def test_a_reference_to_a_stack_that_does_not_exist(missing: str) -> None:
    stacks = {name: shipped(name).value for name in NAMES if name != missing}
    found = [one for one in check_all(stacks) if "there is no stack" in one.message]
    builders = [name for name in stacks if name.startswith(EAST) or (missing == SHARED and name == CENTRAL)]
    wanted = {name for name in builders if name.endswith(".platform") == (missing == EAST)}
    assert {one.path[0] for one in found} == wanted
    assert all(missing in one.message for one in found)
    assert all(one.hint for one in found)


def test_a_reference_to_a_stack_of_another_kind() -> None:
    east = shipped(EAST).value.model_copy(update={"global_stack": CENTRAL})
    stacks = {name: shipped(name).value for name in NAMES} | {EAST: east}
    found = [one for one in check_all(stacks) if one.path == (EAST, "global_stack")]
    assert ["it has no outputs of that kind" in one.message for one in found] == [True]


def test_environments_do_not_share_addresses() -> None:
    """Development has a network of its own, so it may use production's ranges; the shipped ones do."""
    dev, prod = shipped("dev.us-east4").value, shipped(EAST).value
    assert dev.network.nodes.startswith("10.0.0.0/")  # pyright: ignore[reportAttributeAccessIssue]
    assert prod.network.nodes.startswith("10.0.0.0/")  # pyright: ignore[reportAttributeAccessIssue]
    assert problems_between() == []


def test_two_environments_may_share_a_project() -> None:
    assert problems_between(*ONE_PROJECT) == []


def test_a_region_without_a_syncer_may_say_any_port() -> None:
    assert problems_between((EAST, "syncer={mode: none, control_port: 9000, bulk_port: 9001}")) == []
