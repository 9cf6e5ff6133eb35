"""Environments for what is only measured against: apart from this one, so that nothing of ours depends on it.

Such an environment also sees the packages of this one. It is kept in the cache folder under a name of everything that
went into it, so a benchmark installs once, by the machine's own settings of the index.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.binaries import cache_folder

INSTALL_SECONDS = 600


def make_environment(name: str, *, packages: Mapping[str, Sequence[Sequence[str]]]) -> tuple[Path, dict[str, str]]:
    """Its folder of programs, and why which of `packages` could not be installed.

    `packages`: for each contender the arguments of the calls of pip that install it.
    """
    text = f"{sys.version} {sorted(packages.items())}"
    folder = cache_folder() / "benchmarks" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    programs, done = folder / "bin", folder / "installed"
    done.mkdir(parents=True, exist_ok=True)
    if not (programs / "python").exists():
        venv.create(folder, with_pip=True)
        own = next((folder / "lib").glob("python*/site-packages"))
        own.joinpath("shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    missing: dict[str, str] = {}
    for package, calls in packages.items():
        if (done / package).exists():
            continue
        for words in calls:
            command = [programs / "python", "-m", "pip", "install", "-q", *words]
            said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_SECONDS)
            if said.returncode:
                missing[package] = said.stderr.strip()[-500:]
                break
        else:
            (done / package).touch()
    if len(missing) == len(packages):
        shutil.rmtree(folder)  # whatever it was, it may be another time
    return programs, missing
