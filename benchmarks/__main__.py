"""Runs benchmarks one after the other, each in a process of its own: `make bench`, or `python -m benchmarks loader`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEADLINE_SECONDS = 3600


def main() -> int:
    """Run the named benchmarks, or all; the exit code tells whether each ran to its end."""
    known = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    chosen = sys.argv[1:] or known
    unknown = [name for name in chosen if name not in known]
    if unknown:
        sys.stderr.write(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}\n")
        return 2
    failed = 0
    for name in chosen:
        sys.stdout.write(f"== {name}\n")
        sys.stdout.flush()
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False, timeout=DEADLINE_SECONDS)
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
