"""Memory that processes of one machine share through a file without a name."""

from __future__ import annotations

import fcntl
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can cut the file off any more, which would end a reader by SIGBUS."""


def sealed_memory(name: str, *, size: int) -> int:
    """Descriptor of an anonymous file of exactly `size` bytes, for good. OSError where there is none to be had."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
