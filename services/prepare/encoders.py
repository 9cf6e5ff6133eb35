"""Whom a preparation asks: replicas that a directory file names, or an encoder of its own in this process."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from services.client import Asks, LocalClient, ServiceClient
from services.directory import DirectoryWatch
from services.prepare.embed import CaptionEmbedder, Embedder, LatentEmbedder
from services.prepare.encoded import GROUP
from services.prepare.service import prepare_by
from services.registry import CLASSES, load_class
from services.service import ServiceContext
from services.wire.messages import PrepareArgs
from spec.errors import ConfigError
from spec.preparation import PrepareReport, PrepareRules


@contextmanager
def embedders_of(
    rules: PrepareRules, *, directory: Path | None, encoder: str = "", autoencoder: str = ""
) -> Generator[list[Embedder]]:
    """What the rules need. The names are those of services in the directory, else folders or URIs of weights."""
    with ExitStack() as stack:
        found: list[Embedder] = []
        if rules.embed == "captions":
            found.append(CaptionEmbedder(stack.enter_context(_asking(encoder or "encoder", encoder, directory))))
        if rules.latent_size is not None:
            if not autoencoder:
                raise ConfigError(
                    "latents need an autoencoder",
                    hint="name the folder of its weights, or with a directory file the service that has it: "
                    "--autoencoder WHAT",
                )
            width, height = rules.latent_size
            client = stack.enter_context(_asking(autoencoder, autoencoder, directory))
            found.append(LatentEmbedder(client, width=width, height=height))
        yield found


@contextmanager
def _asking(service: str, model: str, directory: Path | None) -> Generator[Asks]:
    if directory is not None:
        with closing(_ask(directory, service)) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="gkr-encoder-") as scratch:
        own = load_class(CLASSES["encode"])(
            ServiceContext("encode", service, Path(scratch), manifest="", max_batch=GROUP, model=model)
        )
        own.warm_up()
        yield LocalClient(own)


def service_of(name: str, *, directory: Path | None, source: str, uri: str, rules: PrepareRules) -> PrepareReport:
    """Let a preparing service make the dataset, and wait for it."""
    if directory is None:
        raise ConfigError(f"--by {name} needs --directory", hint="name the directory file of the run that hosts it")
    args = PrepareArgs(source=source, manifest=uri, rules=rules.model_dump_json())
    with closing(_ask(directory, name)) as client:
        return prepare_by(client, args)


def _ask(directory: Path, service: str) -> ServiceClient:
    """A client of a service that the directory names: for another one it would wait until it gave up."""
    watch = DirectoryWatch(directory)
    watch.refresh()
    names = {one.service for one in watch.current.replicas} if watch.current else set[str]()
    if service not in names:
        raise ConfigError(
            f"no replica of {service} answers; there are {', '.join(sorted(names)) or 'none'}",
            where=str(directory),
            hint="see `gkr services` for what the run has, and what is still starting",
        )
    return ServiceClient(directory, service=service, identity=_identity(service))


def _identity(service: str) -> str:
    """Of this process as a client: pods of one service may have equal process numbers."""
    return f"prepare-{socket.gethostname()}-{os.getpid()}-{service}"
