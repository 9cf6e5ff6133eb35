"""Any text encoder of transformers whose folder is on disk: T5, CLIP's text half, BERT and their relatives.

Every text is padded to the same length and the mask is always passed, so what a text is encoded with changes nothing
beyond `TOLERANCE`: without a mask T5 mixes padding into the text (diffusers issue 12075, ReProver issue 34).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.model_folder import folder_digest
from services.pretrained import Tokenizer, load_config, load_weights

Floats = NDArray[np.float32]

TOLERANCE = 1e-5
"""Largest difference of a component between two batches, relative to the largest component, in float32."""
MOST_TOKENS = 256
"""Of models without positions of their own, such as T5, unless their tokenizer says less."""


class TextEncoder:
    """Captions to float32 embeddings on one device. On a GPU it computes in the type its weights are stored in."""

    def __init__(self, folder: Path, *, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        whole = load_config(folder)
        config: Any = getattr(whole, "text_config", whole)  # CLIP's has the pictures' half beside it
        dtype = "float32" if device == "cpu" else "auto"
        self._model = load_weights("AutoModelForTextEncoding", folder, config=config, dtype=dtype).to(self._device)
        self._tokenizer = Tokenizer(folder, most=getattr(config, "max_position_embeddings", None) or MOST_TOKENS)
        self.width: int = config.hidden_size
        used = str(next(self._model.parameters()).dtype)
        settings = f"{type(self._model).__name__} {used} limit={self._tokenizer.limit} pooled=eos-or-mean"
        self.fingerprint = hashlib.sha256(f"{folder_digest(folder)} {settings}".encode()).hexdigest()

    def embed(self, captions: Sequence[str]) -> Floats:
        """[captions, width]: CLIP's own pooling (the state of the text's end), for others the mean over tokens."""
        return self.encode(captions)[0]

    def encode(self, captions: Sequence[str]) -> tuple[Floats, Floats, NDArray[np.uint8]]:
        """Embeddings [captions, width], states of all tokens [captions, limit, width] with 0 behind a text's end, and
        the mask [captions, limit]."""
        torch = self._torch
        ids, mask = self._tokenizer(captions)
        with torch.inference_mode():
            keep = torch.from_numpy(mask).to(self._device)
            output = self._model(input_ids=torch.from_numpy(ids).to(self._device), attention_mask=keep)
            states = output.last_hidden_state.float() * keep[:, :, None]
            pooled = output.pooler_output.float() if self._pools else states.sum(1) / keep.sum(1, keepdim=True)
            return pooled.cpu().numpy(), states.cpu().numpy(), mask.astype(np.uint8)

    @property
    def _pools(self) -> bool:
        """BERT's pooler is not what its embeddings are taken from; CLIP's is."""
        return self._model.config.model_type == "clip_text_model"
