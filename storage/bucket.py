"""A folder of a file system or a prefix of an object store, by URI.

Promises: an object appears whole or not at all; `create` refuses to overwrite; `replace` refuses unless the object still
is the one that was read, also against a writer in another region; every request has a deadline and is retried only where
repeating it is safe. Settings that are not in the URI (endpoint, credentials) come from the environment by the object
stores' own names (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from spec.errors import ConfigError, RefusedError, UnreachableError
from storage.errors import ExistsError, MissingError, StaleError

REQUEST_SECONDS = 60.0
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 30.0
"""Longest time of all tries of one request together, where it may be repeated."""
PIECE_BYTES = 16 * 2**20
_LOCK_SECONDS = 10.0
_SCHEMES = ("file", "s3", "gs")
_TEMPORARY = ".partial-"


@dataclass(frozen=True)
class Entry:
    """One object of a listing."""

    key: str
    """Relative to the bucket's prefix."""
    size: int
    modified: float
    """Seconds since 1970, by the store's clock."""


@dataclass(frozen=True)
class Stored:
    """An object as it was read, and the tag with which it can be replaced."""

    data: bytes
    tag: str


class Bucket(Protocol):
    """What every store can do. Keys are relative paths with `/` between their parts."""

    uri: str

    def get(self, key: str) -> Stored:
        """The whole object; MissingError if there is none."""
        ...

    def put(self, key: str, data: bytes) -> str:
        """Write or overwrite; the new tag."""
        ...

    def create(self, key: str, data: bytes) -> str:
        """Write; ExistsError if it is there already. Not repeated after an unclear answer."""
        ...

    def replace(self, key: str, data: bytes, *, tag: str) -> str:
        """Write if the object still has this tag; else StaleError."""
        ...

    def fetch(self, key: str, path: Path) -> int:
        """Copy a large object to a file, which appears whole; its size."""
        ...

    def send(self, key: str, path: Path) -> int:
        """Copy a file to an object, which appears whole; its size."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """All objects whose key begins with the folder `prefix`, sorted by key."""
        ...

    def exists(self, key: str) -> bool:
        """True if there is such an object."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is gone already is fine."""
        ...

    def below(self, prefix: str) -> Bucket:
        """The bucket of a deeper prefix."""
        ...


def open_bucket(uri: str, *, environment: Mapping[str, str] = os.environ) -> Bucket:
    """The store that a URI names; ConfigError if it is none. Makes no request."""
    parts = urlsplit(uri)
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"{uri!r} names no store", hint="write file:///folder, s3://bucket/prefix or gs://bucket/prefix"
        )
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute():
            raise ConfigError(f"{uri!r} is not absolute", hint="write file:///absolute/path")
        return Folder(path)
    if not parts.netloc:
        raise ConfigError(f"{uri!r} names no bucket", hint=f"write {parts.scheme}://bucket/prefix")
    return ObjectStore(
        f"{parts.scheme}://{parts.netloc}", prefix=unquote(parts.path).strip("/"), environment=environment
    )


def split_uri(uri: str) -> tuple[str, str]:
    """Folder and name of an object's URI, such as that of a manifest."""
    folder, _, name = uri.rpartition("/")
    return folder, name


def file_path(uri: str) -> Path | None:
    """The path of a `file:` URI; none for any other store."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


class Folder:
    """A folder of this machine. `replace` is guarded by a lock file, so it holds between processes of one machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = f"file://{quote(str(path))}"

    def get(self, key: str) -> Stored:
        with _file_errors(self._path(key)):
            data = self._path(key).read_bytes()
        return Stored(data, _digest(data))

    def put(self, key: str, data: bytes) -> str:
        with _file_errors(self._path(key)), self._written(key) as temporary:
            temporary.write_bytes(data)
            _flush(temporary)
            temporary.replace(self._path(key))
        return _digest(data)

    def create(self, key: str, data: bytes) -> str:
        with _file_errors(self._path(key)), self._written(key) as temporary:
            temporary.write_bytes(data)
            _flush(temporary)
            os.link(temporary, self._path(key))
        return _digest(data)

    def replace(self, key: str, data: bytes, *, tag: str) -> str:
        with self._locked(key):
            if self.get(key).tag != tag:
                raise StaleError(f"{key} was changed by somebody else", where=self.uri)
            return self.put(key, data)

    def fetch(self, key: str, path: Path) -> int:
        with _file_errors(self._path(key)), _appearing(path) as temporary:
            shutil.copyfile(self._path(key), temporary)
        return path.stat().st_size

    def send(self, key: str, path: Path) -> int:
        with _file_errors(self._path(key)), self._written(key) as temporary:
            shutil.copyfile(path, temporary)
            _flush(temporary)
            temporary.replace(self._path(key))
        return self._path(key).stat().st_size

    def list(self, prefix: str = "") -> Iterator[Entry]:
        root = self._path(prefix) if prefix else self.path
        found = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(_TEMPORARY)]
        for path in sorted(found, key=lambda one: one.relative_to(self.path).as_posix()):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # removed while we looked
            yield Entry(path.relative_to(self.path).as_posix(), stat.st_size, stat.st_mtime)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with _file_errors(self._path(key)):
                self._path(key).unlink(missing_ok=True)

    def below(self, prefix: str) -> Folder:
        return Folder(self._path(prefix))

    def _path(self, key: str) -> Path:
        return self.path / _checked(key)

    @contextmanager
    def _written(self, key: str) -> Generator[Path]:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
        os.close(descriptor)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Generator[None]:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{_TEMPORARY}lock-{path.name}").open("ab") as file:
            until = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise UnreachableError(
                            f"{key} has been locked for {_LOCK_SECONDS:g} s", where=self.uri
                        ) from None
                    time.sleep(0.02)
            yield


class ObjectStore:
    """S3 or Google Cloud Storage through obstore."""

    def __init__(self, root: str, *, prefix: str, environment: Mapping[str, str], store: Any = None) -> None:
        self._root, self._prefix, self._environment = root, prefix, environment
        self.uri = f"{root}/{prefix}".rstrip("/")
        self._store: Any = store or _connect(root, environment=environment)

    def get(self, key: str) -> Stored:
        import obstore

        with self._errors(key):
            answer = obstore.get(self._store, self._key(key))
            return Stored(bytes(answer.bytes()), _tag(answer.meta))

    def put(self, key: str, data: bytes) -> str:
        return self._put(key, data, mode="overwrite")

    def create(self, key: str, data: bytes) -> str:
        return self._put(key, data, mode="create")

    def replace(self, key: str, data: bytes, *, tag: str) -> str:
        e_tag, _, version = tag.partition("\n")
        fields = {"e_tag": e_tag, "version": version or None}
        return self._put(key, data, mode={name: value for name, value in fields.items() if value})

    def fetch(self, key: str, path: Path) -> int:
        import obstore

        with self._errors(key), _appearing(path) as temporary, temporary.open("wb") as file:
            for piece in obstore.get(self._store, self._key(key)).stream(min_chunk_size=PIECE_BYTES):
                file.write(piece)
        return path.stat().st_size

    def send(self, key: str, path: Path) -> int:
        import obstore

        with self._errors(key):
            obstore.put(self._store, self._key(key), path, chunk_size=PIECE_BYTES)
        return path.stat().st_size

    def list(self, prefix: str = "") -> Iterator[Entry]:
        import obstore

        found: list[Entry] = []
        skip = len(self._prefix) + 1 if self._prefix else 0
        with self._errors(prefix):
            for page in obstore.list(
                self._store, self._key(prefix) if prefix else self._prefix or None, chunk_size=1000
            ):
                found += [Entry(meta["path"][skip:], meta["size"], meta["last_modified"].timestamp()) for meta in page]
        yield from sorted(found, key=lambda one: one.key)

    def exists(self, key: str) -> bool:
        import obstore

        try:
            with self._errors(key):
                obstore.head(self._store, self._key(key))
        except MissingError:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        import obstore

        for key in keys:
            try:
                with self._errors(key):
                    obstore.delete(self._store, self._key(key))
            except MissingError:
                continue

    def below(self, prefix: str) -> ObjectStore:
        deeper = "/".join(part for part in (self._prefix, _checked(prefix)) if part)
        return ObjectStore(self._root, prefix=deeper, environment=self._environment, store=self._store)

    def _key(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, _checked(key)) if part)

    def _put(self, key: str, data: bytes, *, mode: Any) -> str:
        import obstore

        with self._errors(key):
            # One request: a conditional write cannot be made of parts.
            return _tag(obstore.put(self._store, self._key(key), data, mode=mode, use_multipart=False))

    @contextmanager
    def _errors(self, key: str) -> Generator[None]:
        from obstore import exceptions as ob

        where = f"{self.uri}/{key}".rstrip("/")
        try:
            yield
        except FileNotFoundError as error:  # obstore's NotFoundError is one
            raise MissingError("there is no such object", where=where, hint="check the address") from error
        except ob.AlreadyExistsError as error:
            raise ExistsError("the object is there already", where=where) from error
        except ob.PreconditionError as error:
            raise StaleError("the object was changed by somebody else", where=where) from error
        except (ob.PermissionDeniedError, ob.UnauthenticatedError) as error:
            hint = "check the service account's rights on the bucket, or the credentials in the environment"
            raise RefusedError(f"access is refused: {_first_line(error)}", where=where, hint=hint) from error
        except ob.BaseError as error:
            hint = "check the endpoint and the network to it"
            raise UnreachableError(f"the object store failed: {_first_line(error)}", where=where, hint=hint) from error


def _connect(root: str, *, environment: Mapping[str, str]) -> Any:
    from obstore.store import from_url

    wanted = ("AWS_", "GOOGLE_")
    config: dict[str, str] = {
        name.lower(): value for name, value in environment.items() if name.startswith(wanted) and value
    }
    config.pop("aws_allow_http", None)
    known: dict[str, Any] = {}
    for name, value in config.items():
        if _is_setting(root, name):
            known[name] = value
    options = {
        "timeout": timedelta(seconds=REQUEST_SECONDS),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "allow_http": environment.get("AWS_ALLOW_HTTP", "").lower() == "true",
    }
    retry: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    return from_url(root, config=known or None, client_options=options, retry_config=retry)  # type: ignore[arg-type]


_SETTINGS = {
    "s3": re.compile(r"aws_(access_key_id|secret_access_key|session_token|region|endpoint_url|default_region)"),
    "gs": re.compile(r"google_(service_account|service_account_key|application_credentials)"),
}


def _is_setting(root: str, name: str) -> bool:
    return _SETTINGS[root.partition(":")[0]].fullmatch(name) is not None


def _tag(meta: Mapping[str, Any]) -> str:
    return f"{meta.get('e_tag') or ''}\n{meta.get('version') or ''}".rstrip("\n")


def _checked(key: str) -> str:
    if key.startswith("/") or ".." in key.split("/"):
        raise ValueError(f"key {key!r} is not a relative path inside the bucket")
    return key.strip("/")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _appearing(path: Path) -> Generator[Path]:
    """A temporary file that takes its final name if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    os.close(descriptor)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _file_errors(path: Path) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError("there is no such file", where=str(path), hint="check the path") from error
    except FileExistsError as error:
        raise ExistsError("the file is there already", where=str(path)) from error
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise RefusedError(f"{error.strerror}", where=str(path), hint="check the path and its permissions") from error
