"""`python -m services.prepare.inspect file:///path/manifest.json --to folder`: what a dataset consists of.

Sizes come from the index of all samples; what needs pixels or text comes from a number of samples that are evenly
spread. Of a dataset in a bucket at most a few shards are fetched for that. Writes `sheet.png` and `index.html`, a page
that stands alone, into the folder, and prints one record of `spec.preparation`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.prepare.examine import digest_of, look_of
from services.prepare.lines import print_lines
from services.prepare.sheet import Tile, draw_sheet, write_page
from spec.errors import ConfigError, DataError
from spec.preparation import AspectBin, FeatureSeen, Inspection, Spread
from spec.shards import Feature, Manifest, Shard, ShardView, path_of, read_shard
from storage import file_path
from storage.datasets import held_shards, local_manifest, read_manifest
from storage.folder import file_errors
from storage.images import ImageProblem, decode_into, size_of
from storage.index import open_index
from storage.shard_files import in_place
from storage.tar_shards import TarShards

FETCHED_SHARDS = 8
"""Of a dataset in a bucket."""
MOST_SIZES = 4_000_000
MOST_LOOKS = 20_000
NEAR_BITS = 3
_EDGES = (0.0, 1 / 3, 1 / 2, 2 / 3, 4 / 5, 19 / 20, 20 / 19, 5 / 4, 3 / 2, 2.0, 3.0, float("inf"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, inspect, print; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.prepare.inspect", description="Look at a dataset.")
    parser.add_argument("manifest", help="URI of the manifest")
    parser.add_argument("--to", type=Path, help="folder for the contact sheet; default: none is drawn")
    parser.add_argument("--samples", type=int, default=2000, help="images to decode (default 2000)")
    parser.add_argument("--tiles", type=int, default=60, help="images on the contact sheet (default 60)")
    given = parser.parse_args(arguments)
    return print_lines(lambda: inspect(given.manifest, to=given.to, samples=given.samples, tiles=given.tiles))


def inspect(uri: str, *, to: Path | None, samples: int, tiles: int) -> Inspection:
    """Look at the dataset; with `to`, draw its contact sheet there."""
    if samples < 1 or tiles < 1:
        raise ConfigError(f"--samples {samples}, --tiles {tiles}", hint="look at 1 image at least")
    manifest = read_manifest(uri)
    with tempfile.TemporaryDirectory(prefix="gkr-inspect-") as scratch:
        reader = _Reader(uri, manifest=manifest, scratch=Path(scratch))
        seen = _look(reader, samples=samples, tiles=tiles if to is not None else 0)
        features = [_feature(one, reader) for one in manifest.features]
        sizes = reader.sizes()
    shards = [*manifest.splits.train, *manifest.splits.test]
    result = Inspection(
        manifest=uri,
        name=manifest.name,
        digest=manifest.digest,
        format=manifest.format,
        source=manifest.source,
        recipe=manifest.recipe,
        train=manifest.count("train"),
        test=manifest.count("test"),
        shards=len(shards),
        bytes=sum(shard.bytes for shard in shards),
        labels=manifest.labels,
        width=_spread(sizes[:, 0]),
        height=_spread(sizes[:, 1]),
        aspects=_aspects(sizes),
        looked_at=seen.looked_at,
        damaged=seen.damaged,
        duplicates=seen.duplicates,
        near_duplicates=seen.near_duplicates,
        captions=len([one for one in seen.caption_lengths if one]),
        caption_characters=_spread(np.array(seen.caption_lengths or [0])),
        features=features,
        sheet=str((to / "index.html").absolute()) if to is not None else "",
    )
    if to is not None:
        with file_errors(to):
            to.mkdir(parents=True, exist_ok=True)
            write_page(to, inspection=result, sheet=draw_sheet(seen.tiles))
    return result


@dataclass
class _Seen:
    """What was found in the samples that were looked at."""

    looked_at: int = 0
    damaged: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    caption_lengths: list[int] = field(default_factory=list[int])
    tiles: list[Tile] = field(default_factory=list[Tile])


@dataclass(frozen=True)
class _Picture:
    pixels: NDArray[np.uint8]
    """[height, width, 3]"""
    caption: str
    label: str


class _Reader:
    """Samples of either format by number; train before test."""

    def __init__(self, uri: str, *, manifest: Manifest, scratch: Path) -> None:
        self.uri, self.manifest = uri, manifest
        self._shards = [*manifest.splits.train, *manifest.splits.test]
        self.local = local_manifest(uri, cache=scratch, splits=())
        self.folder = path_of(self.local).parent
        self._rows: NDArray[np.void] | None = None
        self._open: tuple[str, ShardView] | None = None
        if manifest.index is not None:
            self._rows = open_index(self.folder / manifest.index.path, samples=manifest.index.samples)
        self._firsts: list[int] = [0, *accumulate(shard.samples for shard in self._shards)]
        self.count = self._firsts[-1]

    def sizes(self) -> NDArray[np.integer]:
        """Width and height [samples, 2] of all samples, or of MOST_SIZES that are evenly spread."""
        if self._rows is None:
            return np.array([[self.manifest.image_width, self.manifest.image_height]]).repeat(
                max(1, self.count), axis=0
            )
        rows = self._rows[:: -(-len(self._rows) // MOST_SIZES)]
        return np.stack([rows["width"], rows["height"]], axis=1)

    def spread(self, count: int) -> list[int]:
        """Numbers of samples: evenly spread over all, or over the shards that are fetched."""
        numbers = np.unique(np.linspace(0, self.count - 1, min(count, self.count)).astype(int))
        if file_path(self.uri) is not None or len(self._shards) <= FETCHED_SHARDS:
            return numbers.tolist()
        chosen = np.unique(np.linspace(0, len(self._shards) - 1, FETCHED_SHARDS).astype(int)).tolist()
        every = np.concatenate([np.arange(self._firsts[one], self._firsts[one + 1]) for one in chosen])
        return every[np.unique(np.linspace(0, len(every) - 1, min(count, len(every))).astype(int))].tolist()

    def read(self, numbers: Sequence[int]) -> Iterator[_Picture | None]:
        """The samples; none for one that is damaged."""
        rows = self._rows
        places = [bisect_right(self._firsts, number) - 1 for number in numbers]
        shards = [self._shards[place] for place in dict.fromkeys(places)]
        with (
            held_shards(self.uri, shards=shards, local=self.local),
            closing(TarShards(in_place(self.folder / shard.path for shard in self._shards))) as tars,
        ):
            for number, place in zip(numbers, places, strict=True):
                try:
                    if rows is None:
                        yield self._raw(self._shards[place], number - self._firsts[place])
                    else:
                        yield self._encoded(tars, rows[number])
                except (DataError, ImageProblem):
                    yield None

    def _encoded(self, tars: TarShards, row: np.void) -> _Picture:
        image, text = tars.read(row)
        width, height = size_of(image)
        pixels = np.empty((height, width, 3), np.uint8)
        decode_into(pixels, image)
        return _Picture(pixels, str(text.get("caption", "")), self._name(text.get("label")))

    def _raw(self, shard: Shard, number: int) -> _Picture:
        if self._open is None or self._open[0] != shard.path:
            self._open = (shard.path, read_shard(shard, uri=self.local, manifest=self.manifest))
        sample, shape = self._open[1][number], self.manifest.shape
        pixels = np.frombuffer(sample.pixels, np.uint8).reshape(shape.height, shape.width, shape.channels)
        if shape.channels != 3:
            pixels = np.repeat(pixels[:, :, :1], 3, axis=2)
        return _Picture(np.ascontiguousarray(pixels), sample.caption, self._name(sample.label))

    def _name(self, label: object) -> str:
        labels = self.manifest.labels
        return labels[label] if isinstance(label, int) and 0 <= label < len(labels) else ""


def _look(reader: _Reader, *, samples: int, tiles: int) -> _Seen:
    seen = _Seen()
    numbers = reader.spread(samples)
    drawn = set(np.array(numbers)[np.linspace(0, len(numbers) - 1, min(tiles, len(numbers))).astype(int)].tolist())
    pixels: set[bytes] = set()
    looks: list[int] = []
    for number, picture in zip(numbers, reader.read(numbers), strict=True):
        seen.looked_at += 1
        if picture is None:
            seen.damaged += 1
            continue
        seen.caption_lengths.append(len(picture.caption))
        digest = digest_of(picture.pixels)
        if digest in pixels:
            seen.duplicates += 1
        else:
            pixels.add(digest)
            looks.append(look_of(picture.pixels))
        if number in drawn:
            seen.tiles.append(Tile.of(picture.pixels, number=number, caption=picture.caption, label=picture.label))
    seen.near_duplicates = _near(looks)
    return seen


def _near(looks: list[int]) -> int:
    """How many look like an earlier one, among the first MOST_LOOKS: time grows with the square."""
    known = np.array([look for look in looks if look][:MOST_LOOKS], dtype=np.uint64)
    return sum(
        bool((np.bitwise_count(known[:number] ^ known[number]) <= NEAR_BITS).any()) for number in range(1, len(known))
    )


def _feature(feature: Feature, reader: _Reader) -> FeatureSeen:
    norms: list[float] = []
    looked = bad = 0
    width = int(np.prod(feature.shape))
    files = feature.files[:FETCHED_SHARDS]
    with held_shards(reader.uri, shards=files, local=reader.local):
        for file in files:
            path = reader.folder / file.path
            if path.stat().st_size != file.samples * width * 4:
                raise DataError(
                    f"the file has {path.stat().st_size} bytes, {file.samples} values need {file.samples * width * 4}",
                    where=str(path),
                )
            values = np.memmap(path, dtype="<f4", mode="r", shape=(file.samples, width))
            chosen = np.array(values[:: max(1, file.samples // 256)])
            finite = np.isfinite(chosen).all(axis=1)
            looked, bad = looked + len(chosen), bad + int((~finite).sum())
            norms += np.linalg.norm(chosen[finite], axis=1).tolist()
    return FeatureSeen(
        name=feature.name,
        encoder=feature.encoder,
        shape=feature.shape,
        looked_at=looked,
        not_finite=bad,
        norm=_spread(np.array(norms or [0.0])),
    )


def _spread(values: NDArray[np.generic]) -> Spread:
    least, median, most = np.quantile(values.astype(np.float64), (0, 0.5, 1))
    return Spread(least=float(least), median=float(median), most=float(most))


def _aspects(sizes: NDArray[np.integer]) -> list[AspectBin]:
    aspects = sizes[:, 0] / sizes[:, 1]
    counts, _ = np.histogram(aspects, bins=np.array(_EDGES))
    return [
        AspectBin(least=low, below=high if np.isfinite(high) else None, count=int(count))
        for low, high, count in zip(_EDGES, _EDGES[1:], counts, strict=False)
    ]


if __name__ == "__main__":
    sys.exit(main())
