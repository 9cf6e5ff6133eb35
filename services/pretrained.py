"""Models of transformers from a folder of this machine: nothing is downloaded, no code of the folder is run, and no
weight is made up.

Importing transformers takes seconds, so it happens when a model is loaded, not when this module is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from spec.errors import ConfigError

_FAILURES = (OSError, ValueError, KeyError, ImportError, SafetensorError)
"""What transformers raises for a folder that it cannot load."""
_SHOWN = 3


def load_config(folder: Path) -> Any:
    """The configuration that lies in the folder."""
    library = _transformers()
    try:
        return library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _FAILURES as error:
        raise _unreadable(folder, "configuration", error) from error


def load_weights(kind: str, folder: Path, *, config: Any, dtype: str = "float32") -> Any:
    """A model of class `kind` in evaluation mode; `dtype` auto keeps what is stored.

    ConfigError if it cannot be loaded, or if the folder lacks a weight: transformers would draw it at random.
    """
    library = _transformers()
    try:
        model, found = getattr(library, kind).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (*_FAILURES, RuntimeError) as error:  # RuntimeError: tensors of other shapes
        raise _unreadable(folder, "weights", error) from error
    missing = sorted(found["missing_keys"])
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (" ..." if len(missing) > _SHOWN else "")
        raise ConfigError(
            f"{len(missing)} weights of the model are not in its folder, and would be random: {shown}",
            where=str(folder),
            hint="copy the whole model; config.json and *.safetensors must be of the same one",
        )
    return model.eval().requires_grad_(requires_grad=False)


class Tokenizer:
    """The folder's tokenizer. Every text is cut or padded to `limit` tokens, whatever it is tokenized with."""

    def __init__(self, folder: Path, *, most: int) -> None:
        """`most`: what the model has positions for, or a bound where it has none; the tokenizer may say less."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        library = _transformers()
        try:
            if not (folder / "tokenizer.json").is_file():
                raise ValueError("it has no tokenizer.json")  # transformers would make an empty one
            found = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if found.pad_token is None:
                raise ValueError("it has no padding token")
        except _FAILURES as error:
            raise _unreadable(folder, "tokenizer (tokenizer.json and tokenizer_config.json)", error) from error
        self._tokenizer = found
        self.limit = min(found.model_max_length, most)  # one without a limit of its own says 10^30

    def __call__(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and mask (1 where there is a token), both [texts, limit]."""
        found = self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.limit, return_tensors="np"
        )
        return found["input_ids"].astype(np.int64), found["attention_mask"].astype(np.int64)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "this service has a `model`, and the library that reads it is not installed (transformers)",
            hint="install the extra `encoder`: pip install 'gkr[encoder]'",
        ) from error
    return transformers


def _unreadable(folder: Path, what: str, error: Exception) -> ConfigError:
    text = str(error).strip().split("\n")[0]
    return ConfigError(
        f"the model's {what} cannot be loaded: {text}",
        where=str(folder),
        hint="the folder must be as save_pretrained of model and tokenizer wrote it, with a tokenizer.json",
    )
