"""`python -m services.prepare --source sklearn-digits --manifest file:///path/manifest.json`

Makes the dataset, in a folder or in a bucket, unless it is there, and prints its digest. Progress goes to stderr. Safe
to start any number of times at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from services.prepare import digits, objects
from services.prepare.packing import Content, Packed, pack
from services.prepare.store import exclusive, find, write
from spec.errors import ConfigError, GkrError
from spec.events import Prepared, write_event
from spec.shards import Manifest, path_of
from storage import file_path, split_uri

SOURCES = ("sklearn-digits",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, prepare, print; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m services.prepare", description="Make a dataset unless it is there."
    )
    parser.add_argument("--source", required=True, help=f"what to make it from: {', '.join(SOURCES)}")
    parser.add_argument("--manifest", required=True, help="URI of the manifest; shards go beside it")
    parser.add_argument("--shard-samples", type=int, default=256, help="samples per shard (default 256)")
    parser.add_argument("--lock-timeout", type=float, default=120, help="seconds to wait for another preparer")
    parser.add_argument("--events", help="file to append a `prepared` event to")
    parser.add_argument("--learner", default="", help="learner that the event names")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        manifest, reused = prepare(
            given.manifest,
            source=given.source,
            shard_samples=given.shard_samples,
            lock_timeout_seconds=given.lock_timeout,
        )
    except GkrError as error:
        _say(f"error: {error}")
        return error.exit_code
    seconds = time.monotonic() - started
    samples = manifest.count("train") + manifest.count("test")
    _say(f"{'reused' if reused else 'prepared'} {samples} samples in {seconds:.2f} s")
    if given.events:
        _tell(given.events, learner=given.learner, uri=given.manifest, samples=samples, seconds=seconds, reused=reused)
    sys.stdout.write(manifest.digest + "\n")
    return 0


def prepare(uri: str, *, source: str, shard_samples: int, lock_timeout_seconds: float) -> tuple[Manifest, bool]:
    """The dataset at `uri`, and whether it was there already."""
    if source not in SOURCES:
        raise ConfigError(f"unknown source {source!r}", hint=f"sources are: {', '.join(SOURCES)}")
    if shard_samples < 1:
        raise ConfigError(f"--shard-samples is {shard_samples}", hint="a shard holds at least 1 sample; 256 is usual")
    content = Content("digits", source, f"{digits.RECIPE}; {shard_samples} per shard", digits.SHAPE, digits.LABELS)
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
    samples = digits.load()
    _say(f"writing {len(samples.train)} training and {len(samples.test)} held-out samples to {place}")
    return pack(content, train=samples.train, test=samples.test, shard_samples=shard_samples)


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
