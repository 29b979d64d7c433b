"""Pictures that a browser drew before the training, from an archive of WebP files and one JSON file."""

from __future__ import annotations

import io
import json
import math
import os
import random
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from training.domains.picture import Box, Pixels, Point
from training.domains.text.fonts import sources

LEAST_SCALE = 0.7
"""Smaller, the small print of a page can't be read."""
LARGEST = 1.5


class Drawings:
    """The pictures of an archive, and what each shows."""

    def __init__(self, archive: Path, truth: str) -> None:
        self._archive, self._owner = archive, 0
        with zipfile.ZipFile(archive) as file:
            self.shown: list[dict[str, Any]] = json.loads(file.read(truth))
            self._sizes = [
                Image.open(io.BytesIO(file.read(f"{k}.webp"))).size for k in range(len(self.shown))
            ]

    def place(
        self, rng: random.Random, width: int, height: int, letters: float = 0.0
    ) -> tuple[Pixels, dict[str, Any], Place]:
        """A random picture on a ground of this size in pixels, and where it lies there.

        It fills as much of the ground as one of some random pictures can that stays legible: letters have this many
        pixels, or, if their size is unknown (0), the scale is LEAST_SCALE.
        """
        choices = [rng.randrange(len(self.shown)) for _ in range(24 if letters else 8)]
        sizes = [self._sizes[k] for k in choices]
        fits = [min(LARGEST, width / w, height / h) for w, h in sizes]
        needed = [letters / self.shown[k]["size"] if letters else LEAST_SCALE for k in choices]
        legible = [i for i, fit in enumerate(fits) if fit >= needed[i]]
        worth = [
            fit**2 * math.prod(size) if legible else fit
            for fit, size in zip(fits, sizes, strict=True)
        ]
        best = max(legible or range(len(choices)), key=worth.__getitem__)
        number, scale = choices[best], fits[best] * rng.choice((1, 1, rng.uniform(0.85, 1)))
        scale = max(scale, min(fits[best], needed[best])) if letters else scale
        image = Image.open(io.BytesIO(self._read(f"{number}.webp"))).convert("RGB")
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        if size != image.size:
            how = rng.choice((Image.Resampling.BILINEAR, Image.Resampling.LANCZOS))
            image = image.resize(size, how)
        grey = rng.randint(0, 255)
        colour = image.getpixel((0, 0)) if rng.random() < 0.7 else (grey,) * 3
        ground = Image.new("RGB", (width, height), colour)
        at = rng.randint(0, width - size[0]), rng.randint(0, height - size[1])
        ground.paste(image, at)
        return np.asarray(ground), self.shown[number], Place(scale, *at)

    def _read(self, name: str) -> bytes:
        # Forked processes can't share an open archive.
        if self._owner != os.getpid():
            self._owner, self._file = os.getpid(), zipfile.ZipFile(self._archive)
        return self._file.read(name)


class Place(NamedTuple):
    """Where a picture lies on its ground, and how much smaller it is."""

    scale: float
    left: int
    top: int

    def point(self, x: float, y: float) -> Point:
        return x * self.scale + self.left, y * self.scale + self.top

    def box(self, box: list[float]) -> Box:
        return *self.point(*box[:2]), *self.point(*box[2:])


@cache
def open_drawings(archive: str, truth: str) -> Drawings:
    """The drawings of an archive of the data folder, which a process opens once."""
    return Drawings(sources() / archive, truth)
