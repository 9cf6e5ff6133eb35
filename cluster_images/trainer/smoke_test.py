"""The trainer image's own test: `python /opt/gkr/smoke/smoke_test.py [--fabric a3-mega|a3-ultra]`.

Runs as the image's user without a network, a GPU or a cluster; with --fabric in a GPU pod, to see that the node's
mounts meet the image.
"""

from __future__ import annotations

import argparse
import sys

import checks


def main() -> int:
    """Every check, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fabric", choices=("a3-mega", "a3-ultra"))
    options = parser.parse_args()
    listed = [
        ("user", checks.user),
        ("system", checks.system),
        ("secrets", checks.no_secret),
        ("code", checks.imports("spec", "storage", "training")),
        ("torch", checks.torch),
        ("compiled", checks.compiled),
        ("gloo", gloo),
        ("syncer", syncer),
        ("ray", checks.ray),
    ]
    if options.fabric:
        listed.append(("fabric", checks.fabric(options.fabric)))
    return checks.run(listed)


def gloo() -> str:
    """Two ranks agree on a sum: the collectives that CPU learners use."""
    code = (
        "import torch, torch.distributed as d; d.init_process_group('gloo'); t = torch.ones(4) * (d.get_rank() + 1); "
        "d.all_reduce(t); assert t.tolist() == [3.0] * 4; d.destroy_process_group()"
    )
    command = f'torchrun --no-python --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29511 python -c "{code}"'
    checks.shell(f"GLOO_SOCKET_IFNAME=lo {command}")
    return "two ranks, one sum"


def syncer() -> str:
    """The syncer's command is there."""
    checks.shell("python -m training.sync.server --help")
    return "python -m training.sync.server"


if __name__ == "__main__":
    sys.exit(main())
