"""The resize of libvips 8.18 for 8-bit RGB as integer arithmetic: which pixels a result reads, with which weights.

A resize is at most four passes, each along one axis: shrink rows, shrink columns, then, if either axis grows,
interpolate columns and rows. A pass computes each result as a weighted sum of ``taps`` neighbours; positions are in
1/64 of a pixel and weights in 1/4096, as in libvips, so the sum of the integers gives libvips' bytes. Knows no image
and no device.

Shrinking: means of ``whole`` pixels, then Lanczos 3. Interpolating: Catmull-Rom. libvips 8.19 computes other bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

PHASES = 64
"""Positions of a result between two pixels."""

ONE_BITS = 12
"""A weight of 1 is 1 << ONE_BITS."""

STRIP_ROWS = 16
"""Rows resized at once. libvips' own writer takes as many (its FATSTRIP), and Lanczos 3 adds positions up in float64
from the first row of each: other strips may round other pixels."""

TABLES_KEPT = 512
"""Weights of as many pairs of sizes are kept, 7 kB each at most."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisPass:
    """One pass along rows or columns. Result i is the sum over j < taps of ``weights[p, j]`` times the mean number
    (``positions[i] >> 6`` + j), clamped to the first and last, where p is ``positions[i] & 63``; then 1 << 11 is added,
    and ONE_BITS bits are dropped.

    ``size``: pixels along the axis before, ``target``: after. ``positions`` [target] int32. ``weights`` [64, taps]
    int32. ``whole``: pixels of a mean, (sum + whole // 2) * (2**24 // whole) >> 24; the last one is filled up with the
    last pixel. ``wide_in``, ``wide_out``: 16 signed bits instead of 8 before and after; a result of 8 bits is clipped.
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
        """Means along the axis."""
        return -(-self.size // self.whole)


def passes(width: int, height: int, to_width: int, to_height: int) -> tuple[AxisPass, ...]:
    """The passes from ``width`` x ``height`` pixels to ``to_width`` x ``to_height``, in order; at least one."""
    found = []
    if to_height < height:
        found.append(_shrink(height, to_height, vertical=True))
    if to_width < width:
        found.append(_shrink(width, to_width, vertical=False))
    if to_height > height or to_width > width:
        # An axis that was shrunk, or is as long as before, is interpolated too: libvips moves it by half a pixel.
        found.append(_interpolate(min(width, to_width), to_width, vertical=False))
        found.append(_interpolate(min(height, to_height), to_height, vertical=True))
    return tuple(found) or (_copy(height),)


def is_exact(width: int, height: int, to_width: int, to_height: int) -> bool:
    """Whether ``passes`` gives libvips' bytes. It doesn't where rows shrink while columns grow and a row's exact
    position may lie halfway between two phases: libvips then computes strips that overlap, each with rounding errors of
    its own.
    """
    return not (
        to_height < height
        and to_width > width
        and _has_ties(height, to_height, _whole(height, to_height))
    )


def _whole(size: int, target: int) -> int:
    return max(1, size // (2 * target))


def _has_ties(size: int, target: int, whole: int) -> bool:
    """Whether a position may be halfway between two phases: then libvips' rounding errors decide."""
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
    """A pass that changes nothing."""
    positions = np.arange(height, dtype=np.int32) * PHASES
    return AxisPass(
        True, height, height, positions, np.full((PHASES, 1), 1 << ONE_BITS, dtype=np.int32)
    )


def _shrunk_positions(size: int, target: int, whole: int, strip: int) -> np.ndarray:
    """[target] int64, from half a pixel above the first."""
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
    """[64, taps] int32, truncated towards 0: a phase's weights need not add up to 1. Operations in libvips' order, for
    a last bit may decide."""
    phases = np.arange(PHASES) / PHASES
    x = (np.arange(taps) - (phases[:, None] + taps / 2.0 - 1)) / shrink
    values = np.where(np.abs(x) <= 3, _sinc(x) * _sinc(x / 3), 0.0)
    totals = np.cumsum(values, axis=1)[:, -1:]  # One after the other.
    weights: np.ndarray = (values / totals * (1 << ONE_BITS)).astype(np.int32)
    return weights


def _sinc(x: np.ndarray) -> np.ndarray:
    """By the C library's sine: numpy's may differ in the last bit."""
    angles = (x * math.pi).ravel()
    sines = np.fromiter(map(math.sin, angles.tolist()), np.float64, angles.size)
    return np.divide(sines, angles, out=np.ones_like(sines), where=angles != 0).reshape(x.shape)


@lru_cache(1)
def _catmull_rom() -> np.ndarray:
    """[64, 4] int32, truncated; exact before."""
    t = np.arange(PHASES) / PHASES
    a, d = -0.5 * t * (1 - t) ** 2, -0.5 * t * t * (1 - t)
    weights = np.stack([a, 1 - t - 2 * a + d, t - 2 * d + a, d], 1)
    return np.trunc(weights * (1 << ONE_BITS)).astype(np.int32)
