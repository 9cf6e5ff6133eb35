"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# A deadline per example measures how busy the machine is, not our code; pytest's own timeout bounds every test.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
