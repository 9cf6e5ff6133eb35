"""What this machine can be asked for: the local backend's clusters."""

from __future__ import annotations

from pathlib import Path

import psutil

from spec.facts import ClusterFacts, local_facts

BUCKETS = Path(".gkr") / "buckets"
"""Under the working directory; a folder per cluster stands for its region's bucket."""

_CLUSTERS = 4


def this_machine() -> list[ClusterFacts]:
    """`local-0` ... `local-3`, each with this machine's cores and memory, as far as this process may use them."""
    return local_facts(
        float(usable_cores()),
        memory_bytes=usable_memory(),
        bucket_root_uri=BUCKETS.absolute().as_uri(),
        count=_CLUSTERS,
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    process = psutil.Process()
    affinity = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None
    return len(affinity) if affinity else psutil.cpu_count() or 1


def usable_memory() -> int:
    """Bytes of memory, by the machine or by the control group that holds us, whichever is less."""
    total = psutil.virtual_memory().total
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):
            continue  # no such group, or "max": no limit
    return total
