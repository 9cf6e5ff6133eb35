"""What a rank's forkserver imports before it forks loader workers; imported nowhere else.

It loads the worker's code once, and makes the forkserver remove its socket's folder when it ends: the rank would do
that, but a rank that was killed cannot, and then a folder would stay in the temporary directory for each.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import stat
from pathlib import Path

import training.data.worker as worker

__all__ = ["worker"]


def _remove_socket_folder() -> None:
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        address = _listening_address(int(descriptor.name))
        if address and Path(address).parent.name.startswith("pymp-"):
            atexit.register(shutil.rmtree, Path(address).parent, ignore_errors=True)


def _listening_address(descriptor: int) -> str:
    """Path of the listening Unix socket that this descriptor is, or nothing."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return ""
        with socket.socket(fileno=os.dup(descriptor)) as one:
            listens = one.family == socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return str(one.getsockname()) if listens else ""
    except OSError:  # the descriptor with which the folder was listed is gone by now
        return ""


if Path("/proc/self/fd").is_dir():
    _remove_socket_folder()
