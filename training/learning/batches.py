"""Packed prompts of a batch, and the degradation of its pictures, as plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from training.prompts import COORD, SIZE, Prompt, coord_bin, size_bin
from training.scenes.tiling import View

SKILLS: tuple[str, ...] = ("query", "point", "detect", "segment", "caption")
PAD = -1


@dataclass(frozen=True)
class Spoiling:
    """The degradation of a step's images between drawing and tiling. Arrays have one entry for each image.

    blur: sigma in pixels for the images flagged in ``blurred``; tint: factors of red, green and blue; noise: standard
    deviation in grey levels; quality: 0 leaves the image as it is.
    """

    blur: float
    blurred: Tensor
    tint: Tensor
    noise: Tensor
    quality: Tensor
    subsample: bool


@dataclass(frozen=True)
class Packed:
    """B images of one size and their packed prompts (L positions)."""

    view: View
    spoiling: Spoiling
    ids: Tensor  # [B, L]
    values: Tensor  # [B, L, 2]
    document: Tensor  # [B, L] number of the prompt, -1 for padding
    position: Tensor  # [B, L]
    text_index: Tensor  # [T] flat positions whose next id is trained
    text_target: Tensor  # [T]
    text_skill: Tensor  # [T] index into SKILLS
    coord_index: Tensor  # [C] flat positions whose next id is a coordinate
    coord_target: Tensor  # [C] fractional bins
    size_index: Tensor  # [S]
    size_target: Tensor  # [S, 2]

    def to(self, device: torch.device) -> Self:
        """On the device, but for the spoiling, which is read on the host."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {
            k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **changed)


class Packer:
    """Collects packed prompts of a batch and the flat positions that carry a loss."""

    def __init__(self, images: int, length: int, prefix: int) -> None:
        self.ids = np.zeros((images, length), np.int64)
        self.values = np.zeros((images, length, 2), np.float32)
        self.document = np.full((images, length), PAD, np.int64)
        self.position = np.zeros((images, length), np.int64)
        self.length, self.prefix = length, prefix
        self.text: list[tuple[int, int, int]] = []
        self.coords: list[tuple[int, float]] = []
        self.sizes: list[tuple[int, float, float]] = []

    def add(self, image: int, prompts: list[Prompt]) -> None:
        at = 0
        for number, prompt in enumerate(prompts):
            n = len(prompt.ids) - 1  # the last id is only a target
            row = slice(at, at + n)
            self.ids[image, row] = prompt.ids[:-1]
            self.values[image, row] = prompt.values[:-1]
            self.document[image, row] = number
            self.position[image, row] = np.arange(self.prefix, self.prefix + n)
            skill = SKILLS.index(prompt.skill)
            for i in range(prompt.start - 1, n):
                flat, target = image * self.length + at + i, prompt.ids[i + 1]
                self.text.append((flat, target, skill))
                if target == COORD:
                    self.coords.append((flat, coord_bin(prompt.values[i + 1][0])))
                elif target == SIZE:
                    w, h = prompt.values[i + 1]
                    self.sizes.append((flat, size_bin(w), size_bin(h)))
            at += n

    def tensors(self) -> dict[str, Tensor]:
        """The fields of Packed, but for view and spoiling."""
        text = np.array(self.text, np.int64)
        coords = np.array(self.coords, np.float64).reshape(-1, 2)
        sizes = np.array(self.sizes, np.float64).reshape(-1, 3)
        return {
            "ids": torch.from_numpy(self.ids),
            "values": torch.from_numpy(self.values),
            "document": torch.from_numpy(self.document),
            "position": torch.from_numpy(self.position),
            "text_index": torch.from_numpy(text[:, 0].copy()),
            "text_target": torch.from_numpy(text[:, 1].copy()),
            "text_skill": torch.from_numpy(text[:, 2].copy()),
            "coord_index": torch.from_numpy(coords[:, 0].astype(np.int64)),
            "coord_target": torch.from_numpy(coords[:, 1].astype(np.float32)),
            "size_index": torch.from_numpy(sizes[:, 0].astype(np.int64)),
            "size_target": torch.from_numpy(sizes[:, 1:].astype(np.float32)),
        }
