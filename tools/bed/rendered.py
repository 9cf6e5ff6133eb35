"""Manifests of an operator, rendered by kustomize from the source that its binary was built of.

Rendering and parsing 4 MB of YAML takes seconds, so what came out is kept as JSON beside the binaries, named by the
module's folder, which carries its version.
"""

from __future__ import annotations

import json
import os
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
    source = _source(tool, module)
    kept = cache_folder() / "rendered" / f"{source.name}-{folder.replace('/', '-')}.json"
    if kept.is_file():
        return cast(Objects, json.loads(kept.read_text()))
    done = subprocess.run(
        [str(binary("kubectl")), "kustomize", str(source / folder)],
        capture_output=True, text=True, check=False, timeout=KUSTOMIZE_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise GkrError(f"kustomize cannot render {source.name}/{folder}: {done.stderr.strip()[-1000:]}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    objects = cast(Objects, list(yaml.load_all(done.stdout, Loader=loader)))
    _keep(kept, json.dumps(objects, separators=(",", ":")))
    return objects


def _source(tool: str, module: str) -> Path:
    """Where the module's source lies; asking Go takes half a second and needs Go, so the answer is kept too."""
    note = cache_folder() / "rendered" / f"{binary_folder(tool)}.source"
    if note.is_file() and (known := Path(note.read_text())).is_dir():
        return known
    source = module_folder(tool, module)
    _keep(note, str(source))
    return source


def binary_folder(tool: str) -> str:
    """Name of the folder of a tool's binary: it changes with every pin."""
    names = {"kuberay": "kuberay-operator", "kueue": "kueue"}
    return binary(names[tool]).parent.name


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def only(objects: Objects, *, kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name; another number means that upstream changed its manifests."""
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    if len(found) != 1:
        raise GkrError(f"expected one {kind} {name} in the rendered manifests, found {len(found)}")
    return found[0]
