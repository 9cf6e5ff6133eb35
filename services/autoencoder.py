"""Any autoencoder of diffusers whose folder is on disk: images to the latents that a model is trained on.

diffusers is asked for only when a service is given such a folder; nothing else here needs it, and no role installs it.
Images go through one at a time in the type that is computed in, so batch mates change nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from services.model_folder import folder_digest
from spec.errors import ConfigError, RefusedError

_KINDS = ("Autoencoder", "AsymmetricAutoencoder")
"""How classes are called whose `encode` gives latents; no other name in a folder is looked up."""


class Autoencoder:
    """Images to latents on one device, in float32."""

    def __init__(self, folder: Path, *, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._model = _loaded(folder).float().to(self._device)
        config: Any = self._model.config
        self.reduction: int = 2 ** (len(config.block_out_channels) - 1)
        """Pixels of an image per value of a latent, along one side."""
        self._scale = float(config.get("scaling_factor") or 1.0)
        self._shift = float(config.get("shift_factor") or 0.0)
        settings = f"{type(self._model).__name__} float32 mean scale={self._scale!r} shift={self._shift!r}"
        self.fingerprint = hashlib.sha256(f"{folder_digest(folder)} {settings}".encode()).hexdigest()

    def latents(self, images: NDArray[np.uint8] | None) -> NDArray[np.float32]:
        """[images, channels, height / reduction, width / reduction] of images [images, height, width, 3]: the mean of
        the posterior, never a draw from it. RefusedError if the images do not fit."""
        pixels = self._checked(images)
        torch = self._torch
        found: list[NDArray[np.float32]] = []
        with torch.inference_mode():
            for image in pixels:
                values = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))[None]).to(self._device)
                encoded = self._model.encode(values.float() / 127.5 - 1.0)
                # Variational ones give a distribution, deep-compression ones the latent itself.
                mean = encoded.latent_dist.mean if hasattr(encoded, "latent_dist") else encoded.latent
                found.append(((mean - self._shift) * self._scale).float().cpu().numpy())
        return np.concatenate(found)

    def _checked(self, images: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        fits = (
            images is not None
            and images.dtype == np.uint8
            and images.ndim == 4
            and images.shape[3] == 3
            and images.size > 0
            and not (images.shape[1] % self.reduction or images.shape[2] % self.reduction)
        )
        if images is None or not fits:
            got = "none" if images is None else f"{images.dtype} {list(images.shape)}"
            raise RefusedError(
                f"the autoencoder needs images uint8 [images, height, width, 3], the call carries {got}",
                hint=f"resize or cut them: both sides must be multiples of {self.reduction}",
            )
        return images


def _loaded(folder: Path) -> Any:
    try:
        library: Any = importlib.import_module("diffusers")
    except ImportError as error:
        raise ConfigError(
            "this service's `model` is an autoencoder of diffusers, and diffusers is not installed",
            where=str(folder),
            hint="add diffusers to the image or environment in which the service runs; nothing else needs it",
        ) from error
    name = str(json.loads((folder / "config.json").read_text()).get("_class_name"))
    kind: Any = getattr(library, name, None) if name.startswith(_KINDS) else None
    if kind is None:
        raise ConfigError(
            f"the model is a {name}: the installed diffusers has no autoencoder of that name",
            where=str(folder),
            hint="name the folder of an autoencoder, such as `vae` of a pipeline; or install a newer diffusers",
        )
    try:
        model, found = kind.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"the autoencoder cannot be loaded: {str(error).strip().splitlines()[0]}",
            where=str(folder),
            hint="the folder must be as save_pretrained of a diffusers autoencoder wrote it",
        ) from error
    if found["missing_keys"]:
        raise ConfigError(
            f"weights of the autoencoder are not in its folder, and would be random: {found['missing_keys'][:3]}",
            where=str(folder),
            hint="copy the whole folder, unchanged",
        )
    return model.eval().requires_grad_(requires_grad=False)
