"""What a camera and an encoder do to a picture, by libvips."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pyvips
from numpy.typing import NDArray

from training.domains.picture import Pixels

pyvips.concurrency_set(1)  # each core has a process that draws

NOISE = 30.0  # standard deviation of _noise()


@cache
def _noise() -> NDArray[np.int8]:
    """Pictures get a part of it: drawing new noise takes as long as drawing the picture."""
    noise = np.random.Generator(np.random.SFC64(1)).standard_normal((1700, 1700, 3), np.float32)
    return (noise * NOISE).clip(-127, 127).astype(np.int8)


def spoil(rng: random.Random, pixels: Pixels) -> Pixels:
    """Blur, tint, noise and JPEG down to quality 30; half of the pictures stay clean."""
    if rng.random() < 0.5:
        return pixels
    image = pyvips.Image.new_from_array(pixels).copy(interpretation="srgb")
    if rng.random() < 0.3:
        image = image.gaussblur(rng.uniform(0.3, 1.0))
    if rng.random() < 0.3:
        gain = rng.uniform(0.85, 1.1)
        image = image * [gain * rng.uniform(0.92, 1.08) for _ in range(3)]
    if rng.random() < 0.4:
        (height, width, _), noise = pixels.shape, _noise()
        y, x = rng.randint(0, len(noise) - height), rng.randint(0, len(noise) - width)
        part = pyvips.Image.new_from_array(
            np.ascontiguousarray(noise[y : y + height, x : x + width])
        )
        image = image + part * (rng.uniform(0, 14) / NOISE)
    chroma = "on" if rng.random() < 0.8 else "off"
    quality = rng.randint(30, 96)
    data = image.rint().cast("uchar").jpegsave_buffer(Q=quality, subsample_mode=chroma)
    return np.asarray(pyvips.Image.new_from_buffer(data, "").numpy())
