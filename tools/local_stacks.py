"""What stacks/Pulumi.local.*.yaml leave open because it differs between machines: sizes, images, folders of charts.

Kueue comes from its chart inside its Go module, KubeRay from the manifests inside its own, rendered into a folder: the
same sources that the bed installs by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.engine.targets import load
from spec.errors import ConfigError
from spec.stack_platform import PlatformStack
from tools.bed import bucket, facts, images, kuberay, kueue
from tools.bed.addons import bucket_keys
from tools.bed.holder import holder
from tools.bed.layout import MOST_REGIONS, Bed, beds
from tools.bed.lifecycle import remembered
from tools.bed.run import kubectl
from tools.binaries import cache_folder, module_folder

FACTS = ("get", "configmap", facts.NAME, "-n", facts.NAMESPACE, "--ignore-not-found", "-o", "name")
SYSTEM_CPU, SYSTEM_GIB = 0.5, 2.0
"""Left to the bed's own pods."""
SMALLEST_CPU, SMALLEST_GIB = 0.5, 1.0


@dataclass(frozen=True)
class Settings:
    """Values of the configuration by path, and environment of the program."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Secret to its keys and values."""


def bed_of(region: str) -> Bed | None:
    """The bed that stands for a region, if it is up for stacks."""
    return _up(region) if remembered().for_stacks else None


def refuse_other_use(region: str, *, published: bool) -> None:
    """ConfigError where the bed of a region has operators and queues of its own, which a stack would collide with; and
    where it has not what the stack's state says that it `published`, so that nothing would be made again.
    """
    bed = bed_of(region)
    if bed is None and _up(region) is not None:
        raise ConfigError(
            f"the cluster that stands for {region} was brought up for experiments: it has its own operators and queues",
            hint="make cluster-down, then make cluster REGIONS=2 FOR=stacks",
        )
    if bed is not None and published and not kubectl(bed, *FACTS):
        raise ConfigError(
            f"the cluster that stands for {region} lacks the facts that its platform stack published: it is a new "
            "cluster, or the stack was taken down half way",
            hint=f"make down STACK=local.{region} CLOUD=double, then make up again",
        )


def _up(region: str) -> Bed | None:
    return next((one for one in beds(MOST_REGIONS) if one.region == region and holder(one) is not None), None)


def region() -> Settings:
    """Of a region stack: what the one real node offers to experiments."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = max(SMALLEST_CPU, (os.cpu_count() or 1) - SYSTEM_CPU)
    memory = max(SMALLEST_GIB, gib - SYSTEM_GIB)
    return Settings(values={"cpu_pool.cpu": cores, "cpu_pool.memory": f"{int(memory)}Gi"})


def platform(name: str) -> Settings:
    """Of the platform stack of a region: images that were built here, folders that pods see, sources of the operators,
    and the keys of the bucket of its bed, if that is up.
    """
    bed = bed_of(name)
    built = _images()
    mounts = [
        {"name": f"host-{index}", "host_path": str(path), "mount_path": str(path)}
        for index, path in enumerate(images.mounts())
    ]
    values = {
        "kueue.image": built["kueue"],
        "kuberay.image": built["kuberay"],
        "site.image": built["hostroot"],
        "site.mounts": mounts,
        "site.cpu_request_share": facts.CPU_REQUEST_SHARE,
    }
    stack = load(f"local.{name}.platform").value
    if isinstance(stack, PlatformStack) and stack.shared is not None:
        values["shared.image"] = built["hostroot"]
    keys = {bucket.SECRET: bucket_keys(bed)} if bed else {}
    return Settings(values=values, environment=_sources(built["kuberay"]), secrets=keys)


def charts() -> Settings:
    """Of a platform stack of any environment: only the operators: the modules' charts name no released image."""
    built = _images()
    values = {
        "kueue.chart.source": "$GKR_KUEUE_CHART",
        "kueue.image": built["kueue"],
        "kuberay.chart.source": "$GKR_KUBERAY_CHART",
    }
    return Settings(values=values, environment=_sources(built["kuberay"]))


def _images() -> dict[str, str]:
    return {recipe.name: recipe.reference for recipe in images.all_recipes()}


def _sources(kuberay_image: str) -> dict[str, str]:
    return {
        "GKR_KUEUE_CHART": str(module_folder("kueue", kueue.MODULE) / "charts" / "kueue"),
        "GKR_KUBERAY_CHART": str(kuberay_manifests(kuberay_image)),
    }


def kuberay_manifests(image: str) -> Path:
    """A folder with KubeRay's manifests, as the bed would apply them."""
    objects = [one for one in kuberay.objects(image) if one["kind"] != "Namespace"]
    folder = cache_folder() / "charts" / "kuberay"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    path = folder / "all.json"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        fresh = folder / "all.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    return folder
