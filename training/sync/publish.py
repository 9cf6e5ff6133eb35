"""The published model: averaged EMA weights as safetensors that anybody can load, named by their digest."""

from __future__ import annotations

from pathlib import Path

from training.sync.layout import Floats, Layout
from training.sync.tensors import Point, Written, no_point, write_tensors


def write_model(
    flat: Floats, *, layout: Layout, config: str, version: int, experiment: str, folder: Path, point: Point = no_point
) -> Written:
    """Write one tensor per parameter and buffer; `config` is the model's configuration as JSON."""
    tensors = {}
    for name, shape in layout.tensors:
        start = layout.offset(name)
        size = 1
        for side in shape:
            size *= side
        tensors[name] = flat[start : start + size].reshape(shape)
    return write_tensors(
        tensors,
        metadata={"config": config, "version": str(version), "experiment": experiment},
        temporary=folder / f"model-{version:08d}.tmp",
        name=lambda sha256: folder / f"{sha256}.safetensors",
        label="model",
        point=point,
    )
