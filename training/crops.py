"""The crops of a batch of pictures, cut where the model trains: the engine's tables of libvips' resize, as matrices."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kestrel_engine.exact_resize import ONE_BITS, PHASES, AxisPass, passes
from kestrel_engine.types.model_config import VisionConfig


@lru_cache(maxsize=512)
def _matrix(step: AxisPass) -> NDArray[np.float32]:
    """[target, size]: the weight of each pixel in each result."""
    groups = (step.positions // PHASES)[:, None] + np.arange(step.taps)
    first = np.clip(groups, 0, step.groups - 1)[..., None] * step.whole
    read = np.minimum(first + np.arange(step.whole), step.size - 1)
    weights = step.weights[step.positions % PHASES] / (step.whole << ONE_BITS)
    m = np.zeros((step.target, step.size), np.float32)
    np.add.at(m, (np.arange(step.target)[:, None, None], read), weights[..., None])
    return m


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Stretch [..., H, W] whole grey levels to the given size; whole grey levels come out."""
    for step in passes(pixels.shape[-1], pixels.shape[-2], width, height):
        m = torch.from_numpy(_matrix(step)).to(pixels)
        pixels = (m @ pixels if step.vertical else pixels @ m.t()).round_()
        if not step.wide_out:
            pixels = pixels.clamp_(0, 255)
    return pixels


@torch.no_grad()
def spoil(pixels: Tensor) -> Tensor:
    """Pictures [B, H, W, 3] uint8, of which some get blur, tint and noise; half stay as they are."""
    count, levels = len(pixels), torch.float16 if pixels.is_cuda else torch.float32
    x = pixels.permute(0, 3, 1, 2).to(levels)

    def draw(share: float, low: float, high: float, channels: int = 1) -> Tensor:
        chosen = torch.rand(count, 1, 1, 1, device=x.device) < share / 2
        drawn = torch.rand(count, channels, 1, 1, device=x.device) * (high - low) + low
        return (chosen * drawn).to(levels)

    blurred = F.avg_pool2d(
        F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), 3, 1, 1, count_include_pad=False
    )
    x = torch.lerp(x, blurred, draw(0.5, 0.2, 1))
    x = x * (1 + draw(0.3, -0.15, 0.1)) * (1 + draw(0.5, -0.08, 0.08, 3))
    x = x + torch.randn_like(x) * draw(0.4, 0, 14)
    return x.round_().clamp_(0, 255).byte().permute(0, 2, 3, 1)


@torch.no_grad()
def crops(pixels: Tensor, tiling: tuple[int, int], vision: VisionConfig) -> Tensor:
    """Pictures [B, H, W, 3] uint8 -> distinct crops [B, n, side, side, 3] uint8: the overview, then tiles by rows."""
    levels = torch.float16 if pixels.is_cuda else torch.float32  # both hold whole grey levels
    whole = pixels.permute(0, 3, 1, 2).to(levels)
    side, window, (rows, columns) = vision.crop_size, vision.crop_window, tiling
    found = [resize(whole, side, side)]
    if tiling != (1, 1):
        stretched = resize(whole, window * (rows - 1) + side, window * (columns - 1) + side)
        tiles = stretched.unfold(2, side, window).unfold(3, side, window)
        found += tiles.permute(2, 3, 0, 1, 4, 5).flatten(0, 1).unbind()
    return torch.stack(found, 1).byte().permute(0, 1, 3, 4, 2).contiguous()
