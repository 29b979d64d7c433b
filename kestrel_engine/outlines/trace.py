"""Traces the outline of a soft mask: cleaning, contours between pixels, fewer corners, SVG path and box.

The contour lies where the probability, bilinear between the centres of pixels, is one half. The path has lines; the
reference writes curves, by potrace.
"""

from __future__ import annotations

import numpy as np

from ..types.requests import Outline
from .region import Region

SMALLEST_ISLAND = 0.0015
"""Islands below this share of the image's area are removed, unless all are smaller (moondream.md section 9.5)."""
MOST_ISLANDS = 64
"""The largest ones are kept. Bounds the time for masks that are mostly noise."""
TOLERANCE = 0.25
"""Largest distance between the contour and the path, in pixels of the mask."""
DIGITS = 4
"""Decimals of the path's numbers: a tenth of a pixel for a box of 1000 pixels."""


def trace(mask: np.ndarray, region: Region) -> Outline | None:
    """Returns the outline of ``mask`` [side, side] in 0..1, which covers ``region``; None if nothing is inside.
    The path has the absolute commands M, L and z.

    The mask is closed by 3 x 3 pixels first. Then holes are filled, and small islands removed.
    """
    # Imported here, because a server without a refiner does not need it.
    from contourpy import LineType, contour_generator

    side = len(mask)
    # A margin of zeros closes the contours that meet the mask's edge.
    closed = np.pad(_close(np.asarray(mask, np.float64)), 1)
    lines: list[np.ndarray] = contour_generator(z=closed, line_type=LineType.Separate).lines(0.5)  # type: ignore[assignment]
    rings = [np.clip(ring - 0.5, 0, side) for ring in lines if len(ring) > 3]
    # Contours around higher values turn one way, holes the other way.
    areas = [_signed_area(ring) for ring in rings]
    islands = [(area, ring) for area, ring in zip(areas, rings, strict=True) if area > 0]
    if not islands:
        return None
    share = region.width * region.height / side**2
    islands = sorted(islands, key=lambda island: -island[0])[:MOST_ISLANDS]
    kept = [ring for area, ring in islands if area * share >= SMALLEST_ISLAND]
    if not kept:
        kept = [islands[0][1]]
    outer = [_simplified(ring) for ring in _without_inner(kept)]
    corners = np.concatenate(outer)
    low, high = corners.min(0), corners.max(0)
    if (high <= low).any():
        return None
    scale = np.array([region.width, region.height]) / side
    (x_min, y_min), (x_max, y_max) = (
        edge * scale + (region.x_min, region.y_min) for edge in (low, high)
    )
    box = float(x_min), float(y_min), float(x_max), float(y_max)
    return Outline(" ".join(_path((ring - low) / (high - low)) for ring in outer), box)


def _close(mask: np.ndarray) -> np.ndarray:
    """Grey closing by a square of 3 x 3: the binary closing of every threshold at once."""
    return _spread(_spread(mask, np.maximum), np.minimum)


def _spread(mask: np.ndarray, pick: np.ufunc) -> np.ndarray:
    padded = np.pad(mask, 1, mode="edge")
    rows = pick(pick(padded[:-2], padded[1:-1]), padded[2:])
    spread: np.ndarray = pick(pick(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:])
    return spread


def _signed_area(ring: np.ndarray) -> float:
    """The area inside a closed ring [n, 2] whose last point repeats the first; negative for a hole."""
    x, y = ring.T
    return float(x[:-1] @ y[1:] - x[1:] @ y[:-1]) / 2


def _without_inner(rings: list[np.ndarray]) -> list[np.ndarray]:
    """Omits islands that lie in a filled hole of another island."""
    return [
        ring
        for ring in rings
        if not any(other is not ring and _contains(other, ring[0]) for other in rings)
    ]


def _contains(ring: np.ndarray, point: np.ndarray) -> bool:
    y = ring[:, 1]
    crosses = (y[:-1] > point[1]) != (y[1:] > point[1])
    a, b = ring[:-1][crosses], ring[1:][crosses]
    at = a[:, 0] + (point[1] - a[:, 1]) / (b[:, 1] - a[:, 1]) * (b[:, 0] - a[:, 0])
    return bool(np.count_nonzero(at > point[0]) % 2)


def _simplified(ring: np.ndarray) -> np.ndarray:
    """Returns the corners [n, 2] of a polygon within TOLERANCE of the ring (Douglas and Peucker), none repeated.

    The two ends of the halves are the ring's first point and the one farthest from it.
    """
    far = int(((ring - ring[0]) ** 2).sum(1).argmax())
    keep = {0, far}
    spans = [(0, far), (far, len(ring) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        inner = ring[first + 1 : last]
        along = ring[last] - ring[first]
        length = float(np.hypot(*along))
        away = inner - ring[first]
        distances = (
            np.abs(along[0] * away[:, 1] - along[1] * away[:, 0]) / length
            if length > 0
            else np.hypot(*away.T)
        )
        worst = int(distances.argmax())
        if distances[worst] > TOLERANCE:
            middle = first + 1 + worst
            keep.add(middle)
            spans += [(first, middle), (middle, last)]
    corners = ring[sorted(keep)]
    return corners if len(corners) > 2 else ring[:-1]


def _path(corners: np.ndarray) -> str:
    (x, y), *others = corners
    return " ".join(
        ["M", _number(x), _number(y), "L", *(_number(v) for p in others for v in p), "z"]
    )


def _number(value: float) -> str:
    text = f"{value:.{DIGITS}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
