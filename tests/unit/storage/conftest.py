"""The same tests over a folder and over a real object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import Bucket, open_bucket
from tests.builders.object_store import ObjectServer, serve_objects


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One object store for all tests here."""
    with serve_objects(tmp_path_factory.mktemp("store")) as one:
        yield one


@pytest.fixture(params=["folder", "objects"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """An empty bucket of each kind."""
    if request.param == "folder":
        return open_bucket((tmp_path / "bucket").as_uri())
    find: Callable[[str], ObjectServer] = request.getfixturevalue
    return find("server").open()
