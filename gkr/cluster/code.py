"""The folder of `code:` as one archive named by the digest of its bytes.

Promises: the same files give the same bytes (order, times and owners do not count); `.git` and what `.gkrignore`, else
`.gitignore`, leaves out never go along; nothing outside the folder does, neither by a link. The archive is uploaded
only where it is not there yet.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gkr.cluster.ignore import Rules, read_rules
from spec.errors import ConfigError
from storage import Bucket
from storage.errors import ExistsError

LARGEST_BYTES = 256 * 2**20
"""Of the packed archive: every pod of every node fetches it."""
_ALWAYS = frozenset({".git", "__pycache__", ".gkr"})


@dataclass(frozen=True)
class Archive:
    """A packed folder."""

    data: bytes
    sha256: str
    files: int
    largest: tuple[str, int] = ("", 0)

    @property
    def key(self) -> str:
        """Where it lies in a bucket."""
        return f"code/{self.sha256}.tar.gz"


def pack(folder: Path) -> Archive:
    """All files below the folder that are not ignored; ConfigError if there is none, or too much."""
    if not folder.is_dir():
        raise ConfigError(f"code: there is no folder {folder}", hint="it is relative to where gkr is called")
    buffer, files, largest = io.BytesIO(), 0, ("", 0)
    root = folder.resolve()
    # Level 6 of one library on one machine: bytes may differ elsewhere, then the folder is stored once more.
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in _files(root, rules=read_rules(root)):
            name = path.relative_to(root).as_posix()
            _add(archive, path, name=name, root=root)
            files += 1
            largest = max(largest, (name, path.lstat().st_size), key=lambda one: one[1])
            if buffer.tell() > LARGEST_BYTES:
                raise ConfigError(
                    f"code: {folder} is more than {LARGEST_BYTES >> 20} MiB when packed; "
                    f"its largest file is {largest[0]} with {largest[1] >> 20} MiB",
                    hint="leave data and results out with a .gkrignore (the syntax is .gitignore's)",
                )
    if not files:
        raise ConfigError(
            f"code: {folder} has no file that is not ignored", hint="look at its .gkrignore or .gitignore"
        )
    data = buffer.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest(), files, largest)


def upload(archive: Archive, *, bucket: Bucket) -> bool:
    """Put it where every run of this bucket finds it; false if it was there already."""
    if bucket.exists(archive.key):
        return False
    try:
        bucket.create(archive.key, archive.data)
    except ExistsError:
        return False
    return True


def _files(root: Path, *, rules: Rules) -> Iterator[Path]:
    """Regular files and links, sorted, so that the archive does not depend on the file system's order."""
    for folder, names, files in os.walk(root):
        here = Path(folder)
        if here != root:
            rules = rules.below(here) if (here / rules.file).exists() else rules
        links = [name for name in names if (here / name).is_symlink()]
        names[:] = sorted(
            name for name in names if _wanted(here / name, root, rules, folder=True) and name not in links
        )
        for name in sorted([*files, *links]):
            path = here / name
            if (path.is_file() or path.is_symlink()) and _wanted(path, root, rules, folder=False):
                yield path


def _wanted(path: Path, root: Path, rules: Rules, *, folder: bool) -> bool:
    return path.name not in _ALWAYS and not rules.ignores(path.relative_to(root).as_posix(), folder=folder)


def _add(archive: tarfile.TarFile, path: Path, *, name: str, root: Path) -> None:
    info = tarfile.TarInfo(name)
    info.mtime = 0
    if path.is_symlink():
        target = path.readlink()
        if target.is_absolute() or not (path.parent / target).resolve().is_relative_to(root):
            raise ConfigError(
                f"code: {name} is a link to {target}, which is outside the folder",
                hint="copy what it points to, or leave it out with a .gkrignore",
            )
        info.type, info.linkname = tarfile.SYMTYPE, target.as_posix()
        archive.addfile(info)
        return
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            info.size, info.mode = stat.st_size, 0o755 if stat.st_mode & 0o111 else 0o644
            archive.addfile(info, file)
    except PermissionError:
        raise ConfigError(f"code: {name} cannot be read", hint="leave it out with a .gkrignore") from None
    except OSError as error:
        raise ConfigError(f"code: {name} changed while it was packed: {error}", hint="launch again") from None
