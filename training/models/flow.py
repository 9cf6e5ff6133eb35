"""Rectified flow matching: the objective and the sampler.

The path is a straight line from noise (time 0) to the image (time 1): x_t = (1 - t) noise + t image. The model predicts
its velocity, image - noise (arXiv 2209.03003). Whatever is random comes in as an argument, so that the caller decides
what the randomness is keyed by.
"""

from __future__ import annotations

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
def sample(model: Velocity, *, noise: Tensor, condition: Tensor, steps: int, guidance: float) -> Tensor:
    """Images [B, C, S, S] by Euler steps along the flow; not clamped to the pixel range.

    Guidance w follows v_null + w (v_condition - v_null), both in one batch of 2 B; w = 1 needs the conditional half
    alone.
    """
    images, size = noise, noise.shape[0]
    guided = guidance != 1.0
    drop = torch.arange(2 * size if guided else size, device=noise.device) >= size
    conditions = torch.cat([condition, condition]) if guided else condition
    for step in range(steps):
        time = torch.full((drop.shape[0],), step / steps, device=noise.device)
        velocity = model(torch.cat([images, images]) if guided else images, time, conditions, drop).float()
        if guided:
            told, untold = velocity.split(size)
            velocity = untold + guidance * (told - untold)
        images = images + velocity / steps
    return images
