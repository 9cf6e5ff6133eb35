"""`python -m tools.chaos sync --seeds 0 1`: runs a campaign of faults and says whether its promises held."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.chaos import sync
from tools.fleet import write_json

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SCENARIOS: dict[str, Callable[[Path, int, str, int], dict[str, object]]] = {"sync": sync.campaign}


def main(arguments: list[str] | None = None) -> int:
    """Run one scenario with each seed and in each mode; the exit code tells whether all promises held."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--modes", nargs="+", choices=sync.MODES, default=list(sync.MODES))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where runs are kept (default: a temporary folder)")
    given = parser.parse_args(arguments)
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="gkr-chaos-") as temporary:
        for mode in given.modes:
            for seed in given.seeds:
                folder = (given.folder or Path(temporary)) / f"{mode}-{seed}"
                result = SCENARIOS[given.scenario](folder, seed, mode, given.rounds)
                results.append(result)
                sys.stdout.write(sync.describe(result) + "\n")
                sys.stdout.flush()
    write_json(RESULTS / f"chaos_{given.scenario}.json", results)
    return 0 if all(not one["broken"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
