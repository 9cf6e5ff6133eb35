"""Makes a dataset of encoded images out of a folder, tar files or Parquet files, in as many goes as it takes.

Samples are looked at in the order of the source, by threads, and dealt with in that order in groups: each is compared
with what was kept before, its caption is embedded if that is wanted, and it is written. Between groups a checkpoint can
be taken. What is written depends on the source and the rules alone, so a preparation that was killed and started again
gives the bytes of one that was not (embeddings: within the encoding service's tolerance, if others ask it meanwhile).
Memory is bounded by the groups and the images in work, disk by the open shards and the index.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from services.prepare.embed import Embedder, Value
from services.prepare.examine import Dropped, Kept, examine
from services.prepare.found import Found, read_on, source_digest
from services.prepare.journal import Journal, State
from services.prepare.output import Output
from services.prepare.packing import Content, refuse_other
from services.prepare.store import exclusive, explained
from spec.errors import ConfigError, DataError
from spec.preparation import PrepareProgress, PrepareReport, PrepareRules
from spec.shard_bytes import REMEDY
from spec.shards import Feature, Manifest, Shape, Split, Splits, seal
from storage import Bucket, ExistsError, MissingError, file_path, open_bucket, split_uri
from storage.datasets import read_manifest
from storage.sources import Raw, is_read, list_source

GROUP = 64
"""Samples that are dealt with, and embedded, together."""
CHECKPOINT_SECONDS = 5.0
IN_WORK_BYTES = 512 * 2**20
"""Of encoded images that wait for their turn."""
DECODE_SECONDS = 300.0
_WORK = ".prepare-work-"


@dataclass(frozen=True)
class Job:
    """One dataset to make."""

    source: str
    """URI of a folder, tar file or Parquet file."""
    manifest: str
    """URI."""
    rules: PrepareRules = field(default_factory=PrepareRules)
    work: Path | None = None
    """Folder for what is not finished. Default: beside a dataset that is a folder, else in the user's cache."""
    lock_timeout_seconds: float = 120
    threads: int = 0
    """That decode; 0: one for each core."""


Told = Callable[[PrepareProgress], None]


def advance(
    job: Job,
    *,
    embedders: Sequence[Embedder] = (),
    seconds: float | None = None,
    told: Told = lambda progress: None,
) -> PrepareReport:
    """Make the dataset, or go on making it for about `seconds`; the report says if it is done."""
    content, files = _content(job, embedders)
    folder, name = split_uri(job.manifest)
    bucket = open_bucket(folder)
    work = _work_folder(job, content)
    with exclusive(work.parent, timeout_seconds=job.lock_timeout_seconds):
        found = _find(bucket, name, uri=job.manifest, content=content)
        if found is None:
            with explained(work):
                work.mkdir(exist_ok=True)
                run = _Run(job, content, work=work, bucket=bucket, embedders=embedders, files=files, told=told)
                with closing(run):
                    if not run.go(seconds=seconds):
                        return run.report(done=False)
                    try:
                        found = run.commit(name)
                    except DataError:  # there is nothing to go on with: the next start begins anew
                        shutil.rmtree(work, ignore_errors=True)
                        raise
                    report = run.report(done=True, manifest=found)
            reused = False
        else:
            report, reused = _read_report(bucket, job=job, manifest=found), True
        for left in work.parent.glob(f"{_WORK}*"):
            shutil.rmtree(left, ignore_errors=True)
    return report.model_copy(update={"reused": reused})


def dry_run(job: Job, *, told: Told = lambda progress: None) -> PrepareReport:
    """What `advance` would keep and drop, and how many bytes; nothing is embedded, and nothing is left behind."""
    content, files = _content(job, ())
    with tempfile.TemporaryDirectory(prefix="gkr-prepare-") as scratch, explained(Path(scratch)):
        nowhere = open_bucket(Path(scratch, "dataset").as_uri())
        run = _Run(job, content, work=Path(scratch), bucket=nowhere, embedders=(), files=files, told=told, dry=True)
        with closing(run):
            run.go(seconds=None)
            return run.report(done=True).model_copy(update={"dry_run": True})


class _Run:
    """One go at one dataset. The caller holds the lock."""

    def __init__(
        self, job: Job, content: Content, *, work: Path, bucket: Bucket, embedders: Sequence[Embedder], files: int,
        told: Told, dry: bool = False,
    ) -> None:  # fmt: skip
        self._job, self._content, self._bucket, self._embedders = job, content, bucket, embedders
        self._files, self._told, self._dry = files, told, dry
        self._journal = Journal(work / "journal.sqlite")
        self._state: State = self._journal.state()
        self._output = Output(work, bucket=bucket, state=self._state, shard_bytes=job.rules.shard_bytes)

    def close(self) -> None:
        self._output.close()
        self._journal.close()

    def go(self, *, seconds: float | None) -> bool:
        """Deal with the source from where the last go ended; False if the time was up before its end."""
        state = self._state
        started = checkpointed = time.monotonic()
        source = read_on(self._job.source, file=state.file, number=state.number)
        with closing(_examined(source, rules=self._job.rules, threads=self._job.threads)) as examined:
            while not state.ended:
                group = list(islice(examined, GROUP))
                self._deal_with(group)
                state.ended = len(group) < GROUP
                if state.ended:
                    self._output.finish_shards()
                now = time.monotonic()
                # Samples that a broken encoder failed on must not be dropped for good before that is known.
                failing = any(one.failing for one in self._embedders)
                over = seconds is not None and now - started >= seconds and not failing
                if state.ended or over or (now - checkpointed >= CHECKPOINT_SECONDS and not failing):
                    self._checkpoint()
                    checkpointed = time.monotonic()
                self._tell()
                if over and not state.ended:
                    return False
        return True

    def commit(self, name: str) -> Manifest:
        """Write the index and, last, the manifest; the one that is there, if another preparer was faster."""
        state, content = self._state, self._content
        if not state.train.rows:
            told = ", ".join(f"{count} {reason}" for reason, count in sorted(state.dropped.items())) or "it is empty"
            raise DataError(
                f"no image is left to train on: {told}",
                where=self._job.source,
                hint="see the report's examples; change the rules or the source",
            )
        index = self._output.send_index()
        manifest = seal(
            Manifest(
                name=content.name,
                source=content.source,
                recipe=content.recipe,
                image_height=state.height,
                image_width=state.width,
                image_channels=content.shape.channels,
                labels=state.labels,
                splits=Splits(train=state.train.shards, test=state.test.shards),
                format="tar",
                index=index,
                features=self._features(),
            )
        )
        report = self.report(done=True, manifest=manifest)
        self._bucket.put("preparation.json", report.write_json().encode() + b"\n")
        try:
            self._bucket.create(name, manifest.write_json().encode() + b"\n")
        except ExistsError:
            found = _find(self._bucket, name, uri=self._job.manifest, content=content)
            if found is None:
                raise
            return found
        return manifest

    def report(self, *, done: bool, manifest: Manifest | None = None) -> PrepareReport:
        """As far as it is."""
        state = self._state
        return PrepareReport(
            source=self._job.source,
            manifest=self._job.manifest,
            digest="" if manifest is None else manifest.digest,
            recipe=self._content.recipe,
            done=done,
            found=state.found,
            train=state.train.rows,
            test=state.test.rows,
            captions=state.captions,
            bytes=state.bytes,
            dropped=dict(sorted(state.dropped.items())),
            examples=dict(sorted(state.examples.items())),
            encoders={one.name: one.fingerprint for one in self._embedders},
        )

    def _deal_with(self, group: list[tuple[Found, Kept | Dropped]]) -> None:
        state = self._state
        judged = [self._compared(one) for _, one in group]
        kept = [one for one in judged if isinstance(one, Kept)]
        values = iter(self._embedded(kept))
        for one in judged:
            value = one if isinstance(one, Dropped) else next(values)
            if isinstance(value, Dropped):
                self._output.drop(value)
            elif isinstance(one, Kept):
                self._write(one, value)
        state.found += len(group)
        if group:
            last = group[-1][0]
            state.file, state.number, state.files = last.file, last.number, last.files

    def _write(self, kept: Kept, values: dict[str, Value]) -> None:
        split: Split = "test" if _lot(kept.pixels) < self._job.rules.held_out else "train"
        if not self._dry:
            self._output.add(kept, split=split, values=values)
            return
        state = self._state
        part = state.test if split == "test" else state.train
        part.rows += 1
        state.captions += bool(kept.caption)
        state.bytes += len(kept.image)

    def _compared(self, one: Kept | Dropped) -> Kept | Dropped:
        rules = self._job.rules
        if isinstance(one, Dropped) or rules.duplicates == "keep":
            return one
        before = self._journal.same_pixels(one.pixels, place=one.where)
        if before:
            return Dropped(one.where, "duplicate", f"its pixels are those of {before}")
        if rules.duplicates == "near":
            before = self._journal.same_look(one.look, place=one.where, bits=rules.near_bits)
            if before:
                return Dropped(one.where, "near-duplicate", f"it looks like {before}")
        return one

    def _embedded(self, kept: list[Kept]) -> list[dict[str, Value] | Dropped]:
        """For each its value of each feature, or why there is none."""
        found: list[dict[str, Value] | Dropped] = [{} for _ in kept]
        for embedder in self._embedders:
            left = [number for number, one in enumerate(found) if isinstance(one, dict)]
            for number, value in zip(left, embedder.embed([kept[number] for number in left]), strict=True):
                values = found[number]
                assert isinstance(values, dict)
                if isinstance(value, str):
                    found[number] = Dropped(kept[number].where, "not-encoded", f"{embedder.name}: {value}")
                else:
                    values[embedder.name] = value
        return found

    def _features(self) -> list[Feature]:
        train, test = self._state.train.values, self._state.test.values
        return [
            Feature(
                name=one.name,
                of=one.of,
                encoder=one.fingerprint,
                shape=self._state.value_shapes[one.name],
                files=[*train.get(one.name, []), *test.get(one.name, [])],
            )
            for one in self._embedders
        ]

    def _checkpoint(self) -> None:
        self._output.sync()
        self._journal.commit(self._state)
        self._output.forget()

    def _tell(self) -> None:
        state = self._state
        self._told(
            PrepareProgress(
                files=state.files,
                files_total=self._files,
                found=state.found,
                kept=state.kept,
                dropped=sum(state.dropped.values()),
            )
        )


def _examined(found: Iterable[Found], *, rules: PrepareRules, threads: int) -> Generator[tuple[Found, Kept | Dropped]]:
    """Each sample with its verdict, in order, looked at ahead by threads."""
    count = threads or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(count, thread_name_prefix="examine")
    waiting: deque[tuple[Found, Future[Kept | Dropped]]] = deque()
    held = 0

    def first() -> tuple[Found, Kept | Dropped]:
        nonlocal held
        one, future = waiting.popleft()
        held -= _size(one)
        try:
            return one, future.result(timeout=DECODE_SECONDS)
        except TimeoutError as error:
            raise DataError(
                f"decoding did not end within {DECODE_SECONDS:g} s", where=one.item.where, hint="remove this image"
            ) from error

    try:
        for one in found:
            while waiting and (len(waiting) >= 4 * count or held + _size(one) > IN_WORK_BYTES):
                yield first()
            held += _size(one)
            waiting.append((one, pool.submit(examine, one.item, rules=rules)))
        while waiting:
            yield first()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _size(found: Found) -> int:
    return len(found.item.image) if isinstance(found.item, Raw) else 0


def _lot(pixels: bytes) -> float:
    """In [0, 1), by the pixels alone: an image is in the same split of every dataset."""
    return int.from_bytes(hashlib.blake2b(b"held-out/1\0" + pixels, digest_size=6).digest()) / 2**48


def _content(job: Job, embedders: Sequence[Embedder]) -> tuple[Content, int]:
    """What the manifest will say, and how many files the source has."""
    if job.manifest.startswith(job.source.rstrip("/") + "/"):
        raise ConfigError(
            f"the dataset would lie inside its source {job.source}", where=job.manifest, hint="name a folder outside it"
        )
    entries = list_source(job.source)
    encoders = "".join(f"; {one.name} by {one.fingerprint}" for one in embedders)
    recipe = f"images/1: {job.rules.model_dump_json()}; files {source_digest(entries)}{encoders}"
    folder = split_uri(job.manifest)[0].rstrip("/")
    return Content(folder.rpartition("/")[2] or "images", job.source, recipe, Shape(1, 1, 3), ()), sum(
        is_read(entry.key) for entry in entries
    )


def _work_folder(job: Job, content: Content) -> Path:
    name = hashlib.sha256(f"{job.manifest}\0{content.source}\0{content.recipe}".encode()).hexdigest()[:16]
    local = file_path(split_uri(job.manifest)[0])
    if job.work is None and local is not None:
        return local / f"{_WORK}{name}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gkr" / "prepare"
    return (job.work or cache) / name / f"{_WORK}{name}"


def _find(bucket: Bucket, name: str, *, uri: str, content: Content) -> Manifest | None:
    """The dataset that is already there, if its files have their sizes; a record is verified whenever it is read."""
    if not bucket.exists(name):
        return None
    manifest = read_manifest(uri)
    refuse_other(manifest, content=content, where=uri)
    sizes = {entry.key: entry.size for entry in bucket.list()}
    values = [file for feature in manifest.features for file in feature.files]
    for file in [*manifest.splits.train, *manifest.splits.test, *filter(None, [manifest.index]), *values]:
        if sizes.get(file.path) != file.bytes:
            raise DataError(
                f"a file of the dataset has {sizes.get(file.path, 'no')} bytes, the manifest says {file.bytes}",
                where=f"{bucket.uri}/{file.path}",
                hint=REMEDY,
            )
    return manifest


def _read_report(bucket: Bucket, *, job: Job, manifest: Manifest) -> PrepareReport:
    try:
        return PrepareReport.read_json(bucket.get("preparation.json").data)
    except MissingError:  # another hand removed it; the manifest says the rest
        return PrepareReport(
            source=job.source,
            manifest=job.manifest,
            digest=manifest.digest,
            recipe=manifest.recipe,
            done=True,
            found=0,
            train=manifest.count("train"),
            test=manifest.count("test"),
            bytes=sum(shard.bytes for shard in [*manifest.splits.train, *manifest.splits.test]),
        )
