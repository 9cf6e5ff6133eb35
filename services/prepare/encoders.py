"""Whom a preparation asks: replicas that a directory file names, or an encoder of its own in this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from services.client import LocalClient, ServiceClient
from services.prepare.embed import Embedder
from services.prepare.encoded import GROUP
from services.prepare.service import prepare_by
from services.registry import CLASSES, load_class
from services.service import ServiceContext
from services.wire.messages import PrepareArgs
from spec.errors import ConfigError
from spec.preparation import PrepareReport, PrepareRules


@contextmanager
def encoder_of(rules: PrepareRules, *, directory: Path | None, service: str) -> Generator[Embedder | None]:
    """The encoder that the rules need; none if they need none."""
    if rules.embed == "none":
        yield None
    elif directory is not None:
        client = ServiceClient(directory, service=service, identity=f"prepare-{os.getpid()}")
        with closing(client), closing(Embedder(client)) as embedder:
            yield embedder
    else:
        with tempfile.TemporaryDirectory(prefix="gkr-encoder-") as scratch:
            context = ServiceContext("encode", "encoder", cache_dir=Path(scratch), manifest="", max_batch=GROUP)
            own = load_class(CLASSES["encode"])(context)
            own.warm_up()
            with closing(Embedder(LocalClient(own))) as embedder:
                yield embedder


def service_of(name: str, *, directory: Path | None, source: str, uri: str, rules: PrepareRules) -> PrepareReport:
    """Let a preparing service make the dataset, and wait for it."""
    if directory is None:
        raise ConfigError(f"--by {name} needs --directory", hint="name the directory file of the run that hosts it")
    args = PrepareArgs(source=source, manifest=uri, rules=rules.model_dump_json())
    with closing(ServiceClient(directory, service=name, identity=f"prepare-{os.getpid()}")) as client:
        return prepare_by(client, args)
