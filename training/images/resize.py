"""libvips' resize as matrices, and the crops for the model.

libvips first shrinks by a whole factor (box), then reduces with Lanczos 3, or enlarges with Catmull-Rom bicubic;
vertically before horizontally, rounding to whole grey levels after every pass.  Its enlarging step moves both axes
by half a source pixel, so an image that shrinks along one axis and grows along the other is shifted along both.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.scenes.tiling import View

Matrix = NDArray[np.float32]
_GAP = 2.0  # libvips' default: the least reduction that is left to the kernel


def _lanczos3(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


def _scatter(
    taps: NDArray[np.int64], weights: NDArray[np.float64], source: int
) -> NDArray[np.float64]:
    """Dense rows [out, source] from taps and weights [out, k]; taps beyond the edge count for the edge."""
    m = np.zeros((taps.shape[0], source))
    rows = np.broadcast_to(np.arange(taps.shape[0])[:, None], taps.shape)
    np.add.at(m, (rows, np.clip(taps, 0, source - 1)), weights)
    return m


def _box(source: int, factor: int) -> NDArray[np.float64]:
    """Averages of ``factor`` neighbours; the last one repeats the edge, as libvips' rounding up does."""
    target = math.ceil(source / factor)
    taps = np.arange(target)[:, None] * factor + np.arange(factor)
    return _scatter(taps, np.full(taps.shape, 1 / factor), source)


def _reduce(source: int, target: int, factor: float) -> NDArray[np.float64]:
    """Lanczos 3 stretched by the reduction ``factor``, edges repeated, weights normalised."""
    points = 2 * math.ceil(3 * factor) + 2
    centre = (np.arange(target)[:, None] + 0.5) * factor - 0.5
    taps = np.floor(centre).astype(np.int64) - points // 2 + 1 + np.arange(points)
    weights = _lanczos3((taps - centre) / factor)
    return _scatter(taps, weights / weights.sum(1, keepdims=True), source)


def _enlarge(source: int, target: int) -> NDArray[np.float64]:
    """Catmull-Rom bicubic, edges repeated; libvips samples half a source pixel up and to the left."""
    at = np.arange(target)[:, None] * (source / target) - 0.5
    base = np.floor(at)
    f = at - base
    weights = np.concatenate(
        (
            -0.5 * f + f * f - 0.5 * f**3,
            1 - 2.5 * f * f + 1.5 * f**3,
            0.5 * f + 2 * f * f - 1.5 * f**3,
            -0.5 * f * f + 0.5 * f**3,
        ),
        axis=1,
    )
    return _scatter(base.astype(np.int64) + np.arange(-1, 3), weights, source)


@lru_cache(maxsize=512)
def shrink_passes(source: int, target: int) -> tuple[Matrix, ...]:
    """The matrices [out, in] that libvips applies in turn to shrink one axis; none if it does not shrink."""
    if target >= source:
        return ()
    found: list[Matrix] = []
    factor = source / target
    whole = max(1, math.floor(factor / _GAP))
    if whole > 1:
        found.append(_box(source, whole).astype(np.float32))
        source = found[0].shape[0]
    if source != target:
        found.append(_reduce(source, target, factor / whole).astype(np.float32))
    return tuple(found)


@lru_cache(maxsize=512)
def enlarge_pass(source: int, target: int) -> Matrix:
    """The matrix [out, in] of the enlarging step; also for an axis that keeps its size beside one that grows."""
    return _enlarge(source, target).astype(np.float32)


def _down(m: Matrix, pixels: Tensor) -> Tensor:
    return torch.matmul(torch.from_numpy(m).to(pixels), pixels)


def _across(m: Matrix, pixels: Tensor) -> Tensor:
    return torch.matmul(pixels, torch.from_numpy(m).to(pixels).t())


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Stretch [..., H, W] whole grey levels to the given size; whole grey levels come out."""
    out = pixels
    grows = height > pixels.shape[-2] or width > pixels.shape[-1]
    for m in shrink_passes(pixels.shape[-2], height):
        out = _down(m, out).round_().clamp_(0, 255)
    for m in shrink_passes(pixels.shape[-1], width):
        out = _across(m, out).round_().clamp_(0, 255)
    if grows:
        out = _down(enlarge_pass(out.shape[-2], height), out)
        out = _across(enlarge_pass(out.shape[-1], width), out).round_().clamp_(0, 255)
    return out


def crops(pixels: Tensor, view: View) -> Tensor:
    """Whole grey levels [B, 3, H, W] -> [B, n, 3, crop, crop]: the global crop, then tiles row by row.

    With one tile only the global crop is given: the local one would equal it.
    """
    side, window = view.geometry.crop, view.geometry.window
    found = [resize(pixels, side, side)]
    if view.crops > 1:
        stretched = resize(pixels, view.tiled_height, view.tiled_width)
        found += [
            stretched[..., i * window : i * window + side, j * window : j * window + side]
            for i in range(view.rows)
            for j in range(view.columns)
        ]
    return torch.stack(found, 1)


def normalise(pixels: Tensor) -> Tensor:
    """Grey levels to -1..1."""
    return (pixels / 255 - 0.5) / 0.5
