"""`--set` changes one value and is to blame for what is wrong with it."""

from __future__ import annotations

import pytest

from spec.nodes import Node, Source, read_tree
from spec.overrides import apply_overrides
from spec.problems import DocumentError

TEXT = "name: a\nlearners:\n  - {name: east, cluster: x}\n  - {name: west, cluster: y}\n"


def changed(*overrides: str) -> Node:
    return apply_overrides(read_tree(Source(TEXT, "t.yaml")), overrides=overrides)


@pytest.mark.parametrize(
    "path", ["learners[1].cluster", "learners.1.cluster", "learners.west.cluster", "learners[west].cluster"]
)
def test_an_item_of_a_list_is_named_by_index_or_by_name(path: str) -> None:
    tree = changed(f"{path}=z")
    assert tree.plain() == {
        "name": "a",
        "learners": [{"name": "east", "cluster": "x"}, {"name": "west", "cluster": "z"}],
    }


def test_only_the_first_equals_sign_splits() -> None:
    assert changed("env.NCCL_IB_HCA==mlx5_0:1,mlx5_1:1").entries["env"].plain() == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}


@pytest.mark.parametrize(
    ("value", "want"),
    [("12", 12), ("2e-4", 2e-4), ("no", "no"), ("[a, b]", ["a", "b"]), ("{x: 1}", {"x": 1}), ("", None), ("'7'", "7")],
)
def test_the_value_is_yaml(value: str, want: object) -> None:
    assert changed(f"a.b={value}").entries["a"].plain() == {"b": want}


def test_a_later_flag_wins_and_missing_mappings_are_made() -> None:
    assert changed("a.b.c=1", "a.b.c=2", "a.b.d=3").entries["a"].plain() == {"b": {"c": 2, "d": 3}}


@pytest.mark.parametrize(
    ("flag", "want"),
    [
        ("name", "expected a.b=value"),
        ("=3", "expected a.b=value"),
        ("learners.9.cluster=x", "learners has no item '9'"),
        ("learners.nrth.cluster=x", "learners has no item 'nrth'"),
        ("name.x=1", "name is the single value 'a'; it has no x"),
        ("a=[1", "not valid YAML"),
        ("a={x: 1, x: 2}", 'key "x" is given twice'),
    ],
)
def test_a_flag_that_cannot_be_applied_points_to_itself(flag: str, want: str) -> None:
    with pytest.raises(DocumentError) as caught:
        changed(flag)
    (problem,) = caught.value.problems
    assert problem.file == f"--set {flag}"
    assert want in problem.message
    assert problem.line == 0


def test_all_flags_that_cannot_be_applied_are_reported() -> None:
    with pytest.raises(DocumentError) as caught:
        changed("x", "y")
    assert len(caught.value.problems) == 2
