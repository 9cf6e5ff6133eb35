"""One look at the sync as text."""

from __future__ import annotations

from typing import Any

from gkr.syncing.asking import SyncNow
from gkr.syncing.lines import lines
from spec.sync_status import SyncStatus

NOW = 1_000.0


def look(*, source: str = "syncer", run_state: str = "running", trouble: str = "", **fields: Any) -> str:
    whole = {"run": "r", "state": "SERVING", "version": 7, "epoch": 2, "target_samples": 1000, "samples_total": 250}
    status = SyncStatus.model_validate({**whole, **fields})
    now = SyncNow("r", run_state, "events" if source == "events" else "syncer", NOW - 30, status, trouble=trouble)
    return "\n".join(lines(now, now=NOW))


def fragment(number: int, **fields: Any) -> dict[str, Any]:
    return {"fragment": number, "version": 7, "round": 8, **fields}


def test_an_open_round_says_in_one_sentence_why_and_until_when() -> None:
    waiting = fragment(0, stage="OPEN", arrived=["east"], waiting_for=["west"], why="waits for west", until=NOW + 62)
    text = look(fragments=[waiting])
    assert "round 8: waits for west, at most 1m02s more" in text
    assert "250 of 1000 samples merged (25%)" in text
    late = look(fragments=[{**waiting, "until": NOW - 1}])
    assert "waits for west, the deadline has passed" in late


def test_fragments_are_named_when_there_are_several_and_only_open_ones_are_listed_when_there_are_many() -> None:
    few = look(fragments=[fragment(0), fragment(1, stage="SEALED", why="is being merged")])
    assert "fragment 1, round 8: is being merged" in few
    many = look(fragments=[fragment(one, stage="OPEN" if one == 40 else "") for one in range(64)])
    assert "63 more fragments have no open round" in many
    assert "\n40 " in many
    assert "\n39 " not in many


def test_a_round_to_which_nobody_has_contributed_keeps_nobody_waiting_unless_the_run_drains() -> None:
    assert "no contribution waits: learners train" in look(fragments=[fragment(0)])
    empty = fragment(0, stage="OPEN", waiting_for=["east"], why="last contributions are on their way")
    assert "no contribution waits: learners train" in look(fragments=[empty])
    assert "round 8: last contributions are on their way" in look(fragments=[empty], state="DRAINING")


def test_the_first_weights_the_last_merge_and_an_alarm_stand_out() -> None:
    assert "waits for learner east to send the initial weights" in look(state="SEEDING", seed_from="east")
    assert "the last merge is published: weights abcdefabcdef" in look(final=True, theta_sha256="abcdef" * 10)
    assert "ALARM     the disk is full" in look(alarm="the disk is full")


def test_events_say_how_old_they_are_and_why_they_had_to_do() -> None:
    assert "events, as of 30s ago, because the syncer does not answer" in look(
        source="events", trouble="the syncer does not answer"
    )
    assert "events; the last is 30s old" in look(source="events", run_state="succeeded")


def test_a_learner_shows_what_it_costs_and_what_it_still_owes() -> None:
    member = {
        "learner": "east", "state": "ACTIVE", "generation": 3, "step": 175, "step_seconds": 0.4, "pending_samples": 640,
        "merged_samples": 11_200, "discarded_samples": 64, "in_flight_steps": 5, "base_versions": [6, 7],
        "staleness": [1, 0], "blocked_seconds": {"barrier": 75.0, "apply": 0.2}, "bytes_in": 3_800_000,
        "lease_age_seconds": 1.2,
    }  # fmt: skip
    text = look(members=[member], refusals={"late": 2})
    row = next(line for line in text.splitlines() if line.startswith("east"))
    assert " ".join(row.split()) == "east active 3 175 0.4 5 640 11.2k 64 6..7 0..1 3.8M 1s ago barrier 1m15s"
    assert "refused: late 2" in text


def test_after_an_early_end_no_round_is_open() -> None:
    text = look(state="ENDED", run_state="cancelled", source="events", fragments=[fragment(0)])
    assert "sync      barrier, ended, version 7" in text
    assert "no round is open: the run ended before its last merge" in text
