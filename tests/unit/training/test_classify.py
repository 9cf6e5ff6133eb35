"""One cause out of what many dying ranks leave behind."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from training.classify import RankEnd, classify


def end(rank: int, code: int, at: float = 0.0, **reason: Any) -> RankEnd:
    return RankEnd(rank=rank, code=code, monotonic=at, reason=reason or None)


def test_all_zero_is_finished() -> None:
    assert classify([end(0, 0), end(1, 0)]).kind == "finished"


def test_the_killed_rank_is_the_cause_and_its_victims_are_not() -> None:
    ends = [end(0, 1, 1.0, type="RuntimeError", message="[gloo] Connection closed by peer"), end(1, -9, 1.2)]
    for order in permutations(ends):
        cause = classify(list(order))
        assert (cause.kind, cause.text, cause.ranks) == ("killed", "SIGKILL", (1,))


def test_an_import_error_is_the_persons_with_its_place() -> None:
    cause = classify([end(0, 1, type="ModuleNotFoundError", message="No module named 'nope'", where="train.py:3")])
    assert cause.kind == "user"
    assert "No module named 'nope' (train.py:3)" in cause.text


def test_a_shape_error_is_the_persons_although_torch_calls_it_a_runtime_error() -> None:
    cause = classify(
        [
            end(
                1,
                1,
                type="RuntimeError",
                message="mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)",
                where="m.py:7",
            )
        ]
    )
    assert cause.kind == "user"


def test_a_user_error_wins_over_its_victims_whatever_the_order() -> None:
    ends = [
        end(0, 1, 5.0, type="DistBackendError", message="remote error"),
        end(1, 1, 6.0, type="TypeError", message="bad argument", where="train.py:9"),
        end(2, 1, 4.0, type="RuntimeError", message="Connection reset by peer"),
    ]
    for order in permutations(ends):
        assert classify(list(order)).kind == "user"


def test_only_victims_is_a_cascade() -> None:
    cause = classify([end(0, 1, type="RuntimeError", message="gloo: Connection closed by peer")])
    assert cause.kind == "cascade"


def test_not_finite_is_numeric() -> None:
    assert classify([end(0, 1, type="FloatingPointError", message="loss is nan")]).kind == "numeric"


def test_a_config_error_keeps_its_exit_code() -> None:
    cause = classify([end(0, 3, type="ConfigError", message="text_width", exit_code=3)])
    assert (cause.kind, cause.exit_code) == ("user", 3)


def test_an_exit_without_a_reason_is_unknown() -> None:
    cause = classify([end(0, 70)])
    assert (cause.kind, cause.text) == ("unknown", "rank 0: exit 70")
