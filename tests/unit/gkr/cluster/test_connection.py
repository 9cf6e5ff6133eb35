"""The way into a cluster: the recorded context is used, and everything in the way is one line with a remedy."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gkr.cluster.connection import connect
from gkr.cluster.registry import ClusterEntry
from spec.errors import EXIT_REFUSED, EXIT_UNREACHABLE, GkrError, NotFoundError
from tests.builders.api_double import TOKEN, ApiDouble, serving


@pytest.fixture
def double() -> Iterator[ApiDouble]:
    with serving(ApiDouble()) as running:
        yield running


def _entry(path: Path, *, context: str = "double", namespace: str = "") -> ClusterEntry:
    return ClusterEntry("bed", f"{path}", context, namespace=namespace)


def _pods(entry: ClusterEntry) -> list[str]:
    with closing(connect(entry)) as connection:
        return [one["metadata"]["name"] for one in connection.list("Pod")]


def _refusal(entry: ClusterEntry) -> GkrError:
    with pytest.raises(GkrError) as caught:
        _pods(entry)
    assert "\n" not in caught.value.message, "one line"
    assert caught.value.hint
    return caught.value


def _helper(folder: Path, script: str) -> dict[str, Any]:
    path = folder / "helper"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": f"{path}", "args": [], "env": None}}


def _credential(token: str) -> str:
    return json.dumps({"kind": "ExecCredential", "status": {"token": token}})


def test_namespace_of_the_context_is_honoured_and_an_explicit_one_wins(double: ApiDouble, tmp_path: Path) -> None:
    path = double.kubeconfig(tmp_path / "k", namespace="team-a")
    double.put("Pod", "mine", namespace="team-a")
    double.put("Pod", "theirs", namespace="team-b")
    assert _pods(_entry(path)) == ["mine"]
    assert _pods(_entry(path, namespace="team-b")) == ["theirs"]


def test_another_current_context_does_not_move_the_connection(double: ApiDouble, tmp_path: Path) -> None:
    path = double.kubeconfig(tmp_path / "k")
    double.put("Pod", "mine", namespace="default")
    document = path.read_text().replace("current-context: double", "current-context: other")
    path.write_text(document)
    assert _pods(_entry(path)) == ["mine"]


def test_stale_context_names_the_contexts_that_are_there(double: ApiDouble, tmp_path: Path) -> None:
    error = _refusal(_entry(double.kubeconfig(tmp_path / "k"), context="gone"))
    assert error.exit_code == EXIT_UNREACHABLE
    assert 'no context "gone"' in error.message
    assert "double" in error.message


def test_missing_kubeconfig_is_unreachable(tmp_path: Path) -> None:
    assert _refusal(_entry(tmp_path / "none")).exit_code == EXIT_UNREACHABLE


def test_server_that_is_not_there_is_unreachable_and_named(double: ApiDouble, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        double.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        path = double.kubeconfig(tmp_path / "k")
    error = _refusal(_entry(path))
    assert error.exit_code == EXIT_UNREACHABLE
    assert "connection refused" in error.message
    assert double.url in error.message


def test_expired_login_says_to_log_in_again(double: ApiDouble, tmp_path: Path) -> None:
    path = double.kubeconfig(tmp_path / "k")
    double.token = "another"
    error = _refusal(_entry(path))
    assert error.exit_code == EXIT_UNREACHABLE
    assert "login was refused" in error.message
    assert "log in again" in error.hint


def test_missing_login_helper_is_named_with_its_install_hint(double: ApiDouble, tmp_path: Path) -> None:
    user = _helper(tmp_path, "")
    user["exec"] |= {"command": "no-such-auth-plugin", "installHint": "install\nthe plugin"}
    error = _refusal(_entry(double.kubeconfig(tmp_path / "k", user=user)))
    assert error.exit_code == EXIT_UNREACHABLE
    assert "no-such-auth-plugin is not installed" in error.message
    assert error.hint == "install the plugin"
    assert double.requests == [], "refused before any call"


def test_failing_login_helper_is_quoted(double: ApiDouble, tmp_path: Path) -> None:
    user = _helper(tmp_path, "echo session has ended >&2; exit 3")
    error = _refusal(_entry(double.kubeconfig(tmp_path / "k", user=user)))
    assert error.exit_code == EXIT_UNREACHABLE
    assert "ended with 3: session has ended" in error.message


def test_login_helper_is_run_again_when_the_server_refuses_its_token(double: ApiDouble, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    answer.write_text(_credential(TOKEN))
    entry = _entry(double.kubeconfig(tmp_path / "k", user=_helper(tmp_path, f"cat {answer}")))
    with closing(connect(entry)) as connection:
        assert connection.list("Pod") == []
        double.token = "renewed"
        answer.write_text(_credential("renewed"))
        assert connection.list("Pod") == []


def test_missing_right_is_refused_in_the_servers_words(double: ApiDouble, tmp_path: Path) -> None:
    double.denied.add(("list", "pods"))
    error = _refusal(_entry(double.kubeconfig(tmp_path / "k")))
    assert error.exit_code == EXIT_REFUSED
    assert 'User "tester" cannot list' in error.message


def test_absent_object_is_not_found_and_find_answers_none(double: ApiDouble, tmp_path: Path) -> None:
    with closing(connect(_entry(double.kubeconfig(tmp_path / "k")))) as connection:
        with pytest.raises(NotFoundError, match='pods "x" not found'):
            connection.get("Pod", "x")
        assert connection.find("Pod", "x") is None
        assert connection.delete("Pod", "x") is False


def test_files_of_kubeconfig_are_merged_and_the_first_wins(double: ApiDouble, tmp_path: Path) -> None:
    first = double.kubeconfig(tmp_path / "a", context="one", namespace="n-a")
    second = double.kubeconfig(tmp_path / "b", context="two", namespace="n-b", user={"token": "wrong"})
    both = f"{first}{os.pathsep}{tmp_path / 'absent'}{os.pathsep}{second}"
    with closing(connect(ClusterEntry("bed", both, "two"))) as connection:
        assert connection.namespace == "n-b"
        assert connection.list("Pod") == [], "user u of the first file is the one that counts"


def test_relative_certificate_lies_beside_its_kubeconfig(tmp_path: Path) -> None:
    from gkr.cluster.kubeconfig import read_context

    path = ApiDouble().kubeconfig(tmp_path / "k", user={"client-certificate": "me.crt", "client-key": "/abs/me.key"})
    user = read_context(f"{path}", name="double").user
    assert user == {"client-certificate": f"{tmp_path / 'me.crt'}", "client-key": "/abs/me.key"}
