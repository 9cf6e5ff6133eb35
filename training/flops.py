"""How many floating-point operations the model needs, and which share of the device's peak that is.

Model FLOPs only: recomputed activations are work of the implementation, not of the model, and do not count. A
multiply-add is two FLOPs; normalisation, nonlinearities and sums are left out (under one percent). The backward pass
costs twice the forward pass.
"""

from __future__ import annotations

from spec.train import AnyModelConfig, ModelConfig

_DENSE_BF16_PEAK = {  # FLOP/s without sparsity, from NVIDIA's data sheets, SXM variants
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2_250e12,
}


def forward_flops(config: AnyModelConfig, *, size: tuple[int, int] | None = None) -> int:
    """FLOPs of one forward pass of one sample; `size`: (height, width) of an image that is not the model's square.

    Of a language model with T bytes of context and width W: per block 2 T W^2 (4 + 2 m) + 4 T^2 W, the mask saving
    nothing, and 512 T W for the logits. An image model's formula is below.
    """
    if isinstance(config, ModelConfig):
        return _image_flops(config, *(size or (config.image_size, config.image_size)))
    tokens, width, hidden = config.context, config.width, int(config.width * config.mlp_ratio)
    block = 2 * tokens * width * (4 * width + 2 * hidden) + 4 * tokens**2 * width
    return config.depth * block + 2 * tokens * width * 256


def _image_flops(config: ModelConfig, rows: int, columns: int) -> int:
    """An image model's, of rows x columns pixels. With T tokens of width W, p = channels * patch_size^2 and
    m = mlp_ratio: tokens 4 T W p; per block 2 T W^2 (4 + 2 m) + 4 T^2 W, and 12 W^2 of modulation; once per sample time
    4 W^2, last modulation 4 W^2 and the text embedding 2 (text_width W + W^2).
    """
    tokens = (rows // config.patch_size) * (columns // config.patch_size)
    width, pixels = config.width, config.channels * config.patch_size**2
    hidden = int(width * config.mlp_ratio)
    block = 2 * tokens * width * (4 * width + 2 * hidden) + 4 * tokens**2 * width + 12 * width**2
    once = 8 * width**2
    text = 2 * (config.text_width * width + width**2) if config.conditioning == "text" else 0
    return 4 * tokens * width * pixels + config.depth * block + once + text


def training_flops(config: AnyModelConfig, *, size: tuple[int, int] | None = None) -> int:
    """FLOPs of one sample's forward and backward pass; `size` as for `forward_flops`."""
    return 3 * forward_flops(config, size=size)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a device by the name that its driver reports; none where unknown, as on CPUs."""
    return next((peak for key, peak in _DENSE_BF16_PEAK.items() if key in device_name.upper()), None)


def mfu(flops_per_second: float, *, devices: int, peak: float | None) -> float | None:
    """Share of the devices' summed peak that the model's FLOPs use; none where the peak is unknown."""
    return None if peak is None else flops_per_second / (devices * peak)
