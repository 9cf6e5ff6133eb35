"""The syncer's machine against thousands of random stories of kills, delays, repeats and reorders."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders.sync_chaos import run_story

STEPS = int(os.environ.get("GKR_CHAOS_STEPS", "100000"))
"""`make chaos` takes a million."""
STORY = 500


@pytest.mark.slow
@pytest.mark.timeout(STEPS // 100)
def test_no_story_breaks_a_promise() -> None:
    """100,000 steps; a failure names its seed."""
    seen: Counter[object] = Counter()
    for seed in range(STEPS // STORY):
        try:
            world = run_story(Random(seed), steps=STORY)
        except AssertionError as error:
            raise AssertionError(f"story {seed}: {error}") from error
        seen[world.rules.mode, world.rules.fragments, len(world.rules.learners)] += 1
        seen.update(one.kind for one in world.verdicts.values())
        seen.update({"in merges": len(world.merged), "restarts": world.shell.epoch - 1, "fenced": len(world.fenced)})
        seen["lost"] += sum(sum(one.lost) for one in world.learners.values())
    # The stories are not empty ones: every mode with every number of fragments and learners, and everything happens.
    assert len([one for one in seen if isinstance(one, tuple)]) == 18
    least = {"in merges": 3000, "late": 50, "invalid": 20, "restarts": 500, "fenced": 1000, "lost": 1000}
    for what, count in least.items():
        assert seen[what] >= count * STEPS // 100_000, (what, seen)


@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 60))
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_short_stories_that_shrink(random: Random, steps: int) -> None:
    run_story(random, steps=steps)
