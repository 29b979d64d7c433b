"""Moondream 2 and 3: vision tower, text decoder and region model under one roof.

Built from a ModelConfig and a complete checkpoint; checking names and shapes is the checkpoint loader's task. All calls
expect ``torch.inference_mode``; nothing here keeps state between calls.
"""

from __future__ import annotations

import torch

from ..types.model_config import ModelConfig
from .layers import Tensors
from .region import RegionModel
from .text import TextModel
from .vision import VisionModel


class Moondream:
    """``tensors``: canonical names without the leading ``model.``, all of one floating type on one device, kept by
    reference. ``region.ln`` may be absent."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        self.config = config
        self.text = TextModel(config.text, tensors)
        self.vision = VisionModel(config.vision, tensors)
        self.region = RegionModel(config.region, tensors)

    @property
    def dtype(self) -> torch.dtype:
        """The computation type: that of the weights."""
        return self.text.wte.dtype

    @property
    def device(self) -> torch.device:
        return self.text.wte.device
