"""The cluster that tests of this folder use: KUBECONFIG if given, else the bed if it is up; or the bed alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from gkr.cluster.connection import Connection, connect
from gkr.cluster.registry import ClusterEntry, read_registry
from gkr.main import main
from spec.errors import EXIT_OK, GkrError
from tools.bed.holder import holder
from tools.bed.layout import bed


@pytest.fixture(scope="module")
def kubeconfig() -> Path:
    path = Path(os.environ.get("KUBECONFIG") or bed(0).kubeconfig)
    if not path.exists():
        pytest.skip("no cluster: KUBECONFIG is not set and no bed is up")
    try:
        document = yaml.safe_load(path.read_text())
        with closing(connect(ClusterEntry("probe", f"{path}", document["current-context"]))) as connection:
            connection.get("ConfigMap", "gkr-facts", namespace="gkr-system")
    except GkrError as error:
        pytest.skip(f"the cluster does not answer: {error.message}")
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for runs and for the list of clusters, with the bed added."""
    if holder(bed(0)) is None:
        pytest.skip("the bed is not up: make cluster")
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path / 'gkr'}")
    monkeypatch.setenv("GKR_RUNS", f"{tmp_path / 'runs'}")
    monkeypatch.chdir(tmp_path)
    assert main(["clusters", "add", "bed", "--kubeconfig", f"{bed(0).kubeconfig}"]) == EXIT_OK
    return tmp_path


@pytest.fixture
def connection(place: Path) -> Iterator[Connection]:
    del place
    with closing(connect(read_registry().entries["bed"])) as found:
        yield found
