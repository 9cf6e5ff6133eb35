"""What the ports do with bodies that are wrong: one reason each, no memory taken, the next request still answered."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from typing import Any

import numpy as np
import pytest

from tests.builders.sync_world import DEADLINE, LAYOUT, Server
from tests.unit.training.sync.conftest import Join, Serve
from training.sync.bulk import BulkHandler
from training.sync.layout import Layout
from training.sync.messages import Contribution, PartHeader, PartReceipt, encode
from training.sync.wire import SyncServer


def ask(
    server: Server, method: str, path: str, body: bytes = b"", *, port: str = "bulk", **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(server.bulk if port == "bulk" else server.control, timeout=DEADLINE)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"/v1/r1/{path}", body=body, headers=named)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text else {}


def header_of(
    data: bytes,
    *,
    ranges: list[tuple[int, int]],
    seq: int = 1,
    rank: int = 0,
    digest: str | None = None,
    size: int | None = None,
    layout: Layout = LAYOUT,
) -> PartHeader:
    return PartHeader(
        learner="east",
        generation=1,
        seq=seq,
        rank=rank,
        fingerprint=layout.fingerprint,
        ranges=ranges,
        sha256=digest or hashlib.sha256(data).hexdigest(),
        bytes=len(data) if size is None else size,
    )


def part(
    values: np.ndarray, *, ranges: list[tuple[int, int]], seq: int = 1, rank: int = 0, digest: str | None = None
) -> bytes:
    data = values.tobytes()
    text = encode(header_of(data, ranges=ranges, seq=seq, rank=rank, digest=digest))
    return len(text).to_bytes(4, "little") + text + data


def test_bodies_that_are_wrong_are_refused_and_the_port_goes_on(serve: Serve, learn: Join) -> None:
    server = serve()
    learn(server, "east").join()
    floats = np.ones(20, np.float32)
    good = part(floats, ranges=[(0, 10)])
    for body, status, reason in (
        (part(floats, ranges=[(0, 9)]), 400, "bad_request"),
        (part(floats, ranges=[(LAYOUT.total - 5, 10)]), 400, "bad_request"),
        (part(floats, ranges=[(0, 10)], digest="0" * 64), 422, "damaged"),
        (good[:-1] + bytes([good[-1] ^ 1]), 422, "damaged"),
        (good[:-4], 400, "bad_request"),
        (b"\xff\xff\xff\xff" + good, 413, "too_large"),
        (b"\x02\0\0\0{}", 400, "bad_request"),
        (b"\x10\0\0\0" + b"\x80" * 16, 400, "bad_request"),
    ):
        found, reply = ask(server, "PUT", "part", body)
        assert (found, reply["reason"]) == (status, reason), reply
    status, reply = ask(server, "PUT", "part", good)
    assert (status, reply["missing"]) == (200, [])
    assert ask(server, "PUT", "part", good) == (200, reply)
    assert ask(server, "PUT", "part", part(floats * 2, ranges=[(0, 10)]))[1]["reason"] == "conflict"
    assert ask(server, "PUT", "part", part(floats, ranges=[(5, 10)], rank=1))[1]["reason"] == "overlap"
    assert ask(server, "GET", "parts/east/1/0/1/0", port="control") == (200, {"state": "held"})
    assert ask(server, "GET", "parts/east/1/0/1/7", port="control") == (200, {"state": "missing"})
    assert ask(server, "GET", "nothing")[1]["reason"] == "unknown_path"
    assert ask(server, "GET", "models/" + "0" * 64)[1]["reason"] == "unknown_model"
    assert ask(server, "POST", "theta/0/9", b'{"ranges": [[0, 1]]}')[1]["reason"] == "unknown_version"
    assert ask(server, "POST", "theta/9/0", b'{"ranges": [[0, 1]]}')[1]["reason"] == "bad_request"
    assert ask(server, "POST", "register", b"[]", port="control")[1]["reason"] == "bad_request"
    status, reply = ask(server, "POST", "register", b"", port="control", Content_Length=str(2**40))
    assert (status, reply["reason"]) == (413, "too_large")


def test_what_only_looks_like_a_number_gets_its_reason(serve: Serve) -> None:
    """Nobody who is cut off instead of refused hears why, and a learner would try again until its deadline."""
    server, many = serve(), b"1" * 5000
    for address, request, length, reason in (
        (server.bulk, b"PUT /v1/r1/chunks/key/\xb2", b"0", "unknown_path"),
        (server.bulk, b"PUT /v1/r1/chunks/key/" + many, b"0", "unknown_path"),
        (server.bulk, b"POST /v1/r1/theta/0/" + many, b"0", "unknown_path"),
        (server.bulk, b"PUT /v1/r1/part", b"\xb2", "bad_request"),
        (server.bulk, b"PUT /v1/r1/part", many, "bad_request"),
        (server.control, b"GET /v1/r1/parts/east/1/0/1/\xb9", b"0", "unknown_path"),
        (server.control, b"GET /v1/r1/version?at_least=inf", b"0", "bad_request"),
        (server.control, b"GET /v1/r1/version?wait=nan", b"0", "bad_request"),
        (server.control, b"GET /v1/r1/version?wait=soon", b"0", "bad_request"),
    ):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            connection.sendall(request + b" HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n")
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert json.loads(response.read())["reason"] == reason, request[:60]


def test_a_bug_in_a_handler_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """And a sender that went away is not."""
    server = SyncServer(("127.0.0.1", 0), BulkHandler, run="r1")
    try:
        for error in (ConnectionResetError("gone"), AssertionError("a bug")):
            try:
                raise error
            except (OSError, AssertionError):
                server.handle_error(None, ("127.0.0.1", 1))
    finally:
        server.server_close()
    assert [(one.levelname, one.exc_info[1]) for one in caplog.records if one.exc_info] == [("ERROR", error)]


def test_a_large_body_that_is_refused_still_gets_its_reason(serve: Serve, learn: Join) -> None:
    """More than fits into the sockets' buffers: a sender that was cut off would retry until its deadline instead."""
    server = serve()
    learn(server, "east").join()
    body = part(np.zeros(20_000_000, np.float32), ranges=[(0, 10_000_000)])
    status, reply = ask(server, "PUT", "part", body)
    assert (status, reply["reason"]) == (413, "too_large")
    status, reply = ask(server, "PUT", "part", body[:20_000_000])
    assert (status, "lies outside" in reply["message"]) == (400, True)


def test_a_contribution_without_all_elements_is_invalid(serve: Serve, learn: Join) -> None:
    server = serve()
    learn(server, "east").join()
    floats = np.ones(20, np.float32)
    assert ask(server, "PUT", "part", part(floats, ranges=[(0, 10)]))[0] == 200
    contribution = Contribution(
        learner="east",
        generation=1,
        seq=1,
        base_version=0,
        steps=1,
        samples=1,
        cursor=1,
        parts=[PartReceipt(rank=0, sha256=hashlib.sha256(floats.tobytes()).hexdigest())],
        fingerprint=LAYOUT.fingerprint,
    )
    body = b'{"contribution":' + encode(contribution) + b',"wait_seconds":0}'
    status, verdict = ask(server, "POST", "commit", body, port="control")
    assert (status, verdict["kind"]) == (200, "invalid")
    assert "elements 10 to" in verdict["reason"]
    missing = body.replace(b'"seq":1', b'"seq":2')
    assert ask(server, "POST", "commit", missing, port="control")[1]["reason"] == "parts_missing"


def test_paths_of_other_runs_and_versions_are_refused(serve: Serve) -> None:
    server = serve()
    for path in ("/", "/v1", "/v1/r1", "/v2/r1/status", "/v1/other/status"):
        connection = http.client.HTTPConnection(server.control, timeout=DEADLINE)
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 404
        assert json.loads(response.read())["message"]
        connection.close()
