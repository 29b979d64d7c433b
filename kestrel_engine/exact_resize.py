"""The resize of libvips 8.18 for 8-bit RGB as integer arithmetic: the pixels that each result reads, and their weights.

A resize has at most four passes. Each pass works along one axis: shrink the rows, shrink the columns, and, if either
axis grows, interpolate the columns and then the rows. A pass computes each result as a weighted sum of ``taps``
neighbours. Positions are in units of 1/64 pixel and weights in units of 1/4096, as in libvips, so the integer sum
equals libvips' bytes. This module computes tables only: it touches no pixels and no device.

To shrink, a pass first averages groups of ``whole`` pixels and then applies a Lanczos 3 filter. To interpolate, it
applies a Catmull-Rom filter. libvips 8.19 computes different bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

PHASES = 64
"""Number of filter positions between two neighbouring pixels."""

ONE_BITS = 12
"""Fraction bits of a weight: ``1 << ONE_BITS`` stands for 1."""

STRIP_ROWS = 16
"""Rows that are resized at once. libvips' writer uses the same number (FATSTRIP). libvips accumulates the Lanczos
positions in float64 from the first row of each strip, so another strip height may round some positions differently."""

TABLES_KEPT = 512
"""Size of the cache of weight tables, in pairs of (size, target). One entry takes at most 7 kB."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisPass:
    """One pass along the rows or the columns.

    Result i is the sum over j < taps of ``weights[p, j]`` times the mean with index ``(positions[i] >> 6) + j``, where
    p is ``positions[i] & 63``. Indices outside the axis are clamped to its first or last mean. The pass then adds
    ``1 << 11`` to the sum and drops ONE_BITS bits.

    ``size`` and ``target`` are the pixels along the axis before and after the pass. ``positions``: [target] int32.
    ``weights``: [64, taps] int32. ``whole``: the number of pixels in a mean, which is
    ``(sum + whole // 2) * (2**24 // whole) >> 24``; the last group is padded with the last pixel. ``wide_in`` and
    ``wide_out``: the input or output has 16 signed bits instead of 8 unsigned ones; an 8-bit output is clipped.
    """

    vertical: bool
    size: int
    target: int
    positions: np.ndarray
    weights: np.ndarray
    whole: int = 1
    wide_in: bool = False
    wide_out: bool = False

    @property
    def taps(self) -> int:
        return int(self.weights.shape[1])

    @property
    def groups(self) -> int:
        """Number of means along the axis."""
        return -(-self.size // self.whole)

    def reads(self, first: int, last: int) -> tuple[int, int]:
        """Returns the range of the axis before the pass that results ``first`` to ``last`` (exclusive) read."""
        means = self.positions[first:last] >> 6
        top = min(max(int(means.min()), 0), self.groups - 1)
        bottom = min(max(int(means.max()) + self.taps, 1), self.groups)
        return top * self.whole, min(bottom * self.whole, self.size)


def passes(width: int, height: int, to_width: int, to_height: int) -> tuple[AxisPass, ...]:
    """Returns the passes from ``width`` x ``height`` pixels to ``to_width`` x ``to_height`` in order, at least one."""
    found = []
    if to_height < height:
        found.append(_shrink(height, to_height, vertical=True))
    if to_width < width:
        found.append(_shrink(width, to_width, vertical=False))
    if to_height > height or to_width > width:
        # libvips interpolates both axes, even an axis that was shrunk or keeps its length: it shifts by half a pixel.
        found.append(_interpolate(min(width, to_width), to_width, vertical=False))
        found.append(_interpolate(min(height, to_height), to_height, vertical=True))
    return tuple(found) or (_copy(height),)


def is_exact(width: int, height: int, to_width: int, to_height: int) -> bool:
    """Returns whether ``passes`` gives libvips' bytes.

    It does not if the rows shrink while the columns grow and the exact position of a row may lie halfway between two
    phases. In that case libvips computes overlapping strips, each with different rounding errors.
    """
    return not (
        to_height < height
        and to_width > width
        and _has_ties(height, to_height, _whole(height, to_height))
    )


def pixels_read(
    steps: tuple[AxisPass, ...], rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the rows and columns of the image from which ``steps``, the result of ``passes``, compute these ``rows``
    and ``columns`` of their result. All ranges exclude their ends."""
    for step in reversed(steps):
        if step.vertical:
            rows = step.reads(*rows)
        else:
            columns = step.reads(*columns)
    return rows, columns


def _whole(size: int, target: int) -> int:
    return max(1, size // (2 * target))


def _has_ties(size: int, target: int, whole: int) -> bool:
    """Returns whether a position may lie halfway between two phases; libvips' rounding errors decide those."""
    scaled = size * PHASES
    return target * whole % (scaled & -scaled) == 0


@lru_cache(TABLES_KEPT)
def _shrink(size: int, target: int, *, vertical: bool) -> AxisPass:
    whole = _whole(size, target)
    shrink = 1.0 / (target / size) / whole
    taps = 2 * int(np.rint(3 * shrink)) + 1
    strip = STRIP_ROWS if vertical else target
    positions = _shrunk_positions(size, target, whole, strip) - taps // 2 * PHASES
    weights = _lanczos(taps, shrink)
    return AxisPass(vertical, size, target, positions.astype(np.int32), weights, whole)


@lru_cache(TABLES_KEPT)
def _interpolate(size: int, target: int, *, vertical: bool) -> AxisPass:
    positions = (np.arange(target) * size * 2 * PHASES // target + 1 - 3 * PHASES) >> 1
    return AxisPass(
        vertical,
        size,
        target,
        positions.astype(np.int32),
        _catmull_rom(),
        wide_in=vertical,
        wide_out=not vertical,
    )


def _copy(height: int) -> AxisPass:
    """Returns a pass that copies its input."""
    positions = np.arange(height, dtype=np.int32) * PHASES
    return AxisPass(
        True, height, height, positions, np.full((PHASES, 1), 1 << ONE_BITS, dtype=np.int32)
    )


def _shrunk_positions(size: int, target: int, whole: int, strip: int) -> np.ndarray:
    """Returns [target] int64, counted from half a pixel above the first pixel."""
    if not _has_ties(size, target, whole):
        steps = (2 * np.arange(target) + 1) * (size * PHASES)
        return (steps // (target * whole) + 1) >> 1
    shrink = 1.0 / (target / size)
    offset = (1 + (target * shrink - size) / whole) / 2.0 - 1
    shrink /= whole
    steps = np.full((-(-target // strip), strip), shrink)
    steps[:, 0] = (np.arange(0, target, strip) + 0.5) * shrink - 0.5 - offset
    positions = np.cumsum(steps, 1).ravel()[:target]
    return ((positions * 2 * PHASES).astype(np.int64) + 1) >> 1


def _lanczos(taps: int, shrink: float) -> np.ndarray:
    """Returns [64, taps] int32, truncated towards 0, so the weights of a phase may not add up to 1.

    The operations have libvips' order, because the last bit of a float may decide a weight.
    """
    phases = np.arange(PHASES) / PHASES
    x = (np.arange(taps) - (phases[:, None] + taps / 2.0 - 1)) / shrink
    values = np.where(np.abs(x) <= 3, _sinc(x) * _sinc(x / 3), 0.0)
    totals = np.cumsum(values, axis=1)[
        :, -1:
    ]  # Adds one value after the other, which np.sum does not.
    weights: np.ndarray = (values / totals * (1 << ONE_BITS)).astype(np.int32)
    return weights


def _sinc(x: np.ndarray) -> np.ndarray:
    """Uses the C library's sine, because numpy's may differ in the last bit."""
    angles = (x * math.pi).ravel()
    sines = np.fromiter(map(math.sin, angles.tolist()), np.float64, angles.size)
    return np.divide(sines, angles, out=np.ones_like(sines), where=angles != 0).reshape(x.shape)


@lru_cache(1)
def _catmull_rom() -> np.ndarray:
    """Returns [64, 4] int32, truncated from exact values."""
    t = np.arange(PHASES) / PHASES
    a, d = -0.5 * t * (1 - t) ** 2, -0.5 * t * t * (1 - t)
    weights = np.stack([a, 1 - t - 2 * a + d, t - 2 * d + a, d], 1)
    return np.trunc(weights * (1 << ONE_BITS)).astype(np.int32)
