"""Published weights: one safetensors file named by the sha256 of its bytes, with the model's configuration in its
metadata.

Promises: a file under its final name is whole and durable; a file whose bytes do not match its name is never used. No
pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from spec.errors import DataError, NotFoundError
from spec.train import AnyModelConfig
from training.models.families import make_network
from training.models.network import Network

SUFFIX = ".safetensors"
_CONFIG_KEY = "config"
_CONFIG: TypeAdapter[AnyModelConfig] = TypeAdapter(AnyModelConfig)


def save_model(
    folder: Path, *, state: Mapping[str, Tensor], config: AnyModelConfig, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write whole float32 weights below `folder` and return the file, whose stem is the digest of its bytes."""
    tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in state.items()}
    data = safetensors.torch.save(tensors, metadata={**(metadata or {}), _CONFIG_KEY: config.model_dump_json()})
    path = folder / f"{hashlib.sha256(data).hexdigest()}{SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".partial-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return path


def load_model(path: Path, *, device: torch.device | str = "cpu") -> tuple[Network, dict[str, str]]:
    """The model of a published file, in evaluation mode, and the file's metadata; DataError if anything is off."""
    data = _verified_bytes(path)
    try:
        tensors = safetensors.torch.load(data)
    except SafetensorError as error:
        raise _damaged(path, f"not a safetensors file ({error})") from error
    size = int.from_bytes(data[:8], "little")
    metadata = cast("dict[str, str]", json.loads(data[8 : 8 + size]).get("__metadata__", {}))
    try:
        config = _CONFIG.validate_json(metadata.get(_CONFIG_KEY, ""), extra="ignore")
    except ValidationError as error:
        raise _damaged(path, "its metadata holds no readable model configuration") from error
    with torch.device("meta"):
        model = make_network(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise _damaged(
            path, f"tensor {wrong[0]!r} is {found.get(wrong[0])}, the configuration needs {expected.get(wrong[0])}"
        )
    model.to_empty(device=device)
    model.reset_buffers()
    model.load_state_dict(tensors)
    return model.eval(), metadata


def _verified_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(
            "no such model file", where=str(path), hint="it may have been superseded; ask for the newest"
        ) from error
    named = path.name.removesuffix(SUFFIX)
    digest = hashlib.sha256(data).hexdigest()
    if re.fullmatch(r"[0-9a-f]{64}", named) and digest != named:
        raise _damaged(path, f"its bytes have the digest {digest[:12]}.., not the one it is named by")
    return data


def _damaged(path: Path, what: str) -> DataError:
    return DataError(
        f"damaged model file: {what}", where=str(path), hint="delete it and fetch it again from where it was published"
    )
