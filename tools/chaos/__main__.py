"""`python -m tools.chaos sync --seeds 0 1`: runs a campaign of faults and says whether its promises held."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.chaos import frames, sync
from tools.fleet import write_json

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run one scenario with each seed (and `sync` in each mode); the exit code tells whether all promises held."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("scenario", choices=("frames", "sync"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--modes", nargs="+", choices=sync.MODES, default=list(sync.MODES), help="of sync")
    parser.add_argument("--rounds", type=int, default=100, help="of sync")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of frames")
    parser.add_argument("--folder", type=Path, help="where runs are kept (default: a temporary folder)")
    given = parser.parse_args(arguments)
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="gkr-chaos-") as temporary:
        for result, words in campaigns(given, given.folder or Path(temporary)):
            results.append(result)
            sys.stdout.write(words + "\n")
            sys.stdout.flush()
    write_json(RESULTS / f"chaos_{given.scenario}.json", results)
    return 0 if all(not one["broken"] for one in results) else 1


def campaigns(given: argparse.Namespace, folder: Path) -> Iterator[tuple[dict[str, object], str]]:
    """Results, and a line about each."""
    for seed in given.seeds if given.scenario == "frames" else ():
        result = frames.campaign(folder / f"frames-{seed}", seed=seed, inputs=given.inputs)
        yield result, frames.describe(result)
    for mode in given.modes if given.scenario == "sync" else ():
        for seed in given.seeds:
            result = sync.campaign(folder / f"{mode}-{seed}", seed, mode, given.rounds)
            yield result, sync.describe(result)


if __name__ == "__main__":
    sys.exit(main())
