"""Builds, tests and pushes one image: `make image NAME=trainer [PUSH=registry/path] [BASE=reference]`.

Takes docker where its engine answers, else buildah. Builds from what git tracks, tags with the git description and with
the digest of the content, runs the image's own test in it without a network, prints size and digest, and pushes only
what passed. BASE stands for the pinned base; `BASE=local` makes one from Debian's archive. Results go to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from spec.errors import EXIT_INTERRUPTED, ConfigError, GkrError, NotFoundError, UnreachableError
from tools import image_base, image_commands, image_context
from tools.image_commands import LOCAL_PREFIX, Build, Engine
from tools.streaming import Ended, stream

ROOT = Path(__file__).resolve().parent.parent
BUILD_DEADLINE_SECONDS = 2 * 3600.0
SMOKE_DEADLINE_SECONDS = 1800.0
PUSH_DEADLINE_SECONDS = 3600.0
ASK_DEADLINE_SECONDS = 20.0
_NO_REGISTRY = ("initializing source", "failed to resolve source metadata", "pinging container registry", "short-name")
_NO_LOGIN = ("unauthorized", "denied", "authentication required", "no basic auth")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one call gives: printed, or as JSON with `-o json`."""

    name: str
    engine: Engine
    reference: str
    id: str
    digest: str
    size_bytes: int
    content: str
    """Digest of all that decided the image."""
    tags: tuple[str, ...]
    build_seconds: float
    smoke_seconds: float
    pushed: str = ""
    """Reference by digest: what an experiment's `image` and a cluster's default may say."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        _image(options)
    except GkrError as error:
        sys.stderr.write(f"image: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.image", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(image_context.image_names(ROOT))}")
    parser.add_argument("--push", default="", metavar="REGISTRY/PATH", help="push it there as NAME; prints its digest")
    parser.add_argument("--base", default="", metavar="REFERENCE", help="instead of the pinned base; `local` makes one")
    parser.add_argument("--engine", choices=("docker", "buildah"), help="default: docker if its engine answers")
    parser.add_argument("--pins", choices=("exact", "minimum"), help="default: exact, with --base minimum")
    parser.add_argument("--apt-sources", type=Path, metavar="FILE", help="apt sources instead of the base's")
    parser.add_argument("--no-smoke-test", action="store_true", help="only build; refused together with --push")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return parser


def _image(options: argparse.Namespace) -> None:
    name: str = options.name
    if name not in image_context.image_names(ROOT):
        known = ", ".join(image_context.image_names(ROOT))
        raise NotFoundError(f"there is no image {name!r}", hint=f"NAME is one of {known}", where="cluster_images")
    if options.push and options.no_smoke_test:
        raise ConfigError("--push with --no-smoke-test would push what nobody has run", hint="leave one of them away")
    description = image_commands.tag_of(image_context.git(ROOT, "describe", "--tags", "--always", "--dirty").strip())
    target = image_commands.push_target(options.push, name=name, tag=description) if options.push else ""
    engine: Engine = options.engine or choose_engine()
    with tempfile.TemporaryDirectory(prefix="gkr-image-") as folder:
        build = _prepare(options, engine=engine, description=description, folder=Path(folder))
        if options.dry_run:
            _print_commands(build, engine=engine, target=target, folder=Path(folder))
            return
        result = _build_and_test(build, engine=engine, folder=Path(folder), smoke_test=not options.no_smoke_test)
        if target:
            result = replace(result, pushed=_push(result, target=target, folder=Path(folder)))
    _print(result, output=options.output)


def choose_engine() -> Engine:
    """docker if its engine answers, else buildah, else ConfigError with how to get one."""
    if shutil.which("docker") is not None:
        with suppress(subprocess.TimeoutExpired):
            asked = ["docker", "version", "--format", "{{.Server.Version}}"]
            if subprocess.run(asked, capture_output=True, check=False, timeout=ASK_DEADLINE_SECONDS).returncode == 0:
                return "docker"
    if shutil.which("buildah") is not None:
        return "buildah"
    raise ConfigError(
        "neither a docker engine answers nor is buildah on PATH, so no image can be built",
        hint="start docker, or: apt-get install buildah",
    )


def _prepare(options: argparse.Namespace, *, engine: Engine, description: str, folder: Path) -> Build:
    """Context, secrets and arguments of the build, in files under `folder`."""
    name, base = cast("str", options.name), cast("str", options.base)
    sources = ""
    if options.apt_sources:
        if not options.apt_sources.is_file():
            raise ConfigError("no such file", where=str(options.apt_sources))
        sources = options.apt_sources.read_text()
    if base == "local":
        sources = sources or image_base.host_sources()
        base = image_base.REFERENCE if options.dry_run else image_base.local_base(engine=engine, say=_say)
    build_args = {"BASE": base} if base else {}
    if (options.pins or ("minimum" if base else "exact")) == "minimum":
        build_args["PINS"] = "minimum"
    files = image_context.sources(ROOT, name=name)
    content = image_context.digest(files, build_args=build_args)
    context, secrets = folder / "context", folder / "secrets"
    secrets.mkdir(mode=0o700)
    image_context.write_context(files, folder=context)
    cache = image_context.uv_cache(os.environ) if engine == "buildah" else None
    given = image_context.write_secrets(os.environ, folder=secrets, with_uv_cache=cache is not None)
    if sources:
        given["apt_sources"] = secrets / "apt_sources"
        given["apt_sources"].touch(mode=0o600)
        given["apt_sources"].write_text(sources)
    return Build(
        name=name,
        context=context,
        tags=(f"{LOCAL_PREFIX}/{name}:{description}", f"{LOCAL_PREFIX}/{name}:content-{content[:16]}"),
        build_args=build_args,
        secrets=given,
        labels={"org.opencontainers.image.revision": description, "gkr.content": content},
        uv_cache=cache,
    )


def _build_and_test(build: Build, *, engine: Engine, folder: Path, smoke_test: bool) -> Result:
    started = time.monotonic()
    _say(f"building {build.tags[0]} with {engine}")
    command = image_commands.build_command(build, engine=engine, id_file=folder / "id")
    _check_build(stream(command, deadline_seconds=BUILD_DEADLINE_SECONDS), build=build)
    built = time.monotonic()
    if smoke_test:
        _smoke(build.tags[0], engine=engine)
    tested = time.monotonic()
    inspection = image_commands.inspect_command(build.tags[0], engine=engine)
    found = image_commands.read_inspection(_ask(inspection), engine=engine)
    return Result(
        name=build.name,
        engine=engine,
        reference=build.tags[0],
        id=found.id,
        digest=found.digest,
        size_bytes=found.size_bytes,
        content=build.labels["gkr.content"],
        tags=build.tags,
        build_seconds=round(built - started, 1),
        smoke_seconds=round(tested - built, 1),
    )


def _check_build(ended: Ended, *, build: Build) -> None:
    if ended.code == 0:
        return
    if any(sign in ended.tail for sign in _NO_REGISTRY):
        base = build.build_args.get("BASE", "the pinned base")
        raise UnreachableError(
            f"the registry of {base} did not answer, or has no such image",
            hint="BASE=local makes a base from Debian's archive; BASE=REFERENCE takes a copy in your own registry",
            where=f"cluster_images/{build.name}/Dockerfile",
        )
    raise GkrError(
        f"the build failed (exit {ended.code}); the last lines:\n{ended.tail}",
        hint="fix what it names and call it again: finished layers are kept",
        where=f"cluster_images/{build.name}/Dockerfile",
    )


def _smoke(reference: str, *, engine: Engine) -> None:
    container = f"gkr-smoke-{os.getpid()}"
    commands, clean = image_commands.smoke_commands(reference, engine=engine, container=container)
    _say(f"running the image's smoke test in {reference}")
    try:
        for command in commands:
            ended = stream(command, deadline_seconds=SMOKE_DEADLINE_SECONDS)
            if ended.code:
                raise GkrError(
                    f"the smoke test of {reference} failed (exit {ended.code}):\n{ended.tail}",
                    hint=f"the image stays: look into it with {engine} run; nothing was pushed",
                )
    finally:
        subprocess.run(clean, capture_output=True, check=False, timeout=ASK_DEADLINE_SECONDS * 6)


def _push(result: Result, *, target: str, folder: Path) -> str:
    digest_file = folder / "digest"
    _say(f"pushing {target}")
    for command in image_commands.push_commands(
        result.reference, target, engine=result.engine, digest_file=digest_file
    ):
        ended = stream(command, deadline_seconds=PUSH_DEADLINE_SECONDS)
        if ended.code:
            host = target.split("/", 1)[0]
            refused = any(sign in ended.tail.lower() for sign in _NO_LOGIN)
            raise UnreachableError(
                f"{host} {'refused the login' if refused else 'did not take the image'}:\n{ended.tail}",
                hint=f"{result.engine} login {host} (Artifact Registry: gcloud auth configure-docker {host})"
                if refused
                else "check the address and the repository's name, then call it again: what was pushed is kept",
            )
    if result.engine == "buildah":
        digest = digest_file.read_text().strip()
    else:
        digest = image_commands.pushed_digest(
            _ask(image_commands.inspect_command(target, engine="docker")), target=target
        )
    return f"{target.rpartition(':')[0]}@{digest}"


def _ask(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_DEADLINE_SECONDS * 3)
    if done.returncode:
        raise GkrError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _print_commands(build: Build, *, engine: Engine, target: str, folder: Path) -> None:
    commands = [image_commands.build_command(build, engine=engine, id_file=folder / "id")]
    smoke, clean = image_commands.smoke_commands(build.tags[0], engine=engine, container="gkr-smoke")
    commands += [*smoke, clean]
    if target:
        commands += image_commands.push_commands(build.tags[0], target, engine=engine, digest_file=folder / "digest")
    for command in commands:
        sys.stdout.write(shlex.join(command) + "\n")


def _print(result: Result, *, output: str) -> None:
    if output == "json":
        sys.stdout.write(json.dumps(asdict(result), indent=1) + "\n")
        return
    _say(f"{result.name}: {result.size_bytes / 1e9:.2f} GB, built in {result.build_seconds:.0f} s, "
         f"tested in {result.smoke_seconds:.0f} s")  # fmt: skip
    for tag in result.tags:
        _say(f"  {tag}")
    digest = f"@{result.digest}" if result.digest else ""
    sys.stdout.write((result.pushed or f"{result.reference.rpartition(':')[0]}{digest or '@' + result.id}") + "\n")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
