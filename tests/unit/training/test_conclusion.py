"""The home driver's summary in the bucket."""

from __future__ import annotations

from pathlib import Path

from spec.events import LearnerFinished, write_event
from spec.summary import Summary
from storage import open_bucket
from tests.builders.plans import bed, planned
from training.conclusion import publish_summary
from training.sync.end import SUMMARY

TEXT = """
version: 1
name: own
groups: [{name: trainer, nodes: 1, resources: {cpu: 100m, memory: 512Mi, shm: 64Mi}}]
run: "true"
"""


def test_the_summary_is_folded_from_all_segments_in_the_bucket(tmp_path: Path) -> None:
    plan = planned(TEXT, [bed()])
    bucket = open_bucket(tmp_path.as_uri())
    learner = plan.home.name
    finished = LearnerFinished.model_validate(
        {
            "time": 5.0, "source": f"rank/{learner}/0", "learner": learner, "attempt": 1, "step": 7,
            "samples_pending": 0,
            "samples_discarded": 0, "theta_sha256": "ab", "round": 1, "blocked_seconds": {},
        }
    )  # fmt: skip
    bucket.put(f"events/driver-{learner}/000001-00000000.jsonl", b"")
    bucket.put(f"events/driver-{learner}/000001-00000001.jsonl", write_event(finished).encode() + b"torn")
    publish_summary(plan, bucket=bucket)
    summary = Summary.read_json(bucket.get(SUMMARY).data)
    assert (summary.status, summary.experiment, summary.run) == ("succeeded", "own", plan.run)
    assert [one.name for one in summary.learners] == [learner]
    assert summary.learners[0].steps == 7
