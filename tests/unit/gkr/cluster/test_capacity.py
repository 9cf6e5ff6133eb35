from __future__ import annotations

from gkr.cluster.capacity import gpu_types, read_nodes
from gkr.cluster.explain_objects import quantity, seconds
from tests.builders.kube_objects import labels, node, pod


def test_total_is_free_used_and_broken_and_a_held_gpu_of_a_broken_node_counts_as_used() -> None:
    nodes = [node(f"n-{at}") for at in range(3)]
    nodes += [node("n-3", ready=False), node("n-4", cordoned=True), node("n-5", gpus=0)]
    pods = [pod("a", node_name="n-0", gpus=8), pod("b", node_name="n-1", gpus=6), pod("c", node_name="n-4", gpus=2)]
    (found,) = gpu_types(read_nodes(nodes, pods=pods))
    assert (found.gpu, found.nodes, found.total) == ("H200", 6, 48)
    assert (found.free, found.used, found.broken) == (10, 16, 22)
    assert found.free + found.used + found.broken == found.total
    assert (found.free_nodes, found.largest_on_node) == (1, 8)
    assert found.broken_nodes == {
        "n-3": "not ready (NodeStatusUnknown)", "n-4": "cordoned", "n-5": "offers 0 of 8 GPUs",
    }  # fmt: skip


def test_the_largest_block_is_counted_within_a_sub_block() -> None:
    nodes = [node(f"n-{at}") for at in range(64)]
    pods = [pod(f"p-{at}", node_name=f"n-{at}", gpus=8) for at in range(64) if at // 16 != 2 and at % 2]
    (found,) = gpu_types(read_nodes(nodes, pods=pods))
    assert (found.largest_in_subblock, found.subblock) == (128, "a3-ultra-b0/s2")


def test_types_are_whole_tokens_and_holders_are_experiments_most_first() -> None:
    nodes = [node("n-0"), node("n-1"), node("m-0", row="a3-mega"), node("h-0", row="a3-high")]
    pods = [
        pod("a", node_name="n-0", gpus=2),
        pod("b", node_name="n-1", gpus=8, own_labels=labels("small", run="r2")),
        pod("c", node_name="n-0", gpus=1, own_labels={}, namespace="other"),
        pod("done", node_name="n-0", gpus=8, phase="Succeeded"),
        pod("waits", gpus=8, phase="Pending"),
    ]
    types = {one.gpu: one for one in gpu_types(read_nodes(nodes, pods=pods))}
    assert set(types) == {"H100", "H100-MEGA", "H200"}
    assert list(types["H200"].holders.items()) == [
        ("small (r2)", 8),
        ("big (20261130-181727-ca6905)", 2),
        ("other/c", 1),
    ]


def test_nodes_stand_in_natural_order_and_know_their_place() -> None:
    found = read_nodes([node("n-10"), node("n-2"), node("n-65")], pods=[])
    assert [one.name for one in found] == ["n-2", "n-10", "n-65"]
    assert [one.place for one in found] == ["a3-ultra-b0/s0", "a3-ultra-b0/s0", "a3-ultra-b1/s0"]


def test_quantities_and_times_of_kubernetes() -> None:
    assert [quantity(one) for one in ("8", "500m", "2Gi", "1e3", "1k", 3, None, "", "x")] == [
        8,
        0.5,
        2**31,
        1000,
        1000,
        3,
        0,
        0,
        0,
    ]
    assert seconds("1970-01-01T00:01:00Z") == 60.0
    assert seconds("1970-01-01T00:01:00.250000Z") == 60.25
    assert seconds("") is None
    assert seconds("soon") is None
