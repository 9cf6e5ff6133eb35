"""Tests that need a cluster, then those that need the Pulumi engine: `make e2e`; with `-m` only those of an expression.

On the cluster of KUBECONFIG if that is given, which is left as it was found; else on the one-node cluster of
`tools.bed`, which is built and brought up before and taken down after, also after a failure. Tests of the engine get
it with two regions that the local stacks complete. One deadline over the tests of each kind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.binaries import CLUSTER_TOOLS

ROOT = Path(__file__).resolve().parent.parent
UP_SECONDS = 300
DOWN_SECONDS = 180
FAKE = "a3-ultra=64,a3-mega=32"
"""GPU nodes that tests of queues, fragmentation and explanations place on."""
MARKERS = ("cluster and not engine and not gpu and not images", "engine")


def main() -> int:
    """Bring up, test, take down; the exit code of pytest, or of what failed before it."""
    parser = argparse.ArgumentParser(prog="python -m tools.e2e", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--deadline-minutes", type=float, default=40.0, help="for the tests of one kind alone")
    parser.add_argument("-m", "--markers", help="pytest -m expression (default: both kinds, one after the other)")
    options, rest = parser.parse_known_args()
    if options.markers:
        return _run_kind(rest, options)
    # Paths or names on the command line mean tests of a cluster; those of the engine take their own call.
    kinds = MARKERS[:1] if rest or os.environ.get("KUBECONFIG") else MARKERS
    return max(_run_kind(rest, argparse.Namespace(**{**vars(options), "markers": one})) for one in kinds)


def _run_kind(rest: list[str], options: argparse.Namespace) -> int:
    if os.environ.get("KUBECONFIG"):
        return _test(rest, options.markers, minutes=options.deadline_minutes)
    started = time.monotonic()
    engine = _of_engine(options.markers)
    tools = ["pulumi", "pulumi-kubernetes"] if engine else []
    code = _run([sys.executable, "tools/binaries.py", *CLUSTER_TOOLS, *tools], seconds=3600)
    if code:
        return code
    _say(f"tools: {time.monotonic() - started:.0f} s")
    with tempfile.TemporaryDirectory(prefix="gkr-e2e-") as config:
        # The person's own list of clusters is not touched.
        os.environ["GKR_CONFIG"] = config
        return _on_bed(rest, options)


def _on_bed(rest: list[str], options: argparse.Namespace) -> int:
    started = time.monotonic()
    wanted = ["--for", "stacks", "--regions", "2"] if _of_engine(options.markers) else ["--fake", FAKE]
    code = _run([sys.executable, "-m", "tools.bed", "up", *wanted], seconds=UP_SECONDS)
    _say(f"cluster: {time.monotonic() - started:.0f} s")
    try:
        if code:
            return code
        return _test(rest, options.markers, minutes=options.deadline_minutes)
    finally:
        if not options.keep:
            _run([sys.executable, "-m", "tools.bed", "down"], seconds=DOWN_SECONDS)


def _of_engine(markers: str) -> bool:
    return "engine" in markers.replace("not engine", "")


def _test(rest: list[str], markers: str, *, minutes: float) -> int:
    command = [sys.executable, "-m", "pytest", "-m", markers, "--durations=15", *(rest or ["tests"])]
    return _run(command, seconds=minutes * 60)


def _run(command: list[str], *, seconds: float) -> int:
    try:
        return subprocess.run(command, cwd=ROOT, check=False, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        _say(f"{' '.join(command[1:4])} did not end within {seconds:.0f} s")
        return 100


def _say(text: str) -> None:
    sys.stderr.write(f"e2e: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
