from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from spec.errors import UnreachableError
from training import processes
from training.processes import free_port

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="another system keeps no port for a server to come")
ASK = """
import sys
from training import processes
processes.PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
processes.free_port()
"""


@LINUX
def test_a_port_that_was_given_out_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank found its rendezvous taken by a server of another run on the same machine: both had been told the same
    port while neither listened.
    """
    port = free_port()
    asked = subprocess.run([sys.executable, "-c", ASK, str(port)], capture_output=True, text=True, timeout=60)
    assert asked.returncode == 1
    assert "UnreachableError" in asked.stderr
    monkeypatch.setattr(processes, "PORTS", range(port, port + 1))
    with pytest.raises(UnreachableError, match="in use"):
        free_port()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_listens_on_the_port_it_was_given_and_again_after_its_end(host: str) -> None:
    port = free_port()
    for _ in range(2):
        with (
            socket.create_server((host, port)),
            socket.create_connection(("127.0.0.1", port), timeout=5),
        ):
            pass


def test_nobody_answers_on_a_port_that_is_kept() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@LINUX
def test_what_is_kept_is_bounded() -> None:
    for _ in range(300):
        free_port()
    assert len(processes._KEEPERS) == processes._KEPT_PORTS
