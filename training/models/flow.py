"""Rectified flow matching: the objective and the sampler.

The path is a straight line from noise (time 0) to the image (time 1): x_t = (1 - t) noise + t image. The model predicts
its velocity, image - noise (arXiv 2209.03003). Whatever is random comes in as an argument, so that the caller decides
what the randomness is keyed by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from training.models.dit import Velocity


def loss(model: Velocity, *, images: Tensor, noise: Tensor, time: Tensor, condition: Tensor, drop: Tensor) -> Tensor:
    """Mean squared error of the velocity per sample, [B] float32; images and noise [B, C, S, S] float32, time [B] in
    [0, 1].
    """
    share = time[:, None, None, None]
    velocity = model((1 - share) * noise + share * images, time, condition, drop)
    return (velocity.float() - (images - noise)).square().mean(dim=(1, 2, 3))


@torch.no_grad()
def sample(
    model: Velocity,
    *,
    noise: Tensor,
    condition: Tensor,
    steps: int,
    guidance: float,
    sampler: str = "euler",
    guided_times: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Images [B, C, S, S] by steps of one of `SAMPLERS` along the flow; not clamped to the pixel range.

    Guidance w follows v_null + w (v_condition - v_null), both in one batch of 2 B, at times from the first to the
    second of `guided_times` (arXiv 2404.07724); outside, and everywhere for w = 1, the conditional half is enough.
    """
    images, size = noise, noise.shape[0]
    both = torch.cat([condition, condition])
    drop = torch.arange(2 * size, device=noise.device) >= size

    def velocity(images: Tensor, time: float) -> Tensor:
        guided = guidance != 1.0 and guided_times[0] <= time <= guided_times[1]
        rows = 2 * size if guided else size
        times = torch.full((rows,), time, device=noise.device)
        found = model(torch.cat([images, images]) if guided else images, times, both[:rows], drop[:rows]).float()
        if not guided:
            return found
        told, untold = found.split(size)
        return untold + guidance * (told - untold)

    step = SAMPLERS[sampler]
    for number in range(steps):
        images = step(velocity, images, number / steps, 1 / steps)
    return images


Field = Callable[[Tensor, float], Tensor]
"""Images and a time to their velocity there."""


def _euler(field: Field, images: Tensor, time: float, length: float) -> Tensor:
    return images + length * field(images, time)


def _midpoint(field: Field, images: Tensor, time: float, length: float) -> Tensor:
    half = images + length / 2 * field(images, time)
    return images + length * field(half, time + length / 2)


def _heun(field: Field, images: Tensor, time: float, length: float) -> Tensor:
    first = field(images, time)
    return images + length / 2 * (first + field(images + length * first, time + length))


SAMPLERS: dict[str, Callable[[Field, Tensor, float, float], Tensor]] = {
    "euler": _euler,
    "midpoint": _midpoint,
    "heun": _heun,
}
"""Euler asks the model once a step, with an error of the order of a step; the others twice, with that of its square."""
