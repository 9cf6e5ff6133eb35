"""How well images show what their captions say, by a CLIP model whose weights are on disk (arXiv 2104.08718).

Images are prepared as CLIP's authors do: the shorter side is resized to the model's size (bicubic, antialiased), the
middle is cut out. Texts are padded to the model's limit and masked, images go through one at a time in float32, so a
cosine does not depend on what is scored beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from services.pretrained import Tokenizer, load_config, load_weights

_MEAN, _DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of the pixels of CLIP's training images, where the folder has no preprocessor_config.json."""


class ClipScorer:
    """Cosines of images and captions."""

    def __init__(self, folder: Path) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = load_config(folder)
        self._model = load_weights("CLIPModel", folder, config=config).float().to(self._device)
        self._tokenizer = Tokenizer(folder, most=config.text_config.max_position_embeddings)
        self._side: int = config.vision_config.image_size
        settings = folder / "preprocessor_config.json"
        found: dict[str, Any] = json.loads(settings.read_text()) if settings.is_file() else {}
        self._mean = np.array(found.get("image_mean", _MEAN), dtype=np.float32)
        self._deviation = np.array(found.get("image_std", _DEVIATION), dtype=np.float32)

    def cosines(self, images: NDArray[np.uint8], *, captions: Sequence[str]) -> NDArray[np.float32]:
        """[images] float32 in [-1, 1], for images [images, height, width, 1 or 3]."""
        torch = self._torch
        found: list[float] = []
        with torch.inference_mode():
            for image, caption in zip(images, captions, strict=True):
                pixels = torch.from_numpy(self._prepared(image)[None]).to(self._device)
                ids, mask = self._tokenizer([caption])
                output = self._model(
                    input_ids=torch.from_numpy(ids).to(self._device),
                    attention_mask=torch.from_numpy(mask).to(self._device),
                    pixel_values=pixels,
                )
                found.append(float((output.text_embeds * output.image_embeds).sum()))  # both have length 1
        return np.array(found, dtype=np.float32).clip(-1.0, 1.0)

    def _prepared(self, image: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[3, side, side]."""
        side = self._side
        colours = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
        picture = Image.fromarray(colours)
        scale = side / min(picture.size)
        size = (max(side, round(picture.width * scale)), max(side, round(picture.height * scale)))
        left, top = (size[0] - side) // 2, (size[1] - side) // 2
        cut = picture.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
        values = (np.asarray(cut, dtype=np.float32) / 255.0 - self._mean) / self._deviation
        return np.ascontiguousarray(values.transpose(2, 0, 1))
