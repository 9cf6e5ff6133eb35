"""One cause out of what many dying ranks leave behind."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from spec.errors import EXIT_REFUSED, EXIT_UNREACHABLE, GkrError, UnreachableError
from training.classify import RankEnd, classify
from training.context import RuntimeContext
from training.rank import write_reason
from training.sync.messages import ErrorReply
from training.sync.transport import SyncRefusedError


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


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UnreachableError("no answer"), EXIT_UNREACHABLE),
        (SyncRefusedError(ErrorReply(reason="layout", message="the model has another layout")), EXIT_REFUSED),
    ],
)
def test_what_the_syncer_says_no_to_keeps_its_exit_code(error: GkrError, exit_code: int, tmp_path: Path) -> None:
    """Read back from what a rank writes, whichever subclass the error is of."""
    context = RuntimeContext(
        plan="", learner="east", node="", node_dir=f"{tmp_path}", rank=0, local_rank=0, world_size=1, attempt=1,
        epoch=1, master_addr="", master_port=0, syncer_control="", syncer_bulk="", last_position=0,
    )  # fmt: skip
    write_reason(context, error)
    reason = json.loads((tmp_path / "reason-rank-0.json").read_text())
    cause = classify([end(0, 1, **reason)])
    assert (cause.kind, cause.exit_code) == ("syncer", exit_code)
    assert error.message in cause.text
