"""Rules for Kubernetes objects: images that cannot change under us, no secret in clear, no public load balancer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from infra.policy.resource import (
    SECRET,
    UNKNOWN,
    Finding,
    Resource,
    Settings,
    finding,
    items,
    look,
    texts,
)

GOOGLES_REGISTRIES = ("us-docker.pkg.dev/gce-ai-infra/", "gke.gcr.io/", "gcr.io/gke-release/")
"""Google publishes its installers under version tags."""
INTERNAL = ("networking.gke.io/load-balancer-type", "cloud.google.com/load-balancer-type")
_PLACEHOLDER = re.compile(r"(?P<name>[\w./:-]+)@sha256:0{64}")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_TAG = re.compile(r":(?P<tag>[\w][\w.-]*)$")
_SECRET_NAME = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY|API_KEY", re.IGNORECASE)


def images_by_digest(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Our own images by digest; others by digest or a fixed version; nothing by `latest` or without a version."""
    if not resource.type.startswith("kubernetes:") or settings.environment == "local":
        return
    for image in sorted({text for one in containers(resource.inputs) for text in texts(look(one, "image"))}):
        if _DIGEST.search(image):
            continue
        tag = _TAG.search(image)
        if tag is None or tag["tag"] == "latest":
            yield finding(
                resource, "image-by-digest", message=f"image {image} names no version: two nodes may run two programs",
                remedy="append @sha256:... of the image that was tested",
            )  # fmt: skip
        elif _is_ours(image, settings):
            yield finding(
                resource, "image-by-digest",
                message=f"image {image} is ours and given by tag, which a later push moves",
                remedy="append @sha256:...; `make image PUSH=` prints it",
            )  # fmt: skip
        else:
            yield finding(
                resource, "image-by-digest", severity="warn",
                message=f"image {image} is given by a version tag, which its owner could move",
                remedy="append its @sha256:... digest",
            )  # fmt: skip


def _is_ours(image: str, settings: Settings) -> bool:
    if settings.registries:
        return image.startswith(settings.registries)
    return "-docker.pkg.dev/" in image and not image.startswith(GOOGLES_REGISTRIES)


def no_placeholder_images(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """The examples name images by a digest of zeros, which a preview may show and nobody can pull."""
    if not resource.type.startswith("kubernetes:"):
        return
    names = [match["name"] for text in _all_texts(resource.inputs) for match in _PLACEHOLDER.finditer(text)]
    for name in dict.fromkeys(names):
        registry, _, last = name.rpartition("/")
        yield finding(
            resource, "placeholder-image", severity="refuse" if settings.applies else "warn", final=True,
            message=f"image {name} has the digest of an example, all zeros: no registry has it, its pods would never"
            " start, and `up` is refused",
            remedy=f"run `make image NAME={last} PUSH={registry or 'REGISTRY'}`, which prints the digest, and write it"
            " into the stack's file",
        )  # fmt: skip


def _all_texts(value: Any) -> Iterator[str]:
    """Every text in an object: an image may also be named in facts, inside a ConfigMap."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in cast("Mapping[str, Any]", value).values():
            yield from _all_texts(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _all_texts(inner)


def containers(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every container in an object, however deep: a RayCluster has pod templates inside lists."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, Any]", value).items():
            if key in ("containers", "initContainers", "ephemeralContainers"):
                yield from (one for one in items(inner) if isinstance(one, Mapping))
            else:
                yield from containers(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from containers(inner)


def no_clear_secrets(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """A secret that the engine shows is one that lies in the state and in every log. Values are never repeated here."""
    if not resource.type.startswith("kubernetes:"):
        return
    if settings.engine and resource.type == "kubernetes:core/v1:Secret":
        for field in ("data", "stringData"):
            values = resource.get(field)
            if not isinstance(values, Mapping):
                continue
            clear = [key for key, value in cast("Mapping[str, Any]", values).items() if _is_clear(value)]
            if clear:
                yield finding(
                    resource, "clear-secrets",
                    message=f"{field} has {', '.join(sorted(clear))} in clear in the state",
                    remedy="pass it as a secret Output, or keep it in Secret Manager and name it only",
                )  # fmt: skip
    for container in containers(resource.inputs):
        for variable in items(container.get("env")):
            name = look(variable, "name")
            if isinstance(name, str) and _SECRET_NAME.search(name) and _is_clear(look(variable, "value")):
                yield finding(
                    resource, "clear-secrets", message=f"environment variable {name} has its value in clear",
                    remedy="take it from a Secret with valueFrom.secretKeyRef",
                )  # fmt: skip


def _is_clear(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", SECRET, UNKNOWN)


def no_public_load_balancer(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Services between regions are internal; nothing of ours answers the internet."""
    del settings
    if resource.type != "kubernetes:core/v1:Service" or resource.get("spec.type") != "LoadBalancer":
        return
    annotations = resource.get("metadata.annotations")
    given: Mapping[str, Any] = cast("Mapping[str, Any]", annotations) if isinstance(annotations, Mapping) else {}
    if not any(str(given.get(key, "")).lower() == "internal" for key in INTERNAL):
        yield finding(
            resource, "public-load-balancer", message="a LoadBalancer without the annotation that makes it internal",
            remedy=f'add the annotation {INTERNAL[0]}: "Internal"',
        )  # fmt: skip
