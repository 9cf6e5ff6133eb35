"""`python -m tests.builders.gcp_double`: serves the provider protocol until the engine goes; prints the port."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from pulumi.runtime.proto import provider_pb2_grpc

from infra.engine.place import DOUBLE_CLOUD
from tests.builders.gcp_double.cloud import Cloud
from tests.builders.gcp_double.provider import Double

THREADS = 32


IDLE_SECONDS = 6 * 3600.0
LOOK_SECONDS = 2.0


def main() -> int:
    """Serve."""
    folder = os.environ.get(DOUBLE_CLOUD)
    if not folder:
        sys.stderr.write(f"the Google Cloud double needs {DOUBLE_CLOUD}: the folder that stands for the cloud\n")
        return 2
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(max_workers=THREADS), options=limits)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(Double(Cloud(Path(folder))), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    engine, deadline = os.getppid(), time.monotonic() + IDLE_SECONDS
    # An engine that was killed tells nobody, and leaves its plugins to another parent.
    while server.wait_for_termination(timeout=LOOK_SECONDS) and os.getppid() == engine and time.monotonic() < deadline:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
