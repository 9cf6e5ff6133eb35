"""How an operator gets into a cluster: from a chart in a registry, or from a folder with a chart or with manifests.

A chart takes our settings as values. Manifests are taken as they are, but for the operator's image, which a test bed
loads by hand; their resource types are declared first and the rest waits for them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import pulumi
import pulumi_kubernetes as kubernetes
import yaml
from pulumi_kubernetes.helm import v4 as helm

from infra.components.k8s.objects import Objects, declare
from infra.facts import expand
from spec.errors import ConfigError
from spec.stack_platform import Chart

OCI = "oci://"
_SUFFIXES = (".yaml", ".yml", ".json")
SourceKind = Literal["registry", "chart", "manifests"]


@dataclass(frozen=True)
class Source:
    """Where an operator is installed from."""

    kind: SourceKind
    place: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator."""

    name: str
    """Of its chart's release."""
    namespace: str
    deployment: str
    """Name of its Deployment."""
    values: Mapping[str, Any]
    """For its chart."""
    image: str = ""
    """Instead of the one that its manifests name."""
    resources: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of its container, where it comes from manifests."""


def source_of(chart: Chart, *, environment: Mapping[str, str]) -> Source:
    """What the configured text means here."""
    place = expand(chart.source, environment=environment)
    if place.startswith(OCI):
        return Source("registry", place, chart.version)
    folder = Path(place)
    if not folder.is_dir():
        raise ConfigError(
            f"{chart.source} is not a folder here ({folder})" if place != chart.source else f"{place} is not a folder",
            hint="name a chart in a registry (oci://...), a folder with Chart.yaml, or one with manifests",
        )
    if (folder / "Chart.yaml").is_file():
        _check_version(folder, chart)
        return Source("chart", place, chart.version)
    if not _files(folder):
        raise ConfigError(f"{folder} has neither Chart.yaml nor manifests", hint="manifests end in .yaml or .json")
    return Source("manifests", place, chart.version)


def _check_version(folder: Path, chart: Chart) -> None:
    told = str(yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8")).get("version", ""))
    if told.removeprefix("v") != chart.version:
        raise ConfigError(
            f"{folder} holds the chart of version {told}, configured is {chart.version}", hint="make both say the same"
        )


def read_manifests(folder: Path) -> Objects:
    """All objects of a folder's files, in the order of the files' names."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents: list[Any] = []
    for path in _files(folder):
        documents += yaml.load_all(path.read_text(encoding="utf-8"), Loader=loader)
    found: list[Any] = [one for document in documents for one in _items(document)]
    wrong = [index for index, one in enumerate(found) if not isinstance(one, dict) or "kind" not in one]
    if wrong:
        raise ConfigError(f"{folder} holds what is no Kubernetes object: {str(found[wrong[0]])[:80]!r}")
    return cast(Objects, found)


def _items(document: Any) -> list[Any]:
    """The objects of one document, which may be a list of them in either form."""
    if isinstance(document, list):
        return [one for inner in cast("list[Any]", document) for one in _items(inner)]
    if isinstance(document, dict) and cast("dict[str, Any]", document).get("kind") == "List":
        return list(cast("dict[str, Any]", document)["items"])
    return [document]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.name != "kustomization.yaml")


def adapted(objects: Sequence[dict[str, Any]], *, operator: Operator) -> Objects:
    """Upstream's objects with our image and sizes; the namespace is ours to declare, so theirs is left out."""
    found: Objects = []
    for one in objects:
        if one["kind"] == "Namespace" and one["metadata"]["name"] == operator.namespace:
            continue
        if one["kind"] == "Deployment" and one["metadata"]["name"] == operator.deployment:
            one = copy.deepcopy(one)
            container = one["spec"]["template"]["spec"]["containers"][0]
            if operator.image:
                container["image"] = operator.image
                container["imagePullPolicy"] = "IfNotPresent"
            if operator.resources:
                container["resources"] = dict(operator.resources)
        found.append(one)
    if not any(one["kind"] == "Deployment" and one["metadata"]["name"] == operator.deployment for one in found):
        raise ConfigError(f"the manifests of {operator.name} hold no Deployment {operator.deployment}")
    return found


def image_values(image: str) -> dict[str, str]:
    """`repository` and `tag` as charts take them; nothing for the chart's own image."""
    if not image:
        return {}
    repository, separator, tag = image.rpartition(":")
    if "@" in image or not separator or "/" in tag:
        raise ConfigError(
            f"operator image {image} is not NAME:TAG, which is all that the operators' charts take",
            hint="give a tag that nobody moves, or put the image into a registry of your own",
        )
    return {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}


def install(
    operator: Operator, *, source: Source, parent: pulumi.Resource, provider: kubernetes.Provider
) -> list[pulumi.Resource]:
    """Namespace and operator; what depends on all of these runs after the operator is ready."""
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": operator.namespace}}
    namespace = declare([space], parent=parent, provider=provider)
    options = pulumi.ResourceOptions(parent=parent, provider=provider, depends_on=namespace)
    if source.kind == "manifests":
        return [*namespace, *_from_manifests(operator, source, parent=parent, provider=provider, before=namespace)]
    chart = helm.Chart(
        operator.name,
        chart=source.place,
        name=operator.name,
        namespace=operator.namespace,
        values=dict(operator.values),
        version=source.version if source.kind == "registry" else None,
        opts=options,
    )
    return [*namespace, chart]


def _from_manifests(
    operator: Operator,
    source: Source,
    *,
    parent: pulumi.Resource,
    provider: kubernetes.Provider,
    before: Sequence[pulumi.Resource],
) -> list[pulumi.Resource]:
    objects = adapted(read_manifests(Path(source.place)), operator=operator)
    types = [one for one in objects if one["kind"] == "CustomResourceDefinition"]
    rest = [one for one in objects if one["kind"] != "CustomResourceDefinition"]
    first = declare(types, parent=parent, provider=provider, depends_on=before)
    return [*first, *declare(rest, parent=parent, provider=provider, depends_on=[*before, *first])]
