"""The last act of the home learner's driver on a cluster: summary.json in the run's folder of its bucket.

Folded from the events in that bucket, so it knows of learners of other regions only what the syncer said of them;
`gkr report` folds all regions' events. Its presence tells the syncer that nobody needs the final model any more.
"""

from __future__ import annotations

import time

from spec.events import Event, RunStatus, read_event
from spec.fold import fold
from spec.plan import Plan
from storage import Bucket, open_bucket
from training.sync.end import SUMMARY


def publish_summary(plan: Plan, *, bucket: Bucket | None = None) -> None:
    """Write it; the run has succeeded as far as the home learner can tell."""
    bucket = bucket or open_bucket(plan.home.run_uri)
    events: list[Event] = []
    for entry in bucket.list("events"):
        lines = bucket.get(entry.key).data.splitlines()
        events += [event for line in lines if (event := read_event(line)) is not None]
    end = RunStatus(time=time.time(), source=f"driver/{plan.home.name}", status="succeeded", exit_code=0)
    bucket.put(SUMMARY, (fold([*events, end], plan).model_dump_json(indent=2) + "\n").encode())
