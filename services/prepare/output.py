"""Where a preparation writes: shards, index, embeddings and the list of what was dropped.

Everything is appended to files of the work folder. Their sizes at a checkpoint are in the journal's state, and opening
cuts them back to those, so what comes after a SIGKILL is written as if there had been none. A shard that is full goes
to the dataset's store at once, under a name that is its content's; its file here is removed behind the next checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from services.prepare.examine import Dropped, Kept
from services.prepare.journal import Part, State
from spec.errors import DataError
from spec.preparation import EXAMPLES
from spec.shards import Shard, Split
from storage import Bucket
from storage.index import ITEM
from storage.tar_shards import TarShardWriter

FOLDER = "images"
MOST_LABELS = 65_536
_FLOAT_BYTES = 4
_CHUNK_ROWS = 1 << 20


class Output:
    """Appends to the files of one work folder. `state` is kept current; the caller commits it."""

    def __init__(self, folder: Path, *, bucket: Bucket, state: State, shard_bytes: int) -> None:
        self._bucket = bucket
        self._state = state
        self._labels = {name: number for number, name in enumerate(state.labels)}
        self._splits = {
            split: _SplitOutput(folder, split, bucket=bucket, state=state, shard_bytes=shard_bytes)
            for split in ("train", "test")
        }
        self._dropped = _Tail(folder / "dropped.jsonl", size=state.dropped_bytes)

    def add(self, kept: Kept, *, split: Split, values: Mapping[str, np.ndarray]) -> None:
        """Append a sample, with its value of each feature."""
        state = self._state
        self._label(kept)
        self._splits[split].add(kept, values=values)
        state.captions += bool(kept.caption)
        state.bytes += len(kept.image)
        state.width, state.height = max(state.width, kept.width), max(state.height, kept.height)

    def drop(self, dropped: Dropped) -> None:
        """Note why a sample is not in the dataset."""
        state = self._state
        state.dropped[dropped.reason] = state.dropped.get(dropped.reason, 0) + 1
        places = state.examples.setdefault(dropped.reason, [])
        if len(places) < EXAMPLES:
            places.append(f"{dropped.where}: {dropped.message}")
        fields = {"where": dropped.where, "reason": dropped.reason, "message": dropped.message}
        self._dropped.write(json.dumps(fields).encode() + b"\n")
        state.dropped_bytes = self._dropped.size

    def sync(self) -> None:
        """Make durable what was written; the caller commits the state after this."""
        self._dropped.sync()
        for split in self._splits.values():
            split.sync()

    def forget(self) -> None:
        """Remove the files that the committed state does not need any more."""
        for split in self._splits.values():
            split.forget()

    def close(self) -> None:
        """Close all files."""
        self._dropped.close()
        for split in self._splits.values():
            split.close()

    def finish_shards(self) -> None:
        """Close the open shards; the caller commits."""
        for split in self._splits.values():
            split.finish_shard()

    def send_index(self) -> Shard:
        """Write the index of both splits and the list of what was dropped to the store; the index."""
        self._dropped.flush()
        self._bucket.send("dropped.jsonl", self._dropped.path)
        path = self._dropped.path.with_name("index")
        first = 0
        with path.open("wb") as file:
            for name, part in (("train", self._state.train), ("test", self._state.test)):
                for rows in self._splits[name].rows():
                    rows["shard"] += first
                    file.write(rows.tobytes())
                first += len(part.shards)
        digest = _sha256(path)
        key = f"index-{digest[:16]}"
        size = self._bucket.send(key, path)
        return Shard(path=key, samples=self._state.kept, bytes=size, sha256=digest)

    def _label(self, kept: Kept) -> None:
        """Labels that are words become numbers, in the order of their first use."""
        label = kept.text.get("label")
        if isinstance(label, str):
            number = self._labels.setdefault(label, len(self._labels))
            kept.text["label"] = number
        elif isinstance(label, int) and not isinstance(label, bool) and 0 <= label < MOST_LABELS:
            for number in range(len(self._labels), label + 1):
                self._labels.setdefault(str(number), number)
        else:
            kept.text.pop("label", None)
        if len(self._labels) > MOST_LABELS:
            raise DataError(
                f"there are more than {MOST_LABELS} labels, the last is {label!r}",
                where=kept.where,
                hint="labels are classes; a text of its own for each image is a caption",
            )
        self._state.labels = list(self._labels) if len(self._labels) != len(self._state.labels) else self._state.labels


class _SplitOutput:
    """The files of one split."""

    def __init__(self, folder: Path, split: Split, *, bucket: Bucket, state: State, shard_bytes: int) -> None:
        self._folder, self._split, self._bucket, self._state = folder, split, bucket, state
        self._part: Part = state.train if split == "train" else state.test
        self._shard_bytes = shard_bytes
        self._rows = _Tail(folder / f"{split}.rows", size=self._part.rows * ITEM.itemsize)
        self._open: tuple[_Tail, TarShardWriter, dict[str, _Tail]] | None = None
        self._done: list[Path] = []
        if self._part.samples:
            self._open = self._open_shard()

    def add(self, kept: Kept, *, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            self._state.value_shapes[name] = list(value.shape)
        if self._open is None:
            self._open = self._open_shard()
        _, writer, tails = self._open
        part = self._part
        placed = writer.add(f"{part.rows:09d}", image=kept.image, ending=kept.ending, text=kept.text)
        row = (
            placed.offset, len(part.shards), placed.image_bytes, placed.text_bytes, placed.crc32, kept.width,
            kept.height,
        )  # fmt: skip
        self._rows.write(np.array([row], dtype=ITEM).tobytes())
        for name, value in values.items():
            tails[name].write(value.astype("<f4").tobytes())
        part.rows, part.size, part.samples = part.rows + 1, writer.size, writer.samples
        if writer.size >= self._shard_bytes:
            self.finish_shard()

    def finish_shard(self) -> None:
        """End the open shard and bring it to the store."""
        if self._open is None:
            return
        tail, writer, tails = self._open
        writer.finish()
        shard = self._send(tail, ending="tar", stem="")
        self._part.shards.append(shard)
        for name, values in tails.items():
            sent = self._send(values, ending=f"{name}.f32", stem=shard.path.removesuffix(".tar"))
            self._part.values.setdefault(name, []).append(sent)
        self._part.size = self._part.samples = 0
        self._open = None

    def rows(self) -> Iterator[np.ndarray]:
        """The split's rows of the index, in pieces; shards count from 0."""
        self._rows.flush()
        with self._rows.path.open("rb") as file:
            for _ in range(0, self._part.rows, _CHUNK_ROWS):
                yield np.fromfile(file, dtype=ITEM, count=_CHUNK_ROWS)

    def sync(self) -> None:
        self._rows.sync()
        for tail in self._tails():
            tail.sync()

    def forget(self) -> None:
        for path in self._done:
            path.unlink(missing_ok=True)
        self._done.clear()

    def close(self) -> None:
        self._rows.close()
        for tail in self._tails():
            tail.close()

    def _tails(self) -> list[_Tail]:
        return [] if self._open is None else [self._open[0], *self._open[2].values()]

    def _open_shard(self) -> tuple[_Tail, TarShardWriter, dict[str, _Tail]]:
        part, state = self._part, self._state
        stem = f"{self._split}-{len(part.shards):05d}"
        tail = _Tail(self._folder / f"{stem}.tar", size=part.size)
        tails = {
            name: _Tail(self._folder / f"{stem}.{name}", size=part.samples * math.prod(shape) * _FLOAT_BYTES)
            for name, shape in state.value_shapes.items()
        }
        return tail, TarShardWriter(tail.file, size=part.size, samples=part.samples), tails

    def _send(self, tail: _Tail, *, ending: str, stem: str) -> Shard:
        tail.close()
        digest = _sha256(tail.path)
        key = f"{stem or f'{FOLDER}/{tail.path.stem}-{digest[:16]}'}.{ending}"
        size = self._bucket.send(key, tail.path)
        self._done.append(tail.path)
        return Shard(path=key, samples=self._part.samples, bytes=size, sha256=digest)


class _Tail:
    """A file that is appended to, from a size that is known to be good."""

    def __init__(self, path: Path, *, size: int) -> None:
        self.path = path
        self.file: BinaryIO = path.open("r+b" if size and path.exists() else "wb")
        if self.file.seek(0, os.SEEK_END) < size:
            self.file.close()
            raise DataError(
                f"the file is shorter than the {size} bytes that were written to it",
                where=str(path),
                hint=f"remove {path.parent} and start again from the beginning",
            )
        self.file.seek(size)
        self.file.truncate()
        self.size = size

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.size += len(data)

    def flush(self) -> None:
        self.file.flush()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
