"""Everything static in one command: `make check`.

Format, lint, types, import rules and generated files, each a plain command that can be run alone. All of them run, so
that one look shows everything; the exit code is 1 if any failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CHECKS = {
    "format": [str(BIN / "ruff"), "format", "--check", "--quiet", "."],
    "lint": [str(BIN / "ruff"), "check", "--quiet", "."],
    "types": [str(BIN / "basedpyright"), "--level", "error"],
    "import rules": [str(BIN / "lint-imports"), "--no-cache"],
    "workflows": [str(BIN / "zizmor"), "--offline", "--persona", "pedantic", "--quiet", ".github"],
    "generated schemas": [sys.executable, "-m", "spec.schemas", "--check"],
}
DEADLINE_SECONDS = 600


def main() -> int:
    """Run every check and print one line each."""
    failed = 0
    for name, command in CHECKS.items():
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        verdict = "ok" if done.returncode == 0 else "FAILED"
        sys.stdout.write(f"{name:20} {verdict:7} {time.monotonic() - started:5.1f} s\n")
        if done.returncode:
            failed += 1
            sys.stdout.write(f"  {' '.join(Path(word).name if word.startswith('/') else word for word in command)}\n")
            sys.stdout.write((done.stdout + done.stderr).rstrip() + "\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
