"""The dev image's own test: `python /opt/gkr/smoke/smoke_test.py`.

Runs as the image's user without a network, a GPU or a cluster.
"""

from __future__ import annotations

import shutil
import sys
import tempfile

import checks


def main() -> int:
    """Every check, one line each."""
    return checks.run(
        [
            ("user", checks.user),
            ("system", checks.system),
            ("secrets", checks.no_secret),
            ("code", checks.imports("spec", "storage", "manifests", "gkr", "training", "services")),
            ("torch", checks.torch),
            ("tools", tools),
            ("plan", plan),
            ("tests", tests),
        ]
    )


def tools() -> str:
    """What a person works with."""
    names = ("git", "less", "make", "ssh", "tmux", "vi", "uv", "ruff", "basedpyright", "lint-imports", "pytest")
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"not on PATH: {', '.join(missing)}")
    return ", ".join(names)


def plan() -> str:
    """The command line resolves an experiment that the image ships."""
    checks.shell(f"cd {checks.CODE} && gkr plan recipes/digits.yaml")
    return "recipes/digits.yaml"


def tests() -> str:
    """The repository's own tests run in the image; those of the bottom layer stand for all."""
    with tempfile.TemporaryDirectory() as folder:
        checks.shell(
            f"cp -r {checks.CODE}/. {folder} && cd {folder} && python -m pytest -q tests/unit/spec/test_units.py"
        )
    return "tests/unit/spec/test_units.py, in a copy as a person would have it"


if __name__ == "__main__":
    sys.exit(main())
