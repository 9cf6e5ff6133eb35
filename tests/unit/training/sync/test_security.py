"""Who may speak to a syncer: this run's certificates and token, each learner for itself, and nobody else."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shutil
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkr.sync_keys import make_keys, write_keys
from services.weights_cache import WeightsCache
from spec.errors import EXIT_CONFIG, ConfigError, RefusedError
from spec.sync_keys import AUTHORITY, CERTIFICATE, ENVIRONMENT, KEY, TOKEN, SyncKeys, open_connection
from tests.builders.sync_world import DEADLINE, LAYOUT, Server, make_plan, spawn_server, together
from tests.unit.training.sync.conftest import Join, Serve
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.transport import SyncRefusedError


@pytest.fixture
def secure(tmp_path: Path, serve: Serve) -> Server:
    """A syncer as `gkr` starts it."""
    plan = make_plan(tmp_path)
    write_keys(tmp_path / "keys", plan=plan)
    return serve(plan)


def keys_of(server: Server, learner: str = "east") -> SyncKeys:
    found = server.keys_of(learner)
    assert found is not None
    return found


def foreign(folder: Path, run: str = "another") -> SyncKeys:
    """Keys of another run, for a learner of the same name."""
    write_keys(folder / "foreign", plan=make_plan(folder, run=run))
    return SyncKeys.read_folder(folder / "foreign" / "east")


def mix(folder: Path, **parts: SyncKeys) -> SyncKeys:
    """Keys put together from several: file name with an underscore to whose it is."""
    mixed = folder / "mixed"
    mixed.mkdir()
    for name in (AUTHORITY, CERTIFICATE, KEY, TOKEN):
        shutil.copy(parts[name.replace(".", "_")].folder / name, mixed / name)
    return SyncKeys.read_folder(mixed)


def client_of(server: Server, keys: SyncKeys | None, *, learner: str = "east") -> SyncClient:
    return SyncClient(
        server.control, bulk=server.bulk, run=server.plan.run, learner=learner, layout=LAYOUT, keys=keys,
        barrier_timeout_seconds=DEADLINE,
    )  # fmt: skip


def state_of(server: Server) -> str:
    """One digest over everything that is durable."""
    digest = hashlib.sha256()
    for path in sorted((server.folder / "sync").rglob("*")):
        digest.update(f"{path}".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def refusals(server: Server) -> dict[str, int]:
    client = client_of(server, keys_of(server))
    try:
        return client.status().refusals
    finally:
        client.close()


def lines_of(server: Server, reason: str) -> int:
    return len(re.findall(rf"refused .*\({reason}\)", (server.folder / "syncer.log").read_text()))


def test_a_run_with_keys_gives_the_same_weights_on_both_sides(secure: Server, learn: Join) -> None:
    east, west = learn(secure, "east", ranks=2), learn(secure, "west")
    together(east.join, west.join)
    together(east.finish, west.finish)
    assert east.theta.tobytes() == west.theta.tobytes()
    assert secure.ledger().merged == {"east": 200, "west": 200}


def test_the_keys_are_for_the_eyes_of_their_user_only(secure: Server) -> None:
    files = [path for path in (secure.folder / "keys").rglob("*") if path.is_file()]
    assert len(files) == 3 * 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o077 for path in (secure.folder / "keys").iterdir()} == {0}


def test_a_syncer_outside_of_loopback_does_not_start_without_keys(tmp_path: Path) -> None:
    plan = make_plan(tmp_path).model_copy(update={"backend": "kubernetes"})
    process = spawn_server(tmp_path, plan, "--control-port", "0", "--bulk-port", "0")
    assert process.wait(DEADLINE) == EXIT_CONFIG
    assert "would serve whoever finds its ports" in (tmp_path / "syncer.log").read_text()


def test_who_speaks_no_tls_is_told_so_and_changes_nothing(secure: Server) -> None:
    before = state_of(secure)
    for _ in range(3):
        connection = http.client.HTTPConnection(secure.control, timeout=DEADLINE)
        connection.request("POST", f"/v1/{secure.plan.run}/register", body=b"{}")
        response = connection.getresponse()
        reply: dict[str, Any] = json.loads(response.read())
        assert (response.status, reply["reason"]) == (403, "no_certificate")
        connection.close()
    assert (refusals(secure)["no_certificate"], lines_of(secure, "no_certificate")) == (3, 1)
    assert state_of(secure) == before


def test_without_a_certificate_there_is_no_connection(secure: Server) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    host, _, port = secure.bulk.rpartition(":")
    for _ in range(2):
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as raw, context.wrap_socket(raw) as strange:
            strange.sendall(b"GET /v1/r1/status HTTP/1.1\r\n\r\n")
            with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
                strange.recv(1)
    assert (refusals(secure)["certificate"], lines_of(secure, "certificate")) == (2, 1)


def test_a_certificate_of_another_run_is_refused_by_both_sides(secure: Server, tmp_path: Path) -> None:
    before, other, own = state_of(secure), foreign(tmp_path), keys_of(secure)
    for keys in (other, mix(tmp_path, ca_crt=own, tls_crt=other, tls_key=other, token=own)):
        client = client_of(secure, keys)
        with pytest.raises(RefusedError, match="not of the same run"):
            client.register(contract_hash(secure.plan), world_size=1)
        client.close()
    assert refusals(secure)["certificate"] == 2
    assert state_of(secure) == before


def test_the_token_of_another_experiment_is_refused(secure: Server, tmp_path: Path) -> None:
    before, other = state_of(secure), foreign(tmp_path)
    for keys in (replace(keys_of(secure), token=other.token), replace(keys_of(secure), token="ü")):
        client = client_of(secure, keys)
        with pytest.raises(SyncRefusedError, match="the token is not that of run 'r1'"):
            client.register(contract_hash(secure.plan), world_size=1)
        client.close()
    assert (refusals(secure)["token"], lines_of(secure, "token")) == (2, 1)
    assert state_of(secure) == before


def test_a_learner_speaks_only_for_itself(secure: Server, learn: Join) -> None:
    east = learn(secure, "east")
    east.join()
    before = state_of(secure)
    impostor = client_of(secure, keys_of(secure, "west"))
    floats = east.theta
    for act in (
        lambda: impostor.register(contract_hash(secure.plan), world_size=1),
        lambda: impostor.put_part(floats, ema=floats, ranges=LAYOUT.whole, generation=1, seq=1, rank=0),
        lambda: impostor.put_seed(floats, generation=1),
        lambda: impostor.leave(1),
    ):
        with pytest.raises(SyncRefusedError, match="certificate of learner 'west' does not speak for 'east'"):
            act()
    impostor.close()
    assert (refusals(secure)["sender"], lines_of(secure, "sender")) == (4, 1)
    assert state_of(secure) == before


def test_the_syncers_own_keys_may_ask_and_speak_for_no_learner(tmp_path: Path, serve: Serve) -> None:
    plan = make_plan(tmp_path, learners=["syncer", "east"])
    write_keys(tmp_path / "keys", plan=plan)
    server = serve(plan)
    client = client_of(server, keys_of(server, "run"), learner="syncer")
    assert client.status().run == "r1"
    with pytest.raises(SyncRefusedError, match="certificate of learner 'run' does not speak for 'syncer'"):
        client.register(contract_hash(plan), world_size=1)
    client.close()


def test_a_connection_that_says_nothing_keeps_nobody_waiting(secure: Server, learn: Join) -> None:
    host, _, port = secure.control.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=DEADLINE) for _ in range(20)]
    try:
        assert learn(secure, "east").join().generation == 1
    finally:
        for one in silent:
            one.close()


def test_a_replica_fetches_a_model_with_its_learners_keys(
    secure: Server, learn: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(secure, "east").join()
    client = client_of(secure, keys_of(secure))
    digest = client.status().model_sha256
    client.close()
    url = f"https://{secure.bulk}/v1/{secure.plan.run}/models/{digest}"
    with pytest.raises(RefusedError, match="with the keys of a run"):
        WeightsCache(tmp_path / "cache").get(digest, urls=[url])
    monkeypatch.setenv(ENVIRONMENT, f"{keys_of(secure).folder}")
    assert hashlib.sha256(WeightsCache(tmp_path / "cache").get(digest, urls=[url]).read_bytes()).hexdigest() == digest


def test_keys_that_are_not_there_or_not_whole_are_named(tmp_path: Path) -> None:
    assert SyncKeys.read({}) is None
    with pytest.raises(ConfigError, match="cannot be read: No such file") as missing:
        SyncKeys.read({ENVIRONMENT: f"{tmp_path / 'gone'}"})
    assert "gone" in str(missing.value.where)
    (tmp_path / TOKEN).write_text("x")
    with pytest.raises(ConfigError, match="not usable"):
        SyncKeys.read_folder(tmp_path).client_context  # noqa: B018


def test_keys_end_with_their_time(tmp_path: Path, serve: Serve) -> None:
    plan = make_plan(tmp_path)
    for owner, files in make_keys(plan.run, learners=["east", "west"], valid_seconds=-60).items():
        (tmp_path / "keys" / owner).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / "keys" / owner / name).write_bytes(content)
    server = serve(plan)
    host, _, port = server.control.rpartition(":")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        open_connection(host, int(port), timeout_seconds=DEADLINE, keys=keys_of(server))


def test_the_token_is_in_no_text_of_the_keys(secure: Server) -> None:
    keys = keys_of(secure)
    assert keys.token not in repr(keys)
    assert keys.knows(f"Bearer {keys.token}")
    assert not keys.knows("Bearer ")
    assert not keys.knows("")
