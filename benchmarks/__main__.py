"""Runs benchmarks one after the other, each in a process of its own, and prints all verdicts at the end.

python -m benchmarks [NAME ...]      `make bench`: all, or those named; writes benchmarks/results/
python -m benchmarks --quick         `make bench-quick`: a minute's worth, with loose bounds (`_quick.py`)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import _quick
from benchmarks._verdicts import RESULTS, aligned, cells, read_verdicts

DEADLINE_SECONDS = 3600


def main() -> int:
    """Run the named benchmarks, or all; the exit code tells whether each ran to its end."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="the subset of CI, with loose bounds; writes no results")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    if given.quick:
        return _quick.main(given.names)
    failed: list[str] = []
    for name in given.names or known:
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False, timeout=DEADLINE_SECONDS)
        failed += [name] if done.returncode else []
    rows = [
        {**cells(row), "benchmark": name}
        for name in given.names or known
        if name not in failed and (RESULTS / f"{name}.json").exists()
        for row in read_verdicts(RESULTS / f"{name}.json")
    ]
    print("\n".join(["== verdicts", *aligned(rows), *(f"{name} did not run to its end" for name in failed)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
