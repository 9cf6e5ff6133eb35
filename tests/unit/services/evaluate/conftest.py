"""One dataset, one trained classifier and one warm service for all tests of this folder (about five seconds)."""

from __future__ import annotations

import pytest

from tests.builders.evaluation import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("evaluate"))
