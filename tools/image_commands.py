"""The command lines of docker and buildah, and what they answer: pure functions, so that a test can hold both engines
to the same promises.

An engine is a way to build, run and push; whatever one can do the other does too, or the tool refuses by name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from spec.errors import ConfigError

Engine = Literal["docker", "buildah"]
LOCAL_PREFIX = "localhost/gkr"
CALLER_UV_CACHE = "/var/cache/caller-uv"
SMOKE_TEST = ("python", "/opt/gkr/smoke/smoke_test.py")
_TAG = re.compile(r"[^A-Za-z0-9_.-]")
_LOOPBACK = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?(/|$)")
_TARGET = re.compile(r"^[a-z0-9.\[\]:-]+(/[a-z0-9._-]+)+$")


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build: everything that decides the command line."""

    name: str
    context: Path
    tags: tuple[str, ...]
    """Full local references."""
    build_args: dict[str, str] = field(default_factory=dict[str, str])
    secrets: dict[str, Path] = field(default_factory=dict[str, Path])
    """Identifier of a secret mount -> file. Mounted for single commands, never part of a layer."""
    labels: dict[str, str] = field(default_factory=dict[str, str])
    uv_cache: Path | None = None
    """The caller's package cache; buildah mounts it, docker has no such mount and keeps a cache of its own."""

    @property
    def dockerfile(self) -> Path:
        return self.context / "cluster_images" / self.name / "Dockerfile"


def build_command(build: Build, *, engine: Engine, id_file: Path) -> list[str]:
    """The build. The image's id is written to `id_file`."""
    # buildah: commands get the caller's network, because a package index may be reachable from nowhere else.
    command = {
        "docker": ["docker", "build", "--progress", "plain"],
        "buildah": ["buildah", "build", "--layers", "--network", "host"],
    }[engine]
    command = [*command, "--file", str(build.dockerfile), "--iidfile", str(id_file)]
    for name, value in sorted(build.build_args.items()):
        command += ["--build-arg", f"{name}={value}"]
    for name, path in sorted(build.secrets.items()):
        command += ["--secret", f"id={name},src={path}"]
    for name, value in sorted(build.labels.items()):
        command += ["--label", f"{name}={value}"]
    if build.uv_cache is not None and engine == "buildah":
        command += ["--volume", f"{build.uv_cache}:{CALLER_UV_CACHE}"]
    for tag in build.tags:
        command += ["--tag", tag]
    return [*command, str(build.context)]


def smoke_commands(reference: str, *, engine: Engine, container: str) -> tuple[list[list[str]], list[str]]:
    """Commands that run the image's own test as the image's own user without any network, and the one that cleans up.

    One gibibyte of shared memory: Ray's object store wants more than the engines' default of 64 MB.
    """
    if engine == "docker":
        limits = ["--rm", "--name", container, "--network", "none", "--shm-size", "1g"]
        return [["docker", "run", *limits, reference, *SMOKE_TEST]], ["docker", "rm", "--force", container]
    start = ["buildah", "from", "--quiet", "--name", container, "--pull-never", "--shm-size", "1g", reference]
    return [
        start,
        ["buildah", "run", "--network", "none", container, "--", *SMOKE_TEST],
    ], ["buildah", "rm", container]


def inspect_command(reference: str, *, engine: Engine) -> list[str]:
    """Asks for an image's id, digest and size."""
    if engine == "docker":
        return ["docker", "image", "inspect", reference]
    return ["buildah", "images", "--json", reference]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the engine says about an image."""

    id: str
    digest: str
    """Of the manifest; empty where docker has not pushed it yet: only then it knows one."""
    size_bytes: int


def read_inspection(text: str, *, engine: Engine) -> Found:
    """Reads the answer to `inspect_command`."""
    rows = cast("list[dict[str, Any]]", json.loads(text))
    row = rows[0]
    if engine == "docker":
        digests = cast("list[str]", row.get("RepoDigests") or [])
        digest = digests[0].rpartition("@")[2] if digests else ""
        return Found(id=str(row["Id"]).removeprefix("sha256:"), digest=digest, size_bytes=int(row["Size"]))
    return Found(id=str(row["id"]), digest=str(row.get("digest") or ""), size_bytes=_bytes(str(row["size"])))


def _bytes(text: str) -> int:
    """buildah writes sizes for people: `5.96 GB`."""
    number, _, unit = text.partition(" ")
    powers = {"B": 0, "KB": 1, "MB": 2, "GB": 3, "TB": 4}
    return round(float(number) * 1000 ** powers[unit.upper()])


def push_commands(reference: str, target: str, *, engine: Engine, digest_file: Path) -> list[list[str]]:
    """Push `reference` as `target`. buildah writes the digest to `digest_file`; docker is asked for it afterwards."""
    if engine == "docker":
        return [["docker", "tag", reference, target], ["docker", "push", target]]
    # docker takes a registry on the loopback without TLS; the same registry must do for buildah.
    plain = ["--tls-verify=false"] if _LOOPBACK.match(target) else []
    return [["buildah", "push", *plain, "--digestfile", str(digest_file), reference, f"docker://{target}"]]


def pushed_digest(text: str, *, target: str) -> str:
    """The digest under which docker pushed to `target`, from `docker image inspect`."""
    repository = target.rpartition(":")[0]
    for one in cast("list[str]", json.loads(text)[0].get("RepoDigests") or []):
        name, _, digest = one.partition("@")
        if name == repository:
            return digest
    raise ConfigError(f"docker knows no digest of {repository}", hint="push it again; the registry may have refused it")


def push_target(where: str, *, name: str, tag: str) -> str:
    """`registry/path` -> the reference to push; the form in which `image: NAME` of an experiment is looked up."""
    path = where.rstrip("/")
    if not _TARGET.match(path) or "@" in path:
        raise ConfigError(
            f"PUSH={where!r} is not registry/path in lower case without tag or digest",
            hint="for example PUSH=REGION-docker.pkg.dev/PROJECT/gkr: the image becomes .../gkr/" + name,
        )
    return f"{path}/{name}:{tag}"


def tag_of(description: str) -> str:
    """A git description as a tag: other characters become `-`, at most 128 of them."""
    return _TAG.sub("-", description)[:128].lstrip(".-") or "unknown"
