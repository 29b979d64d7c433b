"""Converts a batch's arrays to crops: draws, degrades, compresses and tiles images, all on one device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel_grpc.scenes.render import paint_background, paint_shape, render
from training.images.jpeg import Stages, jpeg_round_trip
from training.images.resize import crops, normalise, resize
from training.learning.batches import Batch, Spoiling

CHUNK_PIXELS = 24_000_000  # images are drawn in chunks of about this many pixels


def gaussian_blur(pixels: Tensor, sigma: float) -> Tensor:
    """Separable blur of [B, 3, H, W], edges repeated."""
    reach = max(1, math.ceil(2.5 * sigma))
    taps = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=pixels.device) / sigma) ** 2)
    taps = (taps / taps.sum()).view(1, 1, 1, -1).to(pixels.dtype)
    b, c, h, w = pixels.shape
    x = F.pad(pixels.view(b * c, 1, h, w), (reach, reach, reach, reach), mode="replicate")
    return F.conv2d(F.conv2d(x, taps), taps.transpose(2, 3)).view(b, c, h, w)


class ImageMaker:
    """Makes the normalised crops [B, n, 3, 252, 252] of a batch; on a GPU compiled and in float16."""

    def __init__(self, compiled: bool, chunk_pixels: int = CHUNK_PIXELS) -> None:
        def maybe(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return torch.compile(function, dynamic=True) if compiled else function

        self._paint, self._ground = maybe(paint_shape), maybe(paint_background)
        if compiled:
            # One compilation must serve all image sizes, equal sides or not.
            torch.fx.experimental._config.use_duck_shape = False
        self._stages = Stages.compiled() if compiled else Stages()
        self._dtype = torch.float16 if compiled else torch.float32
        self._chunk = chunk_pixels

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        view, factor = batch.view, batch.spoiling.factor
        largest = view.width * view.height * max(1.0, factor * factor)
        images = len(batch.ids)
        chunks = min(images, math.ceil(images * largest / self._chunk))
        parts = []
        for chunk in range(chunks):
            rows = slice(chunk * images // chunks, (chunk + 1) * images // chunks)
            pixels = self._draw(batch, rows)
            pixels = self._spoil(pixels, batch.spoiling, rows)
            parts.append(normalise(crops(pixels, view)))
        return torch.cat(parts)

    def _draw(self, batch: Batch, rows: slice) -> Tensor:
        """Whole grey levels [b, 3, H, W], drawn at ``factor`` times the size and rescaled."""
        view, factor = batch.view, batch.spoiling.factor
        shapes, lines, background = (
            part[rows].clone() for part in (batch.shapes, batch.lines, batch.background)
        )
        width, height = view.width, view.height
        if factor != 1.0:
            width, height = round(view.width * factor), round(view.height * factor)
            fx, fy = width / view.width, height / view.height
            f = math.sqrt(fx * fy)
            for column, scale in ((0, fx), (1, fy), (2, f), (13, f), (14, f)):
                shapes[:, :, column] *= scale
            lines[:, :, :5] *= f
            background[:, 9:11] /= f
        pixels = render(
            shapes, lines, background, width, height, self._paint, self._ground, self._dtype
        ).round_()
        return pixels if factor == 1.0 else resize(pixels, view.height, view.width)

    def _spoil(self, pixels: Tensor, spoiling: Spoiling, rows: slice) -> Tensor:
        """Blur, noise and JPEG, for the images that get them."""
        which = spoiling.blurred[rows].nonzero().flatten()
        if len(which):
            on_device = which.to(pixels.device)
            pixels[on_device] = gaussian_blur(pixels[on_device], spoiling.blur)
        noise = spoiling.noise[rows].to(pixels).view(-1, 1, 1, 1)
        pixels = torch.addcmul(pixels, torch.randn_like(pixels), noise).round_().clamp_(0, 255)
        quality = spoiling.quality[rows].to(pixels.device)
        packed = jpeg_round_trip(pixels, quality.clamp_min(50), spoiling.subsample, self._stages)
        return torch.where((quality > 0).view(-1, 1, 1, 1), packed, pixels)
