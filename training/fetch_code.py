"""The init container `code`: `python -m training.fetch_code` puts the person's packed folder at /gkr/code.

The archive is the one whose digest the plan names, or nothing is unpacked. Its members may only be files, folders and
links inside the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from spec.errors import DataError, GkrError
from spec.plan import LearnerPlan, Plan
from storage import MissingError, open_bucket
from training.options import parse

CODE_FOLDER = Path("/gkr/code")
_TERMINATION_LOG = Path("/dev/termination-log")


def main(arguments: list[str] | None = None) -> int:
    """Fetch, verify and unpack; the exit code of the contract."""
    parser = argparse.ArgumentParser(prog="python -m training.fetch_code", description="Fetch the experiment's code.")
    parser.add_argument("--into", type=Path, default=CODE_FOLDER, help="folder to unpack into")
    given = parser.parse_args(arguments)
    try:
        options = parse([])
        plan = Plan.read_json(options.plan.read_bytes())
        if plan.code_sha256:
            files = fetch(plan, learner=plan.learner(options.learner), into=given.into)
            sys.stdout.write(f"{files} files of {plan.code_sha256[:12]} in {given.into}\n")
    except GkrError as error:
        sys.stderr.write(f"{error}\n")
        if _TERMINATION_LOG.exists():  # what Kubernetes shows as the reason
            _TERMINATION_LOG.write_text(str(error))
        return error.exit_code
    return 0


def fetch(plan: Plan, *, learner: LearnerPlan, into: Path) -> int:
    """Put the code of the plan into a folder; how many members it has."""
    root = learner.run_uri.removesuffix(f"/runs/{plan.experiment}/{plan.run}")
    key = f"code/{plan.code_sha256}.tar.gz"
    bucket = open_bucket(root)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "code.tar.gz"
        try:
            bucket.fetch(key, archive)
        except MissingError as error:
            raise DataError(
                f"the packed code {key} is not there", where=bucket.uri, hint="launch again: `gkr launch` uploads it"
            ) from error
        with archive.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != plan.code_sha256:
            raise DataError(
                f"the packed code has digest {actual[:12]}, the plan says {plan.code_sha256[:12]}",
                where=f"{bucket.uri}/{key}",
                hint="remove it and launch again",
            )
        return unpack(archive, into=into)


def unpack(archive: Path, *, into: Path) -> int:
    """Unpack an archive; refuses members that would land outside or are neither file, folder nor link."""
    into.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = tar.getmembers()
            for member in members:
                _check(member, into=into)
            tar.extractall(into, members=members, filter="data")
    except tarfile.TarError as error:
        raise DataError(
            f"the packed code cannot be unpacked: {error}",
            where=str(archive),
            hint="launch again with code of your own",
        ) from error
    return len(members)


def _check(member: tarfile.TarInfo, *, into: Path) -> None:
    root = into.resolve()
    target = Path(os.path.normpath(root / member.name))
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise DataError(f"{member.name!r} in the packed code is a special file", hint="pack files and folders only")
    inside = target.is_relative_to(root)
    if inside and (member.issym() or member.islnk()):
        start = target.parent if member.issym() else root
        inside = Path(os.path.normpath(start / member.linkname)).is_relative_to(root)
    if not inside:
        raise DataError(
            f"{member.name!r} in the packed code lies outside of it", hint="pack a folder without links that leave it"
        )


if __name__ == "__main__":
    sys.exit(main())
