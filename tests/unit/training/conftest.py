"""One zygote for the tests of a module: it imports torch once, and their ranks are forks of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders.trainer_runs import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Ended with the module."""
    one = Zygote.start()
    yield one
    one.close()
