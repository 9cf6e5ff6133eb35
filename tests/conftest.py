"""Settings for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A deadline per example measures how busy the machine is, not our code; pytest's own timeout bounds every test.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
# A shell's background job ignores Ctrl-C and so would every process that a test starts, and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copies of datasets do not go to the person's own cache."""
    before = os.environ.get("GKR_DATA_CACHE")
    os.environ["GKR_DATA_CACHE"] = str(tmp_path_factory.getbasetemp() / "data-cache")
    yield
    os.environ.pop("GKR_DATA_CACHE") if before is None else os.environ.update(GKR_DATA_CACHE=before)
