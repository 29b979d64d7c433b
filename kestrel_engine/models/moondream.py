"""Moondream 2 and 3: the vision tower, the text decoder and the region model.

The checkpoint loader checks names and shapes. All calls expect ``torch.inference_mode``. A model keeps no state.
"""

from __future__ import annotations

import torch

from ..types.model_config import ModelConfig
from .layers import Tensors
from .region import RegionModel
from .text import TextModel
from .vision import VisionModel


class Moondream:
    """The whole model. ``tensors``: canonical names without the leading ``model.`` to tensors of one floating-point
    dtype on one device, which the model references. ``region.ln`` may be absent."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        self.config = config
        self.text = TextModel(config.text, tensors)
        self.vision = VisionModel(config.vision, tensors)
        self.region = RegionModel(config.region, tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.text.wte.dtype

    @property
    def device(self) -> torch.device:
        return self.text.wte.device
