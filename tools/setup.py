"""Creates `.venv` from the locks: `make setup`.

Needs Python 3.11 or newer and the package index, nothing else. The environment is remade only when a lock or the
interpreter changed: a second call compares digests and returns. Standard library only, because it runs before anything
is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 3600


def main() -> int:
    """Set up the environment; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/setup.py", description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--role", default="all", help="a lock in requirements/ without its suffix; default: all roles")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before anything checks the version
        sys.stderr.write(f"Python {sys.version.split()[0]} is too old; run make with PYTHON=python3.11 or newer\n")
        return 3
    lock = ROOT / "requirements" / f"{options.role}.txt"
    if not lock.is_file():
        sys.stderr.write(
            f"{lock}: no such lock; roles are {', '.join(sorted(p.stem for p in lock.parent.glob('*.txt')))}\n"
        )
        return 3
    stamp, digest = options.venv / "setup.sha256", _digest(lock)
    if stamp.is_file() and stamp.read_text() == digest:
        return 0
    return _create(options.venv, lock=lock, stamp=stamp, digest=digest)


def _digest(lock: Path) -> str:
    parts = [lock, ROOT / "requirements" / "uv.txt", ROOT / "pyproject.toml"]
    text = "".join(hashlib.sha256(part.read_bytes()).hexdigest() for part in parts)
    return hashlib.sha256(f"{text}{sys.version}{ROOT}".encode()).hexdigest()


def _create(venv: Path, *, lock: Path, stamp: Path, digest: str) -> int:
    started = time.monotonic()
    python = venv / "bin" / "python"
    uv = venv / "bin" / "uv"
    size = "about 7 GB with the CUDA libraries of torch" if "torch==" in lock.read_text() else "small"
    _say(f"setting up {venv} from requirements/{lock.name} ({size}; a few minutes on a slow line)")
    steps: list[tuple[str, list[str]]] = []
    if not python.is_file():
        steps.append(("environment", [sys.executable, "-m", "venv", str(venv)]))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    steps += [
        ("uv", [*pip, "-r", str(ROOT / "requirements" / "uv.txt")]),
        (
            "packages",
            [
                str(uv),
                "pip",
                "install",
                "--compile-bytecode",
                "--python",
                str(python),
                "--require-hashes",
                "-r",
                str(lock),
            ],
        ),
        (
            "this project",
            [
                str(uv),
                "pip",
                "install",
                "--quiet",
                "--python",
                str(python),
                "--no-deps",
                "--no-build-isolation",
                "-e",
                str(ROOT),
            ],
        ),
    ]
    for name, command in steps:
        _say(f"  {name} ...")
        done = subprocess.run(command, check=False, timeout=DEADLINE_SECONDS, env={**os.environ, "UV_NO_PROGRESS": "1"})
        if done.returncode:
            _say(f"setup failed at step {name!r} (exit {done.returncode}), see above; it can be run again")
            return done.returncode
    stamp.write_text(digest)
    _say(f"ready in {time.monotonic() - started:.0f} s")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
