"""Runs the processes that prepare and inspect datasets, and shows how far they are.

They are modules of `services`, which gkr starts and never imports; they print records of `spec.preparation` as lines.
Interrupting gkr ends them too: what was prepared until then is kept, and the same command goes on from there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TextIO

from pydantic import TypeAdapter, ValidationError

from gkr.output import say
from gkr.watch.text import percent, short_count
from spec.errors import ConfigError, GkrError
from spec.preparation import Inspection, Line, PrepareError, PrepareProgress, PrepareReport, PrepareRules
from spec.sync_keys import ENVIRONMENT

SERVICES_FILE = "services-"
"""Start of the name of a learner's directory file in the state folder of its run."""
_LINE: TypeAdapter[Line] = TypeAdapter(Line)
_SAY_SECONDS = 10.0
_END_SECONDS = 30.0
_NEEDED = ("PIL", "pyarrow", "zmq")

Told = Callable[[PrepareProgress], None]


def run_module(
    module: str, arguments: Sequence[str], *, stream: TextIO, environment: Mapping[str, str] | None = None
) -> PrepareReport | Inspection:
    """Run one of them to its end, its progress on `stream`; the result, or its error as if it were ours."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"preparing and inspecting datasets needs {', '.join(missing)}, which is not installed here",
            hint="install the extra that brings it: pip install 'gkr[services]'",
        )
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout is not None
    try:
        with _showing(stream) as told:
            last = _read(process.stdout, told=told)
        code = process.wait(timeout=_END_SECONDS)
    finally:
        _end(process)
    if isinstance(last, PrepareError):
        error = GkrError(last.message, hint=last.hint, where=last.where)
        error.exit_code = last.exit_code
        raise error
    if last is None or code:
        raise GkrError(f"{module} ended with code {code} and no result", hint="its messages are above")
    return last


def keys_beside(directory: Path | None) -> dict[str, str]:
    """What a process needs to be heard by the replicas of a run on this machine, whose driver wrote this file and whose
    supervisor keeps the keys of each learner in a folder beside it; none where the run has none."""
    if directory is None:
        return {}
    learner = directory.stem.removeprefix(SERVICES_FILE)
    folder = directory.absolute().parent / "keys" / learner
    return {ENVIRONMENT: f"{folder}"} if learner != directory.stem and folder.is_dir() else {}


def directory_file(given: Path | None) -> Path | None:
    """The directory file of a run's services as it was given; ConfigError if it is none, because a client would wait
    for it to be written.
    """
    if given is None or given.is_file():
        return given
    hint = f"a run that lives has it as state/{SERVICES_FILE}<learner>.json"
    raise ConfigError(f"there is no file {given}", where="--services", hint=hint)


def checked_rules(given: Mapping[str, object]) -> str:
    """What was chosen of `PrepareRules`, as the preparing process takes it; ConfigError names the option."""
    rules = json.dumps({key: value for key, value in given.items() if value is not None})
    try:
        PrepareRules.model_validate_json(rules, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"{first['loc'][0]}"
        reason = "expected WIDTHxHEIGHT, such as 512x512" if name == "latents" else first["msg"]
        raise ConfigError(
            f"{given[name]} is refused: {reason.removeprefix('Value error, ')}",
            where=f"--{name.replace('_', '-')}",
            hint="`gkr data prepare --help` says what it means",
        ) from None
    return rules


def uri_of(text: str) -> str:
    """A URI as it is; a path as a `file:` URI."""
    return text if "://" in text else Path(text).expanduser().absolute().as_uri()


def manifest_uri(text: str) -> str:
    """Of a dataset that is named by its folder or its manifest."""
    uri = uri_of(text)
    return uri if uri.endswith(".json") else f"{uri.rstrip('/')}/manifest.json"


def _read(stream: IO[str], *, told: Told) -> PrepareReport | PrepareError | Inspection | None:
    last: PrepareReport | PrepareError | Inspection | None = None
    for line in stream:
        try:
            record = _LINE.validate_json(line)
        except ValidationError:
            say(line.rstrip())
            continue
        if isinstance(record, PrepareProgress):
            told(record)
        else:
            last = record
    return last


def _showing(stream: TextIO) -> AbstractContextManager[Told]:
    if stream.isatty():
        return _Live(stream)
    last = time.monotonic()

    def told(progress: PrepareProgress) -> None:
        nonlocal last
        if time.monotonic() - last >= _SAY_SECONDS:
            last = time.monotonic()
            say(_words(progress))

    return nullcontext(told)


class _Live:
    """A bar on a terminal, which is gone at the end."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(file=stream), transient=True)
        self._task = self._progress.add_task("reading the list of files", total=None)

    def __enter__(self) -> Told:
        self._progress.start()
        return self._told

    def __exit__(self, *ignored: object) -> None:
        self._progress.stop()

    def _told(self, progress: PrepareProgress) -> None:
        words = _words(progress)
        self._progress.update(self._task, total=progress.files_total, completed=progress.files, description=words)


def _words(one: PrepareProgress) -> str:
    share = percent(one.files, one.files_total)
    return f"{share} of the files: {short_count(one.kept)} kept, {short_count(one.dropped)} dropped"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_END_SECONDS)
