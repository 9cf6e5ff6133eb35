"""`python -m services.prepare --source sklearn-digits --manifest file:///path/manifest.json`

Makes the dataset, in a folder or in a bucket, unless it is there, and prints its digest. Progress goes to stderr. Safe
to start any number of times at once. A source that is a URI is a folder of images, tar files or Parquet files: those
are made by `services.prepare.encoded`, by the rules of `--rules`. With `--lines` stdout gets a JSON line per record of
`spec.preparation` instead: `gkr data prepare` reads them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.prepare import digits, docstrings, objects
from services.prepare.lines import print_line, print_lines
from services.prepare.packing import Content, Packed, pack
from services.prepare.rules import read_rules
from services.prepare.store import exclusive, find, write
from spec.errors import ConfigError, GkrError
from spec.events import Prepared, write_event
from spec.preparation import PrepareProgress, PrepareReport
from spec.shards import Manifest, path_of
from storage import file_path, split_uri

SOURCES = {"sklearn-digits": digits, "python-docstrings": docstrings}
_SAY_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, prepare, print; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m services.prepare", description="Make a dataset unless it is there."
    )
    parser.add_argument("--source", required=True, help=f"what to make it from: {', '.join(SOURCES)} or a URI")
    parser.add_argument("--manifest", required=True, help="URI of the manifest; shards go beside it")
    parser.add_argument("--shard-samples", type=int, default=256, help="samples per shard (default 256)")
    parser.add_argument("--lock-timeout", type=float, default=120, help="seconds to wait for another preparer")
    parser.add_argument("--events", help="file to append a `prepared` event to")
    parser.add_argument("--learner", default="", help="learner that the event names")
    parser.add_argument("--rules", default="{}", help="of a URI: JSON of spec.preparation.PrepareRules")
    parser.add_argument("--work", type=Path, help="of a URI: folder for what is not finished")
    parser.add_argument("--dry-run", action="store_true", help="of a URI: only say what would be kept and dropped")
    parser.add_argument("--directory", type=Path, help="file that says where services answer; default: in this process")
    parser.add_argument("--encoder", default="", help="of texts: a service in --directory, else a folder of weights")
    parser.add_argument("--autoencoder", default="", help="of images: likewise")
    parser.add_argument("--by", help="of a URI: let the preparing service of this name in --directory do it")
    parser.add_argument("--lines", action="store_true", help="print JSON lines")
    given = parser.parse_args(arguments)
    if given.lines:
        return print_lines(lambda: _prepare(given, told=print_line))
    try:
        report = _prepare(given, told=_say_progress())
    except GkrError as error:
        _say(f"error: {error}")
        return error.exit_code
    sys.stdout.write(report.digest + "\n")
    return 0


def _prepare(given: argparse.Namespace, *, told: Callable[[PrepareProgress], None]) -> PrepareReport:
    started = time.monotonic()
    if "://" in given.source:
        report = _prepare_encoded(given, told=told)
    else:
        manifest, reused = prepare(
            given.manifest,
            source=given.source,
            shard_samples=given.shard_samples,
            lock_timeout_seconds=given.lock_timeout,
        )
        report = _report(manifest, uri=given.manifest, reused=reused)
    seconds = time.monotonic() - started
    samples = report.train + report.test
    word = "would prepare" if report.dry_run else "reused" if report.reused else "prepared"
    _say(f"{word} {samples} samples in {seconds:.2f} s")
    if given.events:
        _tell(
            given.events,
            learner=given.learner,
            uri=given.manifest,
            samples=samples,
            seconds=seconds,
            reused=report.reused,
        )
    return report


def _prepare_encoded(given: argparse.Namespace, *, told: Callable[[PrepareProgress], None]) -> PrepareReport:
    from services.prepare.encoded import Job, advance, dry_run  # images and their libraries: not for the digits
    from services.prepare.encoders import embedders_of, service_of

    rules = read_rules(given.rules)
    if given.by:
        return service_of(given.by, directory=given.directory, source=given.source, uri=given.manifest, rules=rules)
    job = Job(given.source, given.manifest, rules, work=given.work, lock_timeout_seconds=given.lock_timeout)
    if given.dry_run:
        return dry_run(job, told=told)
    with embedders_of(
        rules, directory=given.directory, encoder=given.encoder, autoencoder=given.autoencoder
    ) as embedders:
        return advance(job, embedders=embedders, told=told)


def _report(manifest: Manifest, *, uri: str, reused: bool) -> PrepareReport:
    shards = [*manifest.splits.train, *manifest.splits.test]
    train, test = manifest.count("train"), manifest.count("test")
    return PrepareReport(
        source=manifest.source, manifest=uri, digest=manifest.digest, recipe=manifest.recipe, done=True, reused=reused,
        found=train + test, train=train, test=test, bytes=sum(shard.bytes for shard in shards),
    )  # fmt: skip


def _say_progress() -> Callable[[PrepareProgress], None]:
    """Once in a while."""
    last = time.monotonic()

    def told(progress: PrepareProgress) -> None:
        nonlocal last
        if time.monotonic() - last < _SAY_SECONDS:
            return
        last = time.monotonic()
        _say(f"file {progress.files} of {progress.files_total}: {progress.kept} kept, {progress.dropped} dropped")

    return told


def prepare(uri: str, *, source: str, shard_samples: int, lock_timeout_seconds: float) -> tuple[Manifest, bool]:
    """The dataset at `uri`, and whether it was there already."""
    if source not in SOURCES:
        raise ConfigError(f"unknown source {source!r}", hint=f"sources are: {', '.join(SOURCES)}; or a URI")
    if shard_samples < 1:
        raise ConfigError(f"--shard-samples is {shard_samples}", hint="a shard holds at least 1 sample; 256 is usual")
    made = SOURCES[source]
    content = Content(made.NAME, source, f"{made.RECIPE}; {shard_samples} per shard", made.SHAPE, made.LABELS)
    if file_path(uri) is None:
        return _prepare_objects(uri, content=content, shard_samples=shard_samples)
    folder = path_of(uri).parent
    with exclusive(folder, timeout_seconds=lock_timeout_seconds):
        found = find(uri, content=content)
        if found is not None:
            return found, True
        return write(uri, packed=_pack(content, shard_samples=shard_samples, place=str(folder))), False


def _prepare_objects(uri: str, *, content: Content, shard_samples: int) -> tuple[Manifest, bool]:
    found = objects.find(uri, content=content)
    if found is not None:
        return found, True
    packed = _pack(content, shard_samples=shard_samples, place=split_uri(uri)[0])
    return objects.write(uri, content=content, packed=packed)


def _pack(content: Content, *, shard_samples: int, place: str) -> Packed:
    _say(f"reading {content.source}")
    samples = SOURCES[content.source].load()
    _say(f"writing {len(samples.train)} training and {len(samples.test)} held-out samples to {place}")
    return pack(content, samples=samples, shard_samples=shard_samples)


def _tell(events: str, *, learner: str, uri: str, samples: int, seconds: float, reused: bool) -> None:
    event = Prepared(
        time=time.time(), source=f"prepare/{learner}", learner=learner, manifest=uri, samples=samples,
        seconds=seconds, reused=reused,
    )  # fmt: skip
    descriptor = os.open(events, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, write_event(event).encode())
    finally:
        os.close(descriptor)


def _say(line: str) -> None:
    sys.stderr.write(f"prepare: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
