"""Manifests of an operator, rendered by kustomize from the source that its binary was built of.

Rendering and parsing 4 MB of YAML takes seconds, so what came out is kept as JSON in the cache, named by the digest
of the tool's pins.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, cast

import yaml

from spec.errors import GkrError
from tools.binaries import binary, cache_folder, module_folder

KUSTOMIZE_SECONDS = 120.0

Objects = list[dict[str, Any]]


def render(tool: str, *, module: str, folder: str) -> Objects:
    """All objects of `folder` inside a module that a tool pins, as upstream wrote them."""
    kept = cache_folder() / "rendered" / f"{binary(_BINARIES[tool]).parent.name}-{folder.replace('/', '-')}.json"
    if kept.is_file():
        return cast(Objects, json.loads(kept.read_text()))
    source = module_folder(tool, module) / folder
    if not source.is_absolute() or not source.is_dir():
        raise GkrError(f"{folder} of {module} is not in Go's module cache", hint=f"run: make tools TOOLS={tool}")
    done = subprocess.run(
        [str(binary("kubectl")), "kustomize", str(source)],
        capture_output=True, text=True, check=False, timeout=KUSTOMIZE_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise GkrError(f"kustomize cannot render {folder} of {module}: {done.stderr.strip()[-1000:]}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    objects = cast(Objects, list(yaml.load_all(done.stdout, Loader=loader)))
    _keep(kept, json.dumps(objects, separators=(",", ":")))
    return objects


_BINARIES = {"kuberay": "kuberay-operator", "kueue": "kueue", "kwok": "kwok"}
"""Tool -> a binary of it, whose folder is named by everything that the tool's module pins."""


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


def only(objects: Objects, *, kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name; another number means that upstream changed its manifests."""
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    if len(found) != 1:
        raise GkrError(f"expected one {kind} {name} in the rendered manifests, found {len(found)}")
    return found[0]
