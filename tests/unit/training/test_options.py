"""What a driver is told, by its command line or by its pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec.errors import ConfigError
from training.options import parse

POD = {"GKR_PLAN": "/gkr/plan/plan.json", "GKR_LEARNER": "east", "GKR_RUN_DIR": "/gkr/run"}


def test_in_a_pod_the_environment_says_everything() -> None:
    options = parse([], environment=POD)
    assert (options.plan, options.learner, options.run_dir) == (Path("/gkr/plan/plan.json"), "east", Path("/gkr/run"))
    assert options.events is None
    assert options.attempt == 0


def test_the_command_line_goes_before_the_environment() -> None:
    words = ["--plan", "/r/plan.json", "--learner", "west", "--run-dir", "/r", "--events", "/r/events.jsonl"]
    options = parse([*words, "--attempt", "3"], environment=POD)
    assert (options.learner, options.events, options.log_dir) == (
        "west",
        Path("/r/events.jsonl"),
        Path("/r/logs/west/3"),
    )


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="not told learner, run-dir"):
        parse(["--plan", "x"], environment={})
