"""What people bring: folders of images, tar files as WebDataset reads them, Parquet files with images inside.

`read_source` gives one sample after the other, from a folder of this machine or from a bucket, in an order that depends
on names alone. What cannot be read is told to the caller and passed over, never the end of the stream: of a tar file
that is cut off, what came before counts. At most one file of a bucket is on this machine at a time; a Parquet file is
read by row groups. Nothing is decoded here.
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from spec.errors import DataError
from storage.protocol import Bucket, Entry
from storage.uris import file_path, open_bucket, split_uri

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
TARS, PARQUETS = frozenset({".tar"}), frozenset({".parquet", ".pq"})
TEXTS = (".json", ".txt", ".caption")
MAX_IMAGE_BYTES = 256 * 2**20
MAX_TEXT_BYTES = 2**20
IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")
CAPTION_KEYS = ("caption", "text", "prompt", "txt")


@dataclass(frozen=True)
class Raw:
    """One sample as it was found."""

    key: str
    """Its name in the source, without ending."""
    image: bytes
    text: dict[str, Any] = field(default_factory=dict[str, Any])
    """What lies beside it: a caption under `caption`, and whatever else its JSON or its columns say."""
    where: str = ""


@dataclass(frozen=True)
class Damage:
    """Something of the source that could not be read."""

    where: str
    reason: str
    """A stable word: truncated, unreadable, oversize, no-image, bad-text."""
    message: str


Told = Callable[[Damage], None]


def list_source(uri: str) -> list[Entry]:
    """The files of a source, in the order in which they are read, with what lies beside them."""
    return _listed(uri)[1]


def is_read(key: str) -> bool:
    """True for an image, tar file or Parquet file; false for what lies beside them."""
    return bool(_kind(key))


def read_source(uri: str, *, told: Told, enter: Callable[[str], bool] = lambda key: True) -> Iterator[Raw]:
    """All samples of a folder or file at a URI. DataError if there is nothing of a kind that is known.

    `enter` is asked with the key of each image, tar file or Parquet file before it is read; False passes it over.
    """
    bucket, entries = _listed(uri)
    keys = {entry.key: entry.size for entry in entries}
    kinds = {_kind(key) for key in keys} - {""}
    if not kinds:
        raise DataError(
            "there is nothing to read",
            where=uri,
            hint=f"a folder of {', '.join(sorted(IMAGES))}, or .tar, or .parquet files",
        )
    if len(kinds) > 1:
        found = " and ".join(sorted(kinds))
        raise DataError(f"there are {found} side by side", where=uri, hint="name the files of one kind: a subfolder")
    kind = kinds.pop()
    if kind == "images":
        yield from _read_folder(bucket, keys, told, enter)
        return
    for key in keys:
        if _kind(key) == kind and enter(key):
            with _local(bucket, key, told) as path:
                if path is not None:
                    yield from (_read_tar if kind == "tar files" else _read_parquet)(path, f"{bucket.uri}/{key}", told)


def _listed(uri: str) -> tuple[Bucket, list[Entry]]:
    """Where the source is, and all its files."""
    path = file_path(uri)
    single = path.is_file() if path is not None else _kind(uri) in ("tar files", "Parquet files")
    if single:
        folder, name = split_uri(uri)
        return open_bucket(folder), [entry for entry in open_bucket(folder).list() if entry.key == name]
    bucket = open_bucket(uri)
    entries = list(bucket.list())
    bad = next((entry.key for entry in entries if not _is_text(entry.key)), None)
    if bad is not None:
        raise DataError(
            f"the name of a file is not UTF-8: {os.fsencode(bad)!r}",
            where=uri,
            hint="rename it: names of samples are kept in the dataset, as text",
        )
    return bucket, entries


def _is_text(name: str) -> bool:
    """False for bytes that are no UTF-8, which Python carries as half surrogate pairs."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(key: str) -> str:
    ending = PurePosixPath(key).suffix.lower()
    if ending in IMAGES:
        return "images"
    return "tar files" if ending in TARS else "Parquet files" if ending in PARQUETS else ""


@contextmanager
def _local(bucket: Bucket, key: str, told: Told) -> Generator[Path | None]:
    """A file of the source on this machine, for as long as it is read."""
    folder = file_path(bucket.uri)
    if folder is not None:
        yield folder / key
        return
    with tempfile.TemporaryDirectory(prefix="gkr-source-") as scratch:
        path: Path | None = Path(scratch) / PurePosixPath(key).name
        assert path is not None
        try:
            bucket.fetch(key, path)
        except DataError as error:
            told(Damage(f"{bucket.uri}/{key}", "unreadable", error.message))
            path = None
        yield path


# --- folders


def _read_folder(bucket: Bucket, sizes: dict[str, int], told: Told, enter: Callable[[str], bool]) -> Iterator[Raw]:
    for key, size in sizes.items():
        if _kind(key) != "images" or not enter(key):
            continue
        where, stem = f"{bucket.uri}/{key}", str(PurePosixPath(key).with_suffix(""))
        beside = {ending: sizes[stem + ending] for ending in TEXTS if stem + ending in sizes}
        largest = max([size, *beside.values()])
        if largest > MAX_IMAGE_BYTES:
            told(Damage(where, "oversize", f"{largest} bytes, at most {MAX_IMAGE_BYTES}"))
            continue
        try:
            image = bytes(bucket.read(key))
            texts = {ending: bytes(bucket.read(stem + ending)) for ending in beside}
        except DataError as error:
            told(Damage(where, "unreadable", error.message))
            continue
        yield Raw(key=stem, image=image, text=_text(texts, where, told), where=where)


# --- tar files


def _read_tar(path: Path, where: str, told: Told) -> Iterator[Raw]:
    """Members of one name belong together if they follow each other, as in WebDataset."""
    stem, members = "", dict[str, bytes]()
    try:
        # Names that are not UTF-8 would come as half surrogate pairs, which no JSON can hold.
        with tarfile.open(path, mode="r|", encoding="utf-8", errors="backslashreplace") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                if member.size > MAX_IMAGE_BYTES:
                    told(Damage(f"{where}:{member.name}", "oversize", f"{member.size} bytes"))
                    continue
                name, ending = _split_name(member.name)
                if name != stem:
                    yield from _grouped(stem, members, where, told)
                    stem, members = name, {}
                file = archive.extractfile(member)
                data = file.read() if file is not None else b""
                if len(data) != member.size:
                    told(Damage(f"{where}:{member.name}", "truncated", "the file ends inside this member"))
                    return
                members[ending] = data
    except (tarfile.TarError, OSError, EOFError) as error:
        told(Damage(where, "truncated", f"the rest cannot be read: {error}"))
        return  # whether the last sample is whole cannot be known
    if not _ends_well(path):  # the library takes a header that is cut off for the end
        told(Damage(where, "truncated", f"it breaks off in or behind {stem or 'its first member'}"))
        return
    yield from _grouped(stem, members, where, told)


def _ends_well(path: Path) -> bool:
    """A tar file ends with two blocks of zeros."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1024))
        return size % 512 == 0 and file.read() == bytes(1024)


def _split_name(name: str) -> tuple[str, str]:
    """(stem, ending): the ending begins at the first dot of the last part, as WebDataset has it."""
    folder, _, last = name.rpartition("/")
    stem, dot, ending = last.partition(".")
    return f"{folder}/{stem}" if folder else stem, (dot + ending).lower()


def _grouped(stem: str, members: dict[str, bytes], where: str, told: Told) -> Iterator[Raw]:
    if not members:
        return
    image = next((data for ending, data in members.items() if ending in IMAGES), None)
    if image is None:
        told(Damage(f"{where}:{stem}", "no-image", f"only {', '.join(sorted(members))}"))
        return
    label = members.get(".cls")
    text = _text(members, f"{where}:{stem}", told)
    if label is not None and label.strip().isdigit():
        text.setdefault("label", int(label))
    yield Raw(key=stem, image=image, text=text, where=f"{where}:{stem}")


def _text(beside: dict[str, bytes], where: str, told: Told) -> dict[str, Any]:
    """What the files beside an image say; a caption file wins over the same field of a JSON file."""
    found: dict[str, Any] = {}
    for ending in TEXTS:
        data = beside.get(ending)
        if data is None:
            continue
        try:
            if len(data) > MAX_TEXT_BYTES:
                raise ValueError(f"{len(data)} bytes, at most {MAX_TEXT_BYTES}")  # noqa: TRY301 - told like the others
            if ending == ".json":
                value: Any = json.loads(data)
                found |= value if isinstance(value, dict) else {"json": value}
            else:
                found["caption"] = data.decode().strip()
        except (ValueError, RecursionError) as error:
            told(Damage(where, "bad-text", f"{ending}: {error}"))
    return _captioned(found)


def _captioned(text: dict[str, Any]) -> dict[str, Any]:
    for key in CAPTION_KEYS:
        if isinstance(text.get(key), str):
            return {**{name: value for name, value in text.items() if name != key}, "caption": text[key]}
    return text


# --- Parquet


def _read_parquet(path: Path, where: str, told: Told) -> Iterator[Raw]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    library: Any = pyarrow

    try:
        file: Any = library.parquet.ParquetFile(path)
    except (library.ArrowException, OSError) as error:
        told(Damage(where, "unreadable", f"not a Parquet file: {error}"))
        return
    with file:
        column = next((name for name in IMAGE_COLUMNS if name in file.schema_arrow.names), None)
        if column is None:
            told(Damage(where, "no-image", f"no column {', '.join(IMAGE_COLUMNS)}"))
            return
        for group in range(file.num_row_groups):
            try:
                rows: list[dict[str, Any]] = file.read_row_group(group).to_pylist()
            except (library.ArrowException, OSError) as error:
                told(Damage(f"{where}:group {group}", "truncated", str(error)))
                continue
            for number, row in enumerate(rows):
                place = f"{where}:{group}.{number}"
                cell = row.pop(column)
                # As datasets write it: {bytes, path}.
                image: object = cast("dict[str, object]", cell).get("bytes") if isinstance(cell, dict) else cell
                if not isinstance(image, bytes):
                    told(Damage(place, "no-image", f"column {column} holds a {type(image).__name__}"))
                    continue
                if len(image) > MAX_IMAGE_BYTES:
                    told(Damage(place, "oversize", f"{len(image)} bytes, at most {MAX_IMAGE_BYTES}"))
                    continue
                text = {name: value for name, value in row.items() if isinstance(value, (str, int, float, bool))}
                yield Raw(key=f"{path.stem}-{group:04d}-{number:06d}", image=image, text=_captioned(text), where=place)
