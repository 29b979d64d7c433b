"""Converts the pictures of a batch to crops on the GPU: degrades, compresses and tiles them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from training.images.jpeg import Stages, jpeg_round_trip
from training.images.resize import crops, normalise
from training.writing import PictureBatch

CHUNK_PIXELS = 24_000_000


def gaussian_blur(pixels: Tensor, sigma: float) -> Tensor:
    """Separable blur of [B, 3, H, W], edges repeated."""
    reach = max(1, math.ceil(2.5 * sigma))
    taps = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=pixels.device) / sigma) ** 2)
    taps = (taps / taps.sum()).view(1, 1, 1, -1).to(pixels.dtype)
    b, c, h, w = pixels.shape
    x = F.pad(pixels.view(b * c, 1, h, w), (reach, reach, reach, reach), mode="replicate")
    return F.conv2d(F.conv2d(x, taps), taps.transpose(2, 3)).view(b, c, h, w)


class PictureMaker:
    """Makes the normalised crops [B, n, 3, crop, crop] of a batch; on a GPU compiled and in float16."""

    def __init__(self, compiled: bool) -> None:
        self._stages = Stages.compiled() if compiled else Stages()
        self._dtype = torch.float16 if compiled else torch.float32

    @torch.no_grad()
    def __call__(self, batch: PictureBatch) -> Tensor:
        count, height, width, _ = batch.pixels.shape
        chunks = min(count, math.ceil(count * height * width / CHUNK_PIXELS))
        parts = []
        for chunk in range(chunks):
            rows = slice(chunk * count // chunks, (chunk + 1) * count // chunks)
            pixels = batch.pixels[rows].permute(0, 3, 1, 2).to(self._dtype).contiguous()
            parts.append(normalise(crops(self._spoil(pixels, batch, rows), batch.view)))
        return torch.cat(parts)

    def _spoil(self, pixels: Tensor, batch: PictureBatch, rows: slice) -> Tensor:
        """Blur, tint, noise and JPEG, for the pictures that get them; the others stay as they are."""
        spoiling = batch.spoiling
        dirty = spoiling.quality[rows].nonzero().flatten()
        if not len(dirty):
            return pixels
        which = spoiling.blurred[rows].nonzero().flatten().to(pixels.device)
        if len(which):
            pixels[which] = gaussian_blur(pixels[which], spoiling.blur)
        dirty_there = dirty.to(pixels.device)
        some = pixels[dirty_there]
        some = some * spoiling.tint[rows][dirty].to(some).view(-1, 3, 1, 1)
        noise = spoiling.noise[rows][dirty].to(some).view(-1, 1, 1, 1)
        some = torch.addcmul(some, torch.randn_like(some), noise).round_().clamp_(0, 255)
        quality = spoiling.quality[rows][dirty].to(pixels.device)
        pixels[dirty_there] = jpeg_round_trip(some, quality, spoiling.subsample, self._stages).to(
            pixels.dtype
        )
        return pixels
