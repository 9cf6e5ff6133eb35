"""The syncer's metrics, read back by Prometheus' own parser."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from spec.events import SyncMember, SyncMerged
from training.sync.messages import FragmentStatus, MemberStatus, Status
from training.sync.metrics import SyncMetrics

Key = tuple[str, tuple[tuple[str, str], ...]]


def parsed(text: bytes) -> dict[Key, float]:
    """Every sample by name and labels; a name or sample that came twice fails."""
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def status(**fields: Any) -> Status:
    whole: dict[str, Any] = {
        "run": "r", "epoch": 4, "version": 9, "state": "SERVING", "stage": "", "round": 10, "arrived": [],
        "waiting_for": [], "until": None, "members": [], "samples_total": 5, "target_samples": 10, "model_sha256": "",
        "theta_sha256": "", "final": False,
    }  # fmt: skip
    return Status(**{**whole, **fields})


def member(learner: str, **fields: Any) -> MemberStatus:
    whole: dict[str, Any] = {
        "generation": 2, "state": "ACTIVE", "lease_age_seconds": 1.5, "step": 40, "pending_samples": 64,
        "merged_samples": 640, "discarded_samples": 0,
    }  # fmt: skip
    return MemberStatus(learner=learner, **{**whole, **fields})


def fragment(number: int, version: int) -> FragmentStatus:
    return FragmentStatus(
        fragment=number, version=version, round=version + 1, stage="", arrived=[], waiting_for=[], why="", until=None,
        accumulated=0.5,
    )  # fmt: skip


def merge(*, number: int = 0, cosine: float | None = 0.5) -> SyncMerged:
    members = [
        SyncMember(learner="east", generation=2, state="ACTIVE", arrived_seconds=0.0, staleness=3, norm=1.5, loss=0.7),
        SyncMember(learner="west", generation=1, state="SUSPECT"),
    ]
    return SyncMerged(
        time=100.0, source="syncer", round=9, fragment=number, epoch=4, members=members, open_seconds=2.0,
        grace_seconds=0.5, merge_seconds=0.2, durable_seconds=0.5, state_bytes=800,
        outer_gradient_norm=1.25, cosine=cosine, samples_total=5,
        theta_sha256="",
    )  # fmt: skip


def test_what_the_status_says_is_exported_under_stable_names() -> None:
    members = [
        member(
            "east",
            blocked_seconds={"barrier": 7.5},
            base_versions=[3, 4],
            staleness=[1, 0],
            bytes_in=1024,
            bytes_out=4096,
            transfer_rate=2e6,
            measures={"goodput": 0.9, "correction_norm": 0.25, "compression_error": 0.007, "resends": 2, "odd": 1},
        ),
        member("west", state="SUSPECT"),
    ]
    text = SyncMetrics().render(
        status(members=members, fragments=[fragment(0, 4), fragment(1, 5)], refusals={"late": 2, "token": 1}),
        verdicts={"late": 2},
    )
    found = parsed(text)
    want: dict[Key, float] = {
        ("gkr_sync_epoch", ()): 4,
        ("gkr_sync_merges_total", ()): 9,
        ("gkr_sync_version", (("fragment", "1"),)): 5,
        ("gkr_sync_contributions_total", (("verdict", "late"),)): 2,
        ("gkr_sync_contributions_total", (("verdict", "merged"),)): 0,
        ("gkr_sync_refused_messages_total", (("reason", "token"),)): 1,
        ("gkr_sync_members", (("state", "SUSPECT"),)): 1,
        ("gkr_sync_lease_age_seconds", (("learner", "west"),)): 1.5,
        ("gkr_sync_bytes_in_total", (("learner", "east"),)): 1024,
        ("gkr_sync_base_version", (("fragment", "1"), ("learner", "east"))): 4,
        ("gkr_sync_learner_staleness_versions", (("fragment", "0"), ("learner", "east"))): 1,
        ("gkr_sync_train_blocked_seconds_total", (("cause", "barrier"), ("learner", "east"))): 7.5,
        ("gkr_sync_alarm", ()): 0,
        ("gkr_sync_accumulated_rounds", (("fragment", "1"),)): 0.5,
        ("gkr_sync_bytes_out_total", (("learner", "east"),)): 4096,
        ("gkr_sync_transfer_rate", (("learner", "east"),)): 2e6,
        ("gkr_sync_goodput", (("learner", "east"),)): 0.9,
        ("gkr_sync_apply_correction_norm", (("learner", "east"),)): 0.25,
        ("gkr_sync_compression_relative_error", (("learner", "east"),)): 0.007,
        ("gkr_sync_resends_total", (("learner", "east"),)): 2,
        ("gkr_sync_resends_total", (("learner", "west"),)): 0,
    }
    assert {key: found.get(key) for key in want} == want
    assert ("gkr_sync_refused_messages_total", (("reason", "late"),)) not in found
    assert ("gkr_sync_goodput", (("learner", "west"),)) not in found, "it has not said"
    assert not [name for name, _ in found if "odd" in name], "only what is known has a name"


def test_merges_become_histograms_and_the_figures_of_each_fragments_last_one() -> None:
    metrics = SyncMetrics(wall=lambda: 130.0)
    for one in (merge(), merge(), merge(number=1, cosine=None)):
        metrics.observe(one)
    found = parsed(metrics.render(status(alarm="the disk is full"), verdicts={}))
    assert found["gkr_sync_merge_seconds_count", ()] == 3
    assert found["gkr_sync_quorum_wait_seconds_sum", ()] == 6.0
    assert found["gkr_sync_contributions_total", (("verdict", "merged"),)] == 3
    assert found["gkr_sync_participants_sum", ()] == 3, "a member that did not contribute does not take part"
    assert found["gkr_sync_staleness_versions_sum", ()] == 9
    assert found["gkr_sync_last_merge_age_seconds", (("fragment", "0"),)] == 30.0
    assert found["gkr_sync_pairwise_cosine_min", (("fragment", "0"),)] == 0.5
    assert found["gkr_sync_grace_seconds_sum", ()] == 1.5
    assert found["gkr_sync_state_bytes", (("fragment", "1"),)] == 800
    east = (("fragment", "1"), ("learner", "east"))
    assert (found["gkr_sync_displacement_norm", east], found["gkr_sync_inner_loss", east]) == (1.5, 0.7)
    assert ("gkr_sync_inner_loss", (("fragment", "1"), ("learner", "west"))) not in found
    assert ("gkr_sync_pairwise_cosine_min", (("fragment", "1"),)) not in found
    assert found["gkr_sync_alarm", ()] == 1


def test_the_duty_cycle_is_the_share_of_time_in_which_the_worker_works() -> None:
    now = [100.0]
    metrics = SyncMetrics(clock=lambda: now[0], wall=lambda: -now[0])  # a wall clock that is being set
    with metrics.working():
        now[0] += 3
    now[0] += 9
    assert parsed(metrics.render(status(), verdicts={}))["gkr_sync_duty_cycle", ()] == 0.25
