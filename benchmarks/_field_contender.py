"""One way to load pictures, in a process of its own: `python _field_contender.py NAME TASK.json`.

Runs in the environment that `benchmarks.loader_field` makes. Each library is used as its documentation recommends; what
all but SPDL's own decoder share is the function that turns an encoded picture into pixels. Reads commands as lines of
JSON and answers each with one: `batches` (how many come untimed first, how many are timed) or `stall` (the rate of a
consumer, and for how long).
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, RandomSampler

from spec.train import ModelConfig
from storage.images import decode_into
from storage.index import open_index
from training.data.loader import Loader
from training.data.work import open_source

SIDE, BATCH, AHEAD = 512, 32, 4
"""Pixels, pictures of a batch, batches that are prepared ahead, by all workers together."""
PAGE = 4096
MOST_BYTES = 6 * 2**30
"""Of data for each process of a contender: one that reads on without end shall end itself, not the machine."""
SHAPE = (BATCH, SIDE, SIDE, 3)


class Task(NamedTuple):
    """Where the pictures are."""

    uri: str
    """Of the dataset's manifest."""
    mosaic: str
    """The same pictures in the format of MosaicML Streaming."""
    litdata: str
    """And in LitData's."""
    workers: int


def ours(task: Task) -> Iterator[Any]:
    """Our loader."""
    with Loader(
        task.uri, seed=0, learner="east", start_position=0, batch=BATCH, rank=0, world_size=1, workers=task.workers,
        prefetch=AHEAD, model=ModelConfig(image_size=SIDE, channels=3), is_plain=True, crop=False,
    ) as loader:  # fmt: skip
        while True:
            yield loader.next(60).images


def torch(task: Task) -> Iterator[Any]:
    """torch's DataLoader over a map-style dataset; one endless epoch, so that it never runs dry between two."""
    pictures = Pictures(task.uri)
    return iter(DataLoader(
        pictures, batch_size=BATCH, sampler=RandomSampler(pictures, replacement=True, num_samples=10**8),
        num_workers=task.workers, prefetch_factor=AHEAD // task.workers, persistent_workers=True,
    ))  # fmt: skip


def spdl(task: Task) -> Iterator[Any]:
    """SPDL's pipeline of threads with its own decoder: read, aggregate, decode and convert the batch at once."""
    import spdl.io  # pyright: ignore[reportMissingImports]

    pictures = Pictures(task.uri)
    size = f"crop='min(iw,ih)':'min(iw,ih)',scale=w={SIDE}:h={SIDE}:flags=lanczos," if pictures.is_scaled else ""
    crop = size or f"crop={SIDE}:{SIDE},"

    def decode(numbers: list[int]) -> Any:
        return spdl.io.to_numpy(spdl.io.load_image_batch(
            [pictures.read(number) for number in numbers], width=None, height=None, pix_fmt="rgb24",
            filter_desc=f"{crop}format=pix_fmts=rgb24",
        ))  # fmt: skip

    return spdl_pipeline(pictures, decode=decode, workers=task.workers)


def spdl_pillow(task: Task) -> Iterator[Any]:
    """SPDL's pipeline of threads with our decoder, each batch decoded in place."""
    pictures = Pictures(task.uri)

    def decode(numbers: list[int]) -> Any:
        batch = np.empty(SHAPE, dtype=np.uint8)
        for row, number in zip(batch, numbers, strict=True):
            pictures.fill(row, number)
        return batch

    return spdl_pipeline(pictures, decode=decode, workers=task.workers)


def spdl_pipeline(pictures: Pictures, *, decode: Callable[[list[int]], Any], workers: int) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder  # pyright: ignore[reportMissingImports]

    pipeline = (
        PipelineBuilder()
        .add_source(shuffled(len(pictures)))
        .aggregate(BATCH)
        .pipe(decode, concurrency=workers)
        .add_sink(AHEAD)
        .build(num_threads=workers)
    )
    with pipeline.auto_stop():
        yield from pipeline


def grain(task: Task) -> Iterator[Any]:
    """Grain: random access, batches made in worker processes, which hand them over in shared memory."""
    import grain  # pyright: ignore[reportMissingImports]

    options = grain.MultiprocessingOptions(num_workers=task.workers, per_worker_buffer_size=AHEAD // task.workers)
    pictures = Pictures(task.uri)
    dataset = grain.MapDataset.source(pictures).shuffle(seed=0).repeat().batch(BATCH)
    # It reads 500 elements ahead unless told otherwise, which here are batches: 12 GB in each worker.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD // task.workers)
    return iter(dataset.to_iter_dataset(reading).mp_prefetch(options))


def mosaic(task: Task) -> Iterator[Any]:
    """MosaicML Streaming: its own shards and order, torch's DataLoader."""
    from streaming import StreamingDataset  # pyright: ignore[reportMissingImports]

    class Streamed(StreamingDataset):  # pyright: ignore[reportUntypedBaseClass]
        def __getitem__(self, at: Any) -> Any:
            return decoded(super().__getitem__(at)["image"])

    dataset = Streamed(local=task.mosaic, shuffle=True, batch_size=BATCH, epoch_size=100_000)
    return iter(DataLoader(
        dataset, batch_size=BATCH, num_workers=task.workers, prefetch_factor=AHEAD // task.workers,
        persistent_workers=True,
    ))  # fmt: skip


def webdataset(task: Task) -> Iterator[Any]:
    """WebDataset: the same tar files read one after the other, shuffled in a buffer, batched in the worker."""
    import webdataset  # pyright: ignore[reportMissingImports]

    tars = sorted(str(path) for path in Path(task.uri.removeprefix("file://")).parent.glob("*.tar"))
    dataset = (
        webdataset.WebDataset(tars, resampled=True, shardshuffle=False)
        .shuffle(100)
        .map(_decoded_of)
        .batched(BATCH, collation_fn=np.stack)
    )
    return iter(webdataset.WebLoader(
        dataset, batch_size=None, num_workers=task.workers, prefetch_factor=AHEAD // task.workers
    ))  # fmt: skip


def _decoded_of(sample: dict[str, bytes]) -> NDArray[np.uint8]:
    return decoded(sample["jpg"])


def litdata(task: Task) -> Iterator[Any]:
    """LitData: its own chunks and order, its own loader over torch's."""
    from litdata import StreamingDataLoader, StreamingDataset  # pyright: ignore[reportMissingImports]

    class Streamed(StreamingDataset):  # pyright: ignore[reportUntypedBaseClass]
        def __getitem__(self, at: Any) -> Any:
            return decoded(super().__getitem__(at)["image"])

    loader = StreamingDataLoader(
        Streamed(task.litdata, shuffle=True, drop_last=True), batch_size=BATCH, num_workers=task.workers,
        prefetch_factor=AHEAD // task.workers, persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


CONTENDERS: dict[str, Callable[[Task], Iterator[Any]]] = {
    "ours": ours, "torch": torch, "spdl": spdl, "spdl-pillow": spdl_pillow, "grain": grain, "mosaic": mosaic,
    "webdataset": webdataset, "litdata": litdata,
}  # fmt: skip


def prepare_mosaic(task: Task) -> None:
    """Write the pictures as MosaicML Streaming's shards."""
    from streaming import MDSWriter  # pyright: ignore[reportMissingImports]

    pictures = Pictures(task.uri)
    with MDSWriter(out=task.mosaic, columns={"image": "bytes"}) as writer:
        for number in range(len(pictures)):
            writer.write({"image": pictures.read(number)})


def prepare_litdata(task: Task) -> None:
    """Write the pictures as LitData's chunks."""
    from litdata import optimize  # pyright: ignore[reportMissingImports]

    optimize(
        fn=partial(_read_for_litdata, task.uri), inputs=list(range(len(Pictures(task.uri)))), output_dir=task.litdata,
        chunk_bytes="64MB", num_workers=1,
    )  # fmt: skip


def _read_for_litdata(uri: str, number: int) -> dict[str, bytes]:
    return {"image": Pictures(uri).read(number)}


PREPARE: dict[str, Callable[[Task], None]] = {"prepare-mosaic": prepare_mosaic, "prepare-litdata": prepare_litdata}


class Pictures(Dataset[Any]):
    """Random access to the encoded pictures; a sequence of decoded ones."""

    def __init__(self, uri: str) -> None:
        files = open_source(uri, split="train", cache=None)[1]
        self._rows = open_index(Path(files.index), samples=files.samples)
        self._paths = [shard.path for shard in files.shards]
        self._open: dict[int, int] = {}
        self.is_scaled = int(min(self._rows["width"].min(), self._rows["height"].min())) != SIDE

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> NDArray[np.uint8]:
        return decoded(self.read(number))

    def read(self, number: int) -> bytes:
        """One encoded picture; unlike ours, nobody else checks that it is the one that was written."""
        row = self._rows[number]
        shard = int(row["shard"])
        if shard not in self._open:
            self._open[shard] = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._open[shard], int(row["image_bytes"]), int(row["offset"]))

    def fill(self, out: NDArray[np.uint8], number: int) -> None:
        """Decode in place."""
        decode_into(out, self.read(number))


def decoded(data: bytes) -> NDArray[np.uint8]:
    """Pixels of an encoded picture."""
    out = np.empty(SHAPE[1:], dtype=np.uint8)
    decode_into(out, data)
    return out


def shuffled(count: int) -> Iterator[int]:
    """Numbers without end, in another order each time around."""
    random = np.random.default_rng(0)
    while True:
        yield from random.permutation(count).tolist()


def touch(batch: Any) -> int:
    """Read a byte of every page, as a copy to a device would; refuses a batch that is not what was asked for."""
    pixels = np.asarray(batch)
    if pixels.shape != SHAPE or pixels.dtype != np.uint8:
        raise AssertionError(f"a batch of {pixels.dtype} {pixels.shape}")
    return int(pixels.reshape(-1)[::PAGE].sum(dtype=np.int64))


def time_batches(batches: Iterator[Any], *, untimed: int, timed: int) -> dict[str, Any]:
    """Wall and CPU seconds of this process and its children, in the steady state."""
    for batch in itertools.islice(batches, untimed):
        touch(batch)
    cpu, began, brightness = cpu_seconds(), time.perf_counter(), 0
    for batch in itertools.islice(batches, timed):
        brightness += touch(batch)
    return {
        "images": timed * BATCH,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": cpu_seconds() - cpu,
        "brightness": brightness / (timed * BATCH * SIDE * SIDE * 3 / PAGE),
    }


def time_stalls(batches: Iterator[Any], *, rate: float, seconds: float) -> dict[str, Any]:
    """What share of its time a consumer waits that works on each batch for as long as `rate` images a second allow."""
    step, waited, steps = BATCH / rate, 0.0, 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        touch(batch)
        time.sleep(step)
        steps += 1
    return {"waited_share": waited / (time.perf_counter() - began), "steps": steps}


def cpu_seconds() -> float:
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True)))


def main() -> None:
    """Answer commands until there are no more."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, task = sys.argv[1], Task(**json.loads(Path(sys.argv[2]).read_text()))
    if name in PREPARE:
        PREPARE[name](task)
        return
    began = time.perf_counter()
    batches = CONTENDERS[name](task)
    touch(next(batches))
    answers.write(json.dumps({"first_batch_seconds": time.perf_counter() - began}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        what = {"batches": time_batches, "stall": time_stalls}[command.pop("do")]
        answers.write(json.dumps(what(batches, **command)) + "\n")


if __name__ == "__main__":
    main()
