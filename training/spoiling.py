"""What a camera and an encoder do to a picture, by libvips."""

from __future__ import annotations

import random

import numpy as np
import pyvips

from training.domains.picture import Pixels, as_numpy

pyvips.concurrency_set(1)  # each core has a process that draws


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
        noise = as_numpy(rng).standard_normal(pixels.shape, np.float32) * rng.uniform(0, 14)
        image = image + pyvips.Image.new_from_array(noise)
    chroma = "on" if rng.random() < 0.8 else "off"
    quality = rng.randint(30, 96)
    data = image.rint().cast("uchar").jpegsave_buffer(Q=quality, subsample_mode=chroma)
    return np.asarray(pyvips.Image.new_from_buffer(data, "").numpy())
