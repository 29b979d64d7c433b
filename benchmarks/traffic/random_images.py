"""Random images for requests: JPEGs of coloured circles and squares, different for every seed."""

from __future__ import annotations

import numpy as np
import pyvips

COLOURS = ((220, 40, 40), (40, 160, 60), (50, 80, 210), (235, 200, 50), (150, 70, 170))


def jpeg(seed: int, width: int, height: int) -> bytes:
    """Returns a scene of the kind that kestrel-tiny was trained on, so that it answers in words."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), rng.integers(200, 256, 3), np.float32)
    y, x = np.mgrid[:height, :width]
    for _ in range(rng.integers(3, 9)):
        radius = rng.integers(min(width, height) // 16, min(width, height) // 6)
        dx, dy = abs(x - rng.integers(radius, width)), abs(y - rng.integers(radius, height))
        inside = dx**2 + dy**2 < radius**2 if rng.random() < 0.5 else np.maximum(dx, dy) < radius
        pixels[inside] = COLOURS[rng.integers(len(COLOURS))]
    pixels += rng.normal(0, 4, pixels.shape)
    image = pyvips.Image.new_from_array(pixels.clip(0, 255).astype(np.uint8))
    return bytes(image.jpegsave_buffer(Q=85))
