"""Strips of queues over time."""

from __future__ import annotations

from gkr.report.heat import heat
from gkr.report.series import Curve


def test_the_scale_says_what_full_colour_means() -> None:
    waited = Curve("rank-0", [0.0, 5.0], [0.0, 8.0])
    assert "full colour: 8 requests" in f"{heat('queue', [(waited, 0)], seconds=10.0, unit='requests')}"


def test_a_queue_that_was_always_empty_does_not_read_as_if_nothing_had_been_asked() -> None:
    never = Curve("rank-0", [0.0, 5.0], [0.0, 0.0])
    page = f"{heat('sampler: requests waiting', [(never, 0)], seconds=10.0, unit='requests')}"
    assert "never any<" in page
    assert "never any requests" not in page
