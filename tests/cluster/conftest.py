"""The cluster that tests of this folder use: KUBECONFIG if given, else the bed if it is up."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from gkr.cluster.connection import connect
from gkr.cluster.registry import ClusterEntry
from spec.errors import GkrError
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
