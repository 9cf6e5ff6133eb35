"""Waiting for Kueue's webhooks: the Job's own program, run against an API server that refuses at first."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.components.k8s.webhook import PROBE, webhook_objects
from spec.facts import HostMount, Site

FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass
class Api:
    """An API server: how often it still refuses, and what it was asked."""

    folder: Path
    port: int = 0
    refusals: int = 0
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list[tuple[str, str, dict[str, Any]]])

    def probe(self, *, deadline: float) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": os.environ["PATH"], "KUBERNETES_SERVICE_HOST": "localhost",
            "KUBERNETES_SERVICE_PORT": str(self.port), "GKR_API": "kueue.x-k8s.io/v1beta2",
            "GKR_DEADLINE_SECONDS": str(deadline),
        }  # fmt: skip
        program = [sys.executable, "-c", PROBE.replace(FOLDER, str(self.folder))]
        return subprocess.run(program, env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def api(tmp_path: Path) -> Generator[Api]:
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (tmp_path / "token").write_text("the token", encoding="utf-8")
    found = Api(tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.asked.append((self.path, self.headers["Authorization"], body))
            found.refusals -= 1
            self.send_response(500 if found.refusals >= 0 else 201)
            self.end_headers()
            self.wfile.write(b'failed calling webhook "mresourceflavor.kb.io": connection refused')

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
            del format, args

    server = HTTPServer(("localhost", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    found.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def test_it_asks_until_the_webhooks_answer_and_stores_nothing(api: Api) -> None:
    api.refusals = 1
    done = api.probe(deadline=30)
    assert done.returncode == 0, done.stderr
    assert "connection refused" in done.stdout
    assert len(api.asked) == 2
    path, authorization, body = api.asked[-1]
    assert path == "/apis/kueue.x-k8s.io/v1beta2/resourceflavors?dryRun=All"
    assert authorization == "Bearer the token"
    assert body["kind"] == "ResourceFlavor"


def test_it_says_what_the_last_try_said_when_its_time_is_over(api: Api) -> None:
    api.refusals = 1000
    done = api.probe(deadline=0.5)
    assert done.returncode == 1
    assert "did not answer in time" in done.stderr
    assert "connection refused" in done.stderr


def test_it_may_do_nothing_else_and_sees_the_folders_of_the_site() -> None:
    site = Site(mounts=[HostMount(name="host-usr", host_path="/usr", mount_path="/usr")])
    _, role, _, job = webhook_objects(image="localhost/gkr/hostroot:1", site=site, version="0.17.0")
    assert role["rules"] == [{"apiGroups": ["kueue.x-k8s.io"], "resources": ["resourceflavors"], "verbs": ["create"]}]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "host-usr", "mountPath": "/usr", "readOnly": True}]
    other = webhook_objects(image="localhost/gkr/hostroot:1", site=site, version="0.17.1")[-1]
    assert other["metadata"]["name"] != job["metadata"]["name"]
