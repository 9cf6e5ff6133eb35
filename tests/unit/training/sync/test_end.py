"""When the syncer of a finished run may go."""

from __future__ import annotations

from typing import Any

from training.sync.end import LONGEST_SECONDS, End
from training.sync.messages import MemberStatus, Status


def status(*, final: bool = True, **states: str) -> Status:
    members = [
        MemberStatus(
            learner=name, generation=1, state=state, lease_age_seconds=0, step=1, pending_samples=0, merged_samples=1,
            discarded_samples=0,
        )
        for name, state in states.items()
    ]  # fmt: skip
    values: dict[str, Any] = dict.fromkeys(
        ("epoch", "version", "round", "samples_total", "target_samples"), 1
    )  # fmt: skip
    return Status(
        run="r", state="FINAL" if final else "SERVING", stage="", arrived=[], waiting_for=[], until=None,
        members=members, model_sha256="", theta_sha256="", final=final, **values,
    )  # fmt: skip


def end(evaluated: list[bool]) -> End:
    return End(frozenset({"east", "west"}), lambda: evaluated[-1])


def test_it_waits_for_the_final_model_all_learners_and_the_evaluation() -> None:
    answers = [True]
    one = end(answers)
    assert one.reached(status(final=False, east="left", west="left"), now=0) == ""
    assert one.reached(status(east="left", west="active"), now=1) == ""
    assert one.reached(status(east="left"), now=2) == "", "west has yet to come"
    answers.append(False)
    assert one.reached(status(east="left", west="left"), now=3) == ""
    answers.append(True)
    assert one.reached(status(east="left", west="left"), now=3.1) == "", "the bucket is not asked all the time"
    assert one.reached(status(east="left", west="dead"), now=6) == "", "west may be behind a link that is cut"
    assert "all learners have left" in one.reached(status(east="left", west="left"), now=9)


def test_it_waits_no_longer_than_a_while_after_the_final_model() -> None:
    one = end([False])
    assert one.reached(status(east="active"), now=100) == ""
    assert one.reached(status(east="active"), now=99 + LONGEST_SECONDS) == ""
    assert "has been final for" in one.reached(status(east="active"), now=101 + LONGEST_SECONDS)
