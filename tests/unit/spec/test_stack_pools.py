"""The rules of machines, pools, reservations and fabrics: each is broken once in a shipped stack."""

from __future__ import annotations

import pytest

from spec.problems import Problem
from spec.stack import RegionStack
from tests.builders.stack_files import problems_of, shipped

ULTRA, MEGA, DEV = "prod.us-east5", "prod.us-central1", "dev.us-east4"
WHOLE = "projects/example-gkr-prod/reservations/ultra-east5"
BLOCK = f"{WHOLE}/reservationBlocks/ultra-east5-block-0001"
SPOT = "gpu_pools.ultra-1.capacity={kind: spot}"
TWO_MACHINES, HIGH = "gpu_pools.mega-flex.machine=a3-ultra", "gpu_pools.mega-flex.machine=a3-high"

RULES: dict[str, list[tuple[str, tuple[str, ...], str, str, str]]] = {
    "reservation zone = node_locations = RoCE profile zone": [
        (ULTRA, ("gpu_pools.ultra-1.zone=us-east5-b",), "gpu_pools[0].zone", "get no machines", "write us-east5-a"),
        (ULTRA, ("reservations.0.zone=us-east5-c",), "gpu_pools[0].zone", "get no machines", "write us-east5-c"),
        (
            ULTRA, (SPOT, "gpu_pools.ultra-1.zone=us-east5-b"), "gpu_pools[1].zone", "a RoCE network is in one",
            "use zone us-east5-b",
        ),
    ],
    "zone within cluster location": [
        (ULTRA, ("gpu_pools.ultra-1.zone=us-east4-a",), "gpu_pools[0].zone", "not in region us-east5", "us-east5-a"),
        (ULTRA, ("reservations.0.zone=us-east4-a",), "reservations[0].zone", "not in region us-east5", "us-east5-a"),
        (ULTRA, ("cpu_pool.zones=[us-east5-a, us-east4-a]",), "cpu_pool.zones[1]", "could not join", "us-east5-a"),
        (ULTRA, ("cpu_pool.zones=[us-east5-a, us-east5]",), "cpu_pool.zones[1]", "not in region", "us-east5-a"),
    ],
    "hyperdisk-balanced on Ultra/A4": [
        (
            ULTRA, ("gpu_pools.ultra-1.boot_disk.kind=pd-balanced",), "gpu_pools[0].boot_disk.kind",
            "no node would start", "hyperdisk-balanced",
        ),
        (
            ULTRA, ("gpu_pools.ultra-1.machine=a4", "gpu_pools.ultra-1.boot_disk.kind=pd-ssd"),
            "gpu_pools[0].boot_disk.kind", "no node would start", "hyperdisk-balanced",
        ),
        (
            MEGA, ("gpu_pools.mega-1.boot_disk.kind=hyperdisk-balanced",), "gpu_pools[0].boot_disk.kind",
            "no node would start", "pd-balanced or pd-ssd",
        ),
    ],
    "SSD count per row": [
        (ULTRA, ("gpu_pools.ultra-1.local_ssds=16",), "gpu_pools[0].local_ssds", "32 local SSDs, not 16", "leave"),
        (MEGA, ("gpu_pools.mega-1.local_ssds=32",), "gpu_pools[0].local_ssds", "16 local SSDs, not 32", "leave"),
    ],
    "version floor per row": [
        (ULTRA, ("cluster.version=1.32.9-gke.1",), "cluster.version", "older than 1.33.0-gke.0", "over TCP"),
        (MEGA, ("cluster.version=1.32.11-gke.1173999",), "cluster.version", "older than 1.32.11-gke.1174000", "take"),
        (
            ULTRA, ("cluster.version=1.34.1-gke.1829000", "fabrics.a3-ultra={mode: dranet}"), "cluster.version",
            "older than 1.34.1-gke.1829001", "take",
        ),
    ],
    "no fast_socket": [
        (ULTRA, ("gpu_pools.ultra-1.fast_socket=true",), "gpu_pools[0].fast_socket", "NCCL would use TCP", "remove"),
        (MEGA, ("gpu_pools.mega-1.fast_socket=true",), "gpu_pools[0].fast_socket", "NCCL would use TCP", "remove"),
    ],
    "SPECIFIC_RESERVATION excludes spot, flex_start, queued_provisioning and placement policy": [
        (ULTRA, ("gpu_pools.ultra-1.capacity.kind=spot",), "gpu_pools[0].capacity.reservation", "refused", "remove"),
        (
            ULTRA, ("gpu_pools.ultra-1.capacity.kind=flex-start",), "gpu_pools[0].capacity.reservation", "refused",
            "remove",
        ),
        (ULTRA, ("gpu_pools.ultra-1.capacity.queued=true",), "gpu_pools[0].capacity.queued", "refused", "remove"),
        (ULTRA, ("gpu_pools.ultra-1.capacity.max_run=1d",), "gpu_pools[0].capacity.max_run", "refused", "remove"),
        (
            ULTRA, ("gpu_pools.ultra-1.capacity.compact_placement=true",), "gpu_pools[0].capacity.compact_placement",
            "misleading message", "remove",
        ),
        (DEV, ("gpu_pools.mega-flex.capacity.compact_placement=true",), "gpu_pools[1].capacity.compact_placement",
         "queued", "remove"),
    ],
    "max_surge 0 when reserved": [
        (ULTRA, ("gpu_pools.ultra-1.upgrade.max_surge=1",), "gpu_pools[0].upgrade.max_surge", "does not have",
         "max_surge: 0"),
    ],
    "DRANET XOR Device networks per cluster": [
        (
            DEV,
            (
                "cluster.name=mixed", "fabrics.a3-ultra={mode: dranet}", "gpu_pools.mega-flex.machine=a3-ultra",
            ),
            "fabrics", "only one of them in a cluster", "use one mode",
        ),
        (ULTRA, ("fabrics.a3-ultra.mode=dranet",), "fabrics.a3-ultra.range", "ignored", "remove range"),
        (ULTRA, ("fabrics.a3-ultra={}",), "fabrics.a3-ultra.mode", "no range", "192.168.0.0/16"),
    ],
    "no overlapping CIDRs within a cluster": [
        (ULTRA, ("network.services=10.64.0.0/20",), "network.services", "overlaps 10.64.0.0/14", "free range"),
        (ULTRA, ("network.nodes=10.48.0.0/16",), "network.services", "overlaps 10.48.0.0/16", "free range"),
        (ULTRA, ("fabrics.a3-ultra.range=10.0.0.0/16",), "fabrics.a3-ultra.range", "overlaps 10.0.0.0/20", "free"),
        (
            DEV, (TWO_MACHINES, "fabrics.a3-ultra={range: 192.168.32.0/19}"), "fabrics.a3-ultra.range",
            "overlaps 192.168.0.0/18", "free",
        ),
    ],
    "reservations": [
        (ULTRA, ("reservations.0.machine=a3-mega",), "gpu_pools[0].machine", "holds a3-mega", "write a3-mega"),
        (ULTRA, ("reservations.0.nodes=600",), "gpu_pools[1].nodes", "640 machines of a reservation of 600", "by 40"),
        (ULTRA, ("reservations=[]",), "gpu_pools[0].capacity.reservation", "not among reservations", "add it"),
        (ULTRA, (f"gpu_pools.ultra-2.capacity.reservation={BLOCK}",), "gpu_pools[1].capacity.reservation",
         "pool ultra-1 already uses", "different blocks"),
        (ULTRA, (f"gpu_pools.ultra-2.capacity.reservation={WHOLE}",), "gpu_pools[1].capacity.reservation",
         "pool ultra-1 already uses", "different blocks"),
        (ULTRA, (f"reservations.0.path={BLOCK}",), "reservations[0].path", "counted twice", f"write {WHOLE}"),
        (ULTRA, ("gpu_pools.ultra-1.capacity={kind: reservation}",), "gpu_pools[0].capacity.kind", "names none", "add"),
        (MEGA, ("reservations.1.path=projects/example-gkr-prod/reservations/mega-central1",), "reservations[1].path",
         "given twice", "remove one"),
        (ULTRA, ("reservations.0.create=true", "project=example-other"), "reservations[0].create",
         "cannot make a reservation in project example-gkr-prod", "remove create"),
    ],
    "capacity that a machine can have": [
        (ULTRA, ("gpu_pools.ultra-1.capacity={kind: on-demand}",), "gpu_pools[0].capacity.kind", "stay empty", "spot"),
    ],
    "machines": [
        (ULTRA, ("gpu_pools.ultra-1.machine=a3-ulta",), "gpu_pools[0].machine", "not in the catalogue", "a3-ultra"),
        (ULTRA, ("gpu_pools.ultra-1.machine=a4x",), "gpu_pools[0].machine", "not supported", "use"),
        (ULTRA, ("gpu_pools.ultra-1.machine=n2-standard-8",), "gpu_pools[0].machine", "has no GPUs", "use"),
        (ULTRA, ("cpu_pool.machine=a3-ultra",), "cpu_pool.machine", "has GPUs", "use"),
        ("local.bed-a", ("cpu_pool.cpu=null",), "cpu_pool.machine", "no size of its own", "write cpu and memory"),
    ],
    "CPU pool": [
        (ULTRA, ("cpu_pool.zones=[us-east5-a]",), "cpu_pool.zones", "all GPUs stand idle", "two or three zones"),
        (ULTRA, ("cpu_pool.zones=[us-east5-a, us-east5-a]",), "cpu_pool.zones", "given twice", "remove"),
        (ULTRA, ("cpu_pool.min_nodes=41",), "cpu_pool.max_nodes", "above", "at least 41"),
        (ULTRA, ("gpu_pools.ultra-2.name=cpu",), "gpu_pools[1].name", "two pools", "its own name"),
        (ULTRA, ("gpu_pools.ultra-2.name=ultra-1",), "gpu_pools[1].name", "two pools", "its own name"),
    ],
    "fabric": [
        (ULTRA, ("fabrics={}",), "gpu_pools[0].machine", "over TCP", "add fabrics: {a3-ultra:"),
        (ULTRA, ("fabrics.a3-mega={range: 10.1.0.0/16}",), "fabrics.a3-mega", "quota for nothing", "a3-ultra"),
        (ULTRA, ("cluster.multi_networking=false",), "cluster.multi_networking", "only when a cluster is made", "true"),
        (MEGA, ("fabrics.a3-mega.mtu=8896",), "fabrics.a3-mega.mtu", "packets of 8244, not 8896", "remove mtu"),
        (ULTRA, ("fabrics.a3-ultra.range=192.168.0.0/20",), "fabrics.a3-ultra.range", "subnets of 252", "/18"),
        (ULTRA, ("fabrics.a3-ultra.range=192.168.0.0/26",), "fabrics.a3-ultra.range", "subnets of 0", "/18"),
    ],
    "one Network object of a name": [
        (
            DEV, (HIGH, "fabrics.a3-high={range: 192.168.64.0/18}"), "fabrics.a3-high",
            "both have networks called vpc1, vpc2, vpc3, vpc4", "another region's stack",
        ),
        (
            ULTRA, ("gpu_pools.ultra-1.machine=a4", SPOT, "fabrics.a4={range: 172.16.0.0/16}"), "fabrics.a4",
            "both have networks called gvnic-1, rdma-0", "another region's stack",
        ),
    ],
    "room": [
        (ULTRA, ("network.nat.addresses=10",), "network.nat.addresses", "10 NAT addresses have 1024 ports each for 630",
         "addresses: 11"),
        (DEV, ("network.nat.ports_per_node=32768",), "network.nat.addresses", "could reach nothing outside", "8"),
        (ULTRA, ("network.nodes=10.0.0.0/23",), "network.nodes", "508 addresses and pools have 680 nodes", "/22"),
        (ULTRA, ("network.pods=10.64.0.0/17",), "network.pods", "the last nodes could not join", "/16"),
        (ULTRA, ("gpu_pools.ultra-1.max_pods_per_node=48",), "gpu_pools[0].max_pods_per_node", "powers of two",
         "32 or 64"),
    ],
}  # fmt: skip
"""Rule -> (stack, changes, path, part of the message, part of the hint)."""
CASES = [(rule, *case) for rule, cases in RULES.items() for case in cases]


@pytest.mark.parametrize(
    ("stack", "changes", "path", "message", "hint"),
    [case[1:] for case in CASES],
    ids=[f"{case[0]}-{'-'.join(case[2])}" for case in CASES],
)
def test_a_broken_rule_says_what_it_would_cause_and_what_to_write(
    stack: str, changes: tuple[str, ...], path: str, message: str, hint: str
) -> None:
    found = problems_of(stack, *changes)
    hits = [one for one in found if one.path == path and message in one.message]
    assert len(hits) == 1, "\n".join(str(one) for one in found)
    assert hint in hits[0].hint


@pytest.mark.parametrize(
    ("stack", "changes"),
    [
        (ULTRA, (SPOT,)),
        (ULTRA, ("gpu_pools.ultra-1.boot_disk.kind=hyperdisk-balanced", "gpu_pools.ultra-1.local_ssds=32")),
        (ULTRA, ("fabrics.a3-ultra={mode: dranet}",)),
        (ULTRA, ("fabrics.a3-ultra={mode: dranet}", "cluster.multi_networking=false")),
        (ULTRA, ("gpu_pools.ultra-1.upgrade.max_unavailable=320",)),
        (ULTRA, ("reservations.0.nodes=700",)),
        (ULTRA, ("reservations.0.create=true",)),
        (ULTRA, (f"gpu_pools.ultra-2.capacity.reservation={BLOCK}-other",)),
        (MEGA, ("gpu_pools.mega-1.boot_disk.kind=pd-ssd", "fabrics.a3-mega.mtu=8244")),
        (DEV, ("gpu_pools.mega-spot.capacity={kind: on-demand}", "gpu_pools.mega-spot.upgrade.max_surge=1")),
        (DEV, ("gpu_pools.mega-spot.capacity={kind: spot, compact_placement: true}",)),
        (DEV, ("gpu_pools.mega-flex.zone=us-east4-c",)),
        (DEV, (TWO_MACHINES, "fabrics.a3-ultra={range: 192.168.64.0/18}")),
        (
            ULTRA,
            (
                "gpu_pools.ultra-1.machine=a4",
                SPOT,
                "gpu_pools.ultra-1.boot_disk.kind=hyperdisk-balanced",
                "fabrics={a3-ultra: {mode: dranet}, a4: {mode: dranet}}",
            ),
        ),
        (DEV, ("gpu_pools=[]", "fabrics={}", "cpu_pool.zones=[us-east4-a]")),
        ("local.bed-a", ("gpu_pools.ultra.nodes=8",)),
    ],
)
def test_what_the_rules_leave_free(stack: str, changes: tuple[str, ...]) -> None:
    assert problems_of(stack, *changes) == []


def test_a_shared_reservation_may_belong_to_another_project() -> None:
    other = "projects/owner-of-machines/reservations/big"
    changes = (
        f"reservations.0.path={other}",
        f"gpu_pools.ultra-1.capacity.reservation={other}/reservationBlocks/one/reservationSubBlocks/s-1",
        f"gpu_pools.ultra-2.capacity.reservation={other}/reservationBlocks/two",
    )
    config = shipped(ULTRA, *changes).value
    assert isinstance(config, RegionStack)
    parts = [pool.capacity.reserved for pool in config.gpu_pools]
    assert [(one.project, one.sub_block) for one in parts if one] == [
        ("owner-of-machines", "s-1"),
        ("owner-of-machines", ""),
    ]


@pytest.mark.parametrize("nodes", [1, 12, 13, 252, 253, 640, 4092, 4093])
def test_the_range_that_a_hint_proposes_is_accepted_and_half_of_it_is_not(nodes: int) -> None:
    """Fabric and nodes: the prefix in the hint is the smallest range with room."""
    size = (
        "gpu_pools.ultra-2.nodes=0", f"gpu_pools.ultra-1.nodes={nodes}", f"reservations.0.nodes={nodes}",
        "cpu_pool.max_nodes=3", "network.pods=10.64.0.0/10",
    )  # fmt: skip
    for path in ("fabrics.a3-ultra.range", "network.nodes"):

        def refused(prefix: int, path: str = path) -> list[Problem]:
            base = "192.168.0.0" if path.startswith("fabrics") and prefix > 16 else "10.0.0.0"
            found = problems_of(ULTRA, *size, f"{path}={base}/{prefix}")
            return [one for one in found if one.path == path and "addresses" in one.message]

        prefix = int(refused(30)[0].hint.partition("/")[2].partition(";")[0])
        assert refused(prefix) == []
        assert len(refused(prefix + 1)) == 1
