"""Refinement: refines the masks of a step, with plain torch, on the device of the model.

Every mask costs one pass of the vision tower over its crop, which is not among the crops of its image, and five passes
of the refiner. On a GPU, masks of several requests share the passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..models.low_rank import Changes, OneAdapter
from ..models.refiner import Refiner, RefinerConfig, early_block
from ..models.vision import CROPS_PER_PASS, VisionModel
from ..types.model_config import VisionConfig
from ..types.step import RefineRow


class Refinement:
    """Holds the refiner's weights and no state between calls."""

    def __init__(self, vision: VisionModel, refiner: Refiner) -> None:
        self._vision, self._refiner = vision, refiner
        self._early = early_block(vision.config.enc_n_layers)

    def __call__(
        self, pixels: Tensor, masks: Tensor, changes: Sequence[Changes | None] | None = None
    ) -> Tensor:
        """``pixels`` [n, crop_size, crop_size, 3] uint8 and ``masks`` [n, crop_size, crop_size] uint8, on the device.
        ``changes``: what an adapter changes in the tower for each of them; equal objects share passes.

        Returns probabilities [n, crop_size, crop_size] float32. Each depends on its own crop and mask only.
        """
        refined: dict[int, Tensor] = {}
        # A CPU gains nothing from larger passes, and one mask for each gives the same bits whatever the step holds.
        size = 1 if pixels.device.type == "cpu" else CROPS_PER_PASS
        for change, places in _together(changes or [None] * len(pixels)):
            adapters = None if change is None else OneAdapter(change)
            for first in range(0, len(places), size):
                part = places[first : first + size]
                final, early = self._vision.encode_two_depths(pixels[part], self._early, adapters)
                found = self._refiner.refine(final, early, masks[part])
                refined |= zip(part, found, strict=True)
        return torch.stack([refined[place] for place in range(len(pixels))])


def _together(changes: Sequence[Changes | None]) -> list[tuple[Changes | None, list[int]]]:
    """Returns the different changes, each with its places."""
    found: dict[int, tuple[Changes | None, list[int]]] = {}
    for place, change in enumerate(changes):
        found.setdefault(id(change), (change, []))[1].append(place)
    return [*found.values()]


def arrays_of(rows: Sequence[RefineRow]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pixels [n, side, side, 3] and the masks [n, side, side] of all rows, uint8."""
    return np.stack([row.pixels for row in rows]), np.stack([row.mask for row in rows])


def results_of(rows: Sequence[RefineRow], refined: np.ndarray) -> dict[int, np.ndarray]:
    """Returns the finite masks of ``refined`` [n, side, side] by sequence id."""
    masks = zip(rows, refined, strict=True)
    return {row.sequence_id: mask for row, mask in masks if np.isfinite(mask).all()}


def refine_bytes(config: RefinerConfig, vision: VisionConfig, dtype: torch.dtype, rows: int) -> int:
    """Returns the memory for the activations of ``rows`` masks, beside the weights."""
    patches, side = vision.grid**2, vision.crop_size
    tower = patches * (8 * vision.enc_dim + 2 * vision.enc_ff_dim)
    tower += 2 * vision.enc_n_heads * patches**2
    # The last layers hold dim / 8 channels at eight times the grid, and candidates at the crop's size.
    head = 8 * (config.dim // 8) * 64 * patches + 8 * patches * config.dim
    candidates = 12 * side**2
    return rows * ((tower + head) * dtype.itemsize + candidates * 4)
