"""Published models by digest on this node's disk.

Promises: a file under its final name has the bytes its digest names; a fetch ends within its size limit and its
deadline (give or take one silence), and goes on where the connection was cut; nothing partial is left behind, by a
process that was killed only until the next fetch after its deadline. Replicas of one node share the folder, so files
appear by atomic rename and may vanish at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from spec.errors import GkrError, RefusedError
from spec.sync_keys import SyncKeys, open_connection
from storage import open_bucket, split_uri
from storage.protocol import Bytes

SUFFIX = ".safetensors"
_CHUNK = 1 << 20
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class _Opened:
    """An address that answered."""

    chunks: Iterator[Bytes]
    left: int | None
    """Bytes that will come, if it is known."""


@dataclass(frozen=True)
class Limits:
    """What a fetch may cost."""

    max_bytes: int = 64 * 2**30
    deadline_seconds: float = 60.0
    """For one model, over all its addresses."""
    silence_seconds: float = 10.0
    """Longest wait for a connection or for the next bytes."""
    kept_files: int = 4
    """Newest used models that stay on disk."""


class WeightsCache:
    """Fetches each digest once."""

    def __init__(self, folder: Path, *, limits: Limits | None = None) -> None:
        self._folder = folder
        self._limits = limits or Limits()

    def get(self, sha256: str, *, urls: Sequence[str]) -> Path:
        """The verified file of a digest; fetched from the first address that has it."""
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise RefusedError(
                f"{sha256!r} is not a sha256", hint="name a model by the 64 hexadecimal digits the syncer announces"
            )
        path = self._folder / f"{sha256}{SUFFIX}"
        if _digest_of(path) == sha256:
            os.utime(path)
            return path
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._fetch(path, sha256=sha256, urls=urls)
        self._evict(keep=path)
        return path

    def _fetch(self, path: Path, *, sha256: str, urls: Sequence[str]) -> None:
        deadline = time.monotonic() + self._limits.deadline_seconds
        problems: list[str] = []
        for url in urls:
            try:
                self._fetch_one(path, sha256=sha256, url=url, deadline=deadline)
            except (OSError, http.client.HTTPException, GkrError) as error:
                problems.append(f"{url}: {error or type(error).__name__}")
            else:
                return
        raise RefusedError(
            f"model {sha256[:12]} could not be had: {'; '.join(problems) or 'the call names no address'}",
            hint="ask the syncer's status for the newest model and its address, and check that this node reaches it",
        )

    def _fetch_one(self, path: Path, *, sha256: str, url: str, deadline: float) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_PARTIAL, delete=False) as file:
            try:
                self._download(url, file=file, sha256=sha256, deadline=deadline)
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _download(self, url: str, *, file: IO[bytes], sha256: str, deadline: float) -> None:
        digest = hashlib.sha256()
        while self._copy(url, file=file, digest=digest, deadline=deadline):
            pass
        if digest.hexdigest() != sha256:
            raise _FetchError(f"it has the digest {digest.hexdigest()[:12]}, not the one asked for")

    def _copy(self, url: str, *, file: IO[bytes], digest: hashlib._Hash, deadline: float) -> bool:
        """Append what there is from the file's end on; true if the connection was cut and there is more to come."""
        start = size = file.tell()
        silence = min(self._limits.silence_seconds, deadline - time.monotonic())
        with _open(url, start=start, timeout_seconds=silence) as opened:
            for chunk in opened.chunks:
                size += len(chunk)
                if size > self._limits.max_bytes:
                    raise _FetchError(f"it is larger than {self._limits.max_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise _FetchError(f"not complete after {self._limits.deadline_seconds:.0f} s ({size:,} bytes came)")
                digest.update(chunk)
                file.write(chunk)
        return opened.left is not None and start < size < start + opened.left

    def _sweep(self) -> None:
        """Remove what fetches left that were killed: nobody has written to it for longer than a fetch may take."""
        oldest = time.time() - self._limits.deadline_seconds - 2 * self._limits.silence_seconds
        for path in self._folder.glob(f"{_PARTIAL}*"):
            with contextlib.suppress(FileNotFoundError):  # done by now, or another replica was quicker
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _evict(self, *, keep: Path) -> None:
        """Remove the least recently used files; other replicas may do the same at the same time."""
        found: list[tuple[float, Path]] = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            try:
                found.append((path.stat().st_mtime, path))
            except FileNotFoundError:
                continue
        others = sorted((one for one in found if one[1] != keep), reverse=True)
        for _, path in others[max(0, self._limits.kept_files - 1) :]:
            path.unlink(missing_ok=True)


class _FetchError(GkrError):
    """One address did not give the model."""


@contextlib.contextmanager
def _open(url: str, *, start: int, timeout_seconds: float) -> Generator[_Opened]:
    if timeout_seconds <= 0:
        raise _FetchError("no time left")
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        path = Path(unquote(parts.path))
        if not path.is_file():  # never a pipe or a device: reading those may not end
            raise _FetchError("no such file")
        with path.open("rb") as file:
            yield _Opened(iter(lambda: file.read(_CHUNK), b""), None)
        return
    if parts.scheme in ("gs", "s3"):
        folder, name = split_uri(url)
        yield _Opened(open_bucket(folder).pieces(name), None)
        return
    keys = SyncKeys.read() if parts.scheme == "https" else None
    if not parts.hostname or not (parts.scheme == "http" or keys):
        raise _FetchError("only file://, gs://, s3:// and http:// are supported, and https:// with the keys of a run")
    headers = {**(keys.headers if keys else {}), **({"Range": f"bytes={start}-"} if start else {})}
    # Straight to the host: a proxy of the environment is not meant for the addresses of a run.
    connection = open_connection(parts.hostname, parts.port or 80, timeout_seconds=timeout_seconds, keys=keys)
    try:
        connection.request("GET", parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers)
        response = connection.getresponse()
        if response.status != (http.HTTPStatus.PARTIAL_CONTENT if start else http.HTTPStatus.OK):
            cut = f" when it was to go on after {start:,} bytes" if start else ""
            raise _FetchError(f"answered {response.status} {response.reason}{cut}")
        yield _Opened(iter(lambda: response.read1(_CHUNK), b""), response.length)
    finally:
        connection.close()


def _digest_of(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
