"""Tiny models of transformers and diffusers with random weights, in folders as their libraries write them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

WORDS = [
    "seven", "zero", "one", "three", "a", "an", "bold", "thin", "that", "leans", "to", "the", "right", "left", "and",
    "nearly", "touches", "edge", "digit",
]  # fmt: skip


def save_t5(folder: Path, *, seed: int = 0) -> Path:
    """A whole T5, decoder included, of which the encoding service takes the encoder."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(WORDS) + 3, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3,
        initializer_factor=3.0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    _tokenizer(limit=48).save_pretrained(folder)
    return folder


def save_clip(folder: Path, *, seed: int = 0) -> Path:
    """A CLIP with both halves, for pictures of 16 pixels."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    end, size = len(WORDS) + 1, {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    text = {
        **size, "num_attention_heads": 3, "vocab_size": len(WORDS) + 3, "max_position_embeddings": 20,
        "eos_token_id": end, "bos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {**size, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, initializer_factor=4.0)
    CLIPModel(config).save_pretrained(folder)
    _tokenizer(limit=20).save_pretrained(folder)
    return folder


def save_autoencoder(folder: Path, *, seed: int = 0) -> Path:
    """A variational autoencoder of diffusers that halves pictures twice."""
    import torch

    library: Any = importlib.import_module("diffusers")
    torch.manual_seed(seed)
    model = library.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16), norm_num_groups=4, latent_channels=4, scaling_factor=0.36, shift_factor=0.11,
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder


def _tokenizer(*, limit: int) -> Any:
    """Words at white space; a text ends with `</s>`, as in both families."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", *WORDS, "</s>", "<unk>"]
    core = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", names.index("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=limit
    )
