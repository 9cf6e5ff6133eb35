"""S3 or Google Cloud Storage as a bucket, through obstore.

Large objects travel in pieces, a few at a time, so that no request outlives its deadline and no process holds more
than some pieces. Conditional writes are sent once; after an unclear answer the object is read back, and only if it
shows that the write did not happen is it sent again.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from spec.errors import UnreachableError
from storage.client import Client, Limits, connect, library, store_errors
from storage.errors import ExistsError, MissingError, StaleError, answer_of
from storage.folder import appearing, check_digest, checked_length, file_errors
from storage.protocol import PIECE_BYTES, Bytes, Entry, Stored, checked_key

_PARALLEL = 4
"""Pieces of one object under way at once."""
_LIST_PAGE = 1000
_DELETE_PAGE = 1000


class ObjectStore:
    """One prefix of one bucket."""

    poll_seconds = 0.25

    def __init__(self, root: str, *, prefix: str, client: Client) -> None:
        self._root, self._prefix, self._client = root, prefix, client
        self.uri = f"{root}/{prefix}".rstrip("/")

    @classmethod
    def open(
        cls, root: str, *, prefix: str, environment: Mapping[str, str], limits: Limits | None = None
    ) -> ObjectStore:
        """The prefix of `s3://bucket` or `gs://bucket`, with the environment's settings. Makes no request."""
        return cls(root, prefix=prefix, client=connect(root, environment=environment, limits=limits or Limits()))

    def get(self, key: str) -> Stored:
        obstore = library()
        with store_errors(self._where(key)):
            answer = obstore.get(self._client.repeating, self._key(key))
            return Stored(bytes(answer.bytes()), _tag(answer.meta))

    def put(self, key: str, data: bytes) -> str:
        return self._put(self._client.repeating, key, data, mode="overwrite")

    def create(self, key: str, data: bytes) -> str:
        def is_free() -> bool:
            return not self.exists(key)

        return self._put_once(key, data, mode="create", refused=ExistsError, unchanged=is_free)

    def replace(self, key: str, data: bytes, *, tag: str) -> str:
        e_tag, _, version = tag.partition("\n")
        fields = {"e_tag": e_tag, "version": version}
        mode = {name: value for name, value in fields.items() if value}

        def is_same() -> bool:
            with suppress(MissingError):
                return self.get(key).tag == tag
            return False

        return self._put_once(key, data, mode=mode, refused=StaleError, unchanged=is_same)

    def read(self, key: str) -> bytearray:
        meta = self._head(key)
        data = bytearray(meta["size"])
        position = 0
        for piece in self._pieces(key, meta=meta):
            data[position : position + len(piece)] = piece
            position += len(piece)
        return data

    def read_range(self, key: str, *, offset: int, size: int) -> memoryview:
        return self._piece(key, (offset, offset + size), e_tag=None)

    def pieces(self, key: str) -> Iterator[memoryview]:
        yield from self._pieces(key, meta=self._head(key))

    def write(self, key: str, pieces: Iterable[Bytes]) -> int:
        obstore = library()
        size = 0

        def counted() -> Iterator[Bytes]:
            nonlocal size
            for piece in pieces:
                size += len(piece)
                yield piece

        stream = counted()
        begin: list[Bytes] = []
        while size <= PIECE_BYTES and (piece := next(stream, None)) is not None:
            begin.append(piece)
        if size <= PIECE_BYTES:
            self.put(key, b"".join(begin))
            return size
        with store_errors(self._where(key), writes=True):
            obstore.put(
                self._client.repeating,
                self._key(key),
                itertools.chain(begin, stream),
                use_multipart=True,
                chunk_size=PIECE_BYTES,
                max_concurrency=_PARALLEL,
            )
        return size

    def digest(self, key: str) -> tuple[int, str]:
        meta, digest = self._head(key), hashlib.sha256()
        for piece in self._pieces(key, meta=meta):
            digest.update(piece)
        return meta["size"], digest.hexdigest()

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> int:
        meta, digest = self._head(key), hashlib.sha256()
        with appearing(path) as temporary, temporary.open("wb") as file:
            for piece in self._pieces(key, meta=meta):
                digest.update(piece)
                with file_errors(path):
                    file.write(piece)
            with file_errors(path):
                file.flush()
            if sha256:
                check_digest(digest.hexdigest(), wanted=sha256, where=self._where(key))
        return meta["size"]

    def send(self, key: str, path: Path) -> int:
        with file_errors(path), path.open("rb") as file:
            return self.write(key, iter(lambda: file.read(PIECE_BYTES), b""))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Entry]:
        obstore = library()
        skip = len(self._prefix) + 1 if self._prefix else 0
        place = self._key(prefix) or None
        found: list[Entry] = []
        with store_errors(self._where(prefix)):
            pages = obstore.list(
                self._client.repeating, place, offset=self._key(after) if after else None, chunk_size=_LIST_PAGE
            )
            for page in pages:
                found += [Entry(meta["path"][skip:], meta["size"], meta["last_modified"].timestamp()) for meta in page]
        yield from sorted(found, key=lambda one: one.key)

    def folders(self, prefix: str = "") -> list[str]:
        obstore = library()
        with store_errors(self._where(prefix)):
            answer = obstore.list_with_delimiter(self._client.repeating, self._key(prefix) or None)
        return sorted(one.rstrip("/").rpartition("/")[2] for one in answer["common_prefixes"])

    def exists(self, key: str) -> bool:
        try:
            self._head(key)
        except MissingError:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._key(key) for key in keys]
        for start in range(0, len(names), _DELETE_PAGE):
            page = names[start : start + _DELETE_PAGE]
            try:
                self._delete(page)
            except MissingError:  # Cloud Storage: the first that is gone already, and the rest was not tried
                for name in page:
                    with suppress(MissingError):
                        self._delete([name])

    def clear(self, prefix: str) -> None:
        self.delete([entry.key for entry in self.list(prefix)])

    def below(self, prefix: str) -> ObjectStore:
        return ObjectStore(self._root, prefix=self._key(prefix), client=self._client)

    def _key(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, checked_key(key)) if part)

    def _where(self, key: str) -> str:
        return f"{self.uri}/{key}".rstrip("/")

    def _head(self, key: str) -> Any:
        obstore = library()
        with store_errors(self._where(key)):
            return obstore.head(self._client.repeating, self._key(key))

    def _delete(self, names: list[str]) -> None:
        obstore = library()
        with store_errors(self.uri):
            obstore.delete(self._client.repeating, names)

    def _put(self, store: Any, key: str, data: bytes, *, mode: Any) -> str:
        obstore = library()
        with store_errors(self._where(key), writes=True):
            # One request: a conditional write cannot be made of parts.
            return _tag(obstore.put(store, self._key(key), data, mode=mode, use_multipart=False))

    def _put_once(
        self,
        key: str,
        data: bytes,
        *,
        mode: Any,
        refused: type[ExistsError | StaleError],
        unchanged: Callable[[], bool],
    ) -> str:
        """A conditional write that happens at most once. `unchanged`: whether the condition still holds."""
        until = time.monotonic() + self._client.limits.retry_seconds
        pause, unclear = 0.1, False
        while True:
            try:
                return self._put(self._client.single, key, data, mode=mode)
            except (ExistsError, StaleError) as error:
                found = self._own(key, data) if unclear else None
                if found is not None:
                    return found
                if isinstance(error, refused):
                    raise
                # The store met two writers at once and refused both (409): whether the condition holds is unclear.
                failure: Exception = error
            except UnreachableError as error:
                failure = error
            unclear = True
            found = self._own(key, data)
            if found is not None:
                return found
            if not unchanged():
                raise refused("the object was written by somebody else", where=self._where(key)) from failure
            if time.monotonic() + pause > until:
                raise failure
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, 2.0)

    def _own(self, key: str, data: bytes) -> str | None:
        """The object's tag if it holds exactly our bytes: the answer to our write was lost, the write was not."""
        try:
            found = self.get(key)
        except MissingError:
            return None
        return found.tag if found.data == data else None

    def _pieces(self, key: str, *, meta: Any) -> Iterator[memoryview]:
        """The object that `meta` describes, in order; StaleError if it is overwritten meanwhile."""
        size = meta["size"]
        ranges = [(start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES)]
        if len(ranges) <= 1:
            yield from (self._piece(key, one, e_tag=meta["e_tag"]) for one in ranges)
            return
        # A request ends by its own deadlines; the wait for its thread is a little longer.
        patience = self._client.limits.retry_seconds + 2 * self._client.limits.request_seconds
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="storage") as pool:
            waiting: deque[Future[memoryview]] = deque()
            try:
                for one in ranges:
                    waiting.append(pool.submit(self._piece, key, one, e_tag=meta["e_tag"]))
                    if len(waiting) == _PARALLEL:
                        yield answer_of(waiting.popleft(), seconds=patience, where=self._where(key))
                while waiting:
                    yield answer_of(waiting.popleft(), seconds=patience, where=self._where(key))
            finally:
                for future in waiting:
                    future.cancel()

    def _piece(self, key: str, span: tuple[int, int], *, e_tag: str | None) -> memoryview:
        obstore = library()
        options: Any = {"range": span, **({"if_match": e_tag} if e_tag else {})}
        with store_errors(self._where(key)):
            data = memoryview(obstore.get(self._client.repeating, self._key(key), options=options).bytes())
        return checked_length(data, wanted=span[1] - span[0], where=self._where(key))


def _tag(meta: Mapping[str, Any]) -> str:
    return f"{meta.get('e_tag') or ''}\n{meta.get('version') or ''}".rstrip("\n")
