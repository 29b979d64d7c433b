"""The region model: embeddings of coordinates and sizes, and the heads that predict coordinate and size bins.

The heads read the residual stream before ``post_ln`` (moondream.md section 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..types.model_config import RegionConfig
from ..types.requests import Coord, Size
from .layers import LayerNorm, Linear, Mlp, Tensors


class RegionModel:
    """Encoders and decoders of coordinates and sizes. Moondream 2 decodes with MLPs, Moondream 3 with linear layers."""

    def __init__(self, config: RegionConfig, tensors: Tensors) -> None:
        self.coord_features = tensors["region.coord_features"].float()
        self.size_features = tensors["region.size_features"].float()
        self.coord_encoder = Linear.load(tensors, "region.coord_encoder")
        self.size_encoder = Linear.load(tensors, "region.size_encoder")
        self.coord_decoder: Callable[[Tensor], Tensor]
        self.size_decoder: Callable[[Tensor], Tensor]
        self.ln: LayerNorm | None = None
        if config.decoder == "mlp":
            self.coord_decoder = Mlp.load(tensors, "region.coord_decoder")
            self.size_decoder = Mlp.load(tensors, "region.size_decoder")
        else:
            self.coord_decoder = Linear.load(tensors, "region.coord_decoder")
            self.size_decoder = Linear.load(tensors, "region.size_decoder")
            # Early ports of Moondream 3 lack this LayerNorm. Their heads read the stream as it is.
            if "region.ln.weight" in tensors:
                self.ln = LayerNorm.load(tensors, "region.ln")

    def embed_coords(self, values: Tensor) -> Tensor:
        """Embeds coordinates [n] float32 to [n, dim]."""
        return self._embed(values[:, None], self.coord_features, self.coord_encoder)

    def embed_sizes(self, values: Tensor) -> Tensor:
        """Embeds widths and heights [n, 2] float32 to [n, dim]."""
        return self._embed(values, self.size_features, self.size_encoder)

    def _embed(self, values: Tensor, frequencies: Tensor, encoder: Linear) -> Tensor:
        angles = 2 * math.pi * (values @ frequencies)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return encoder(waves.to(encoder.weight.dtype))

    def coord_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of ``hidden`` [n, dim]: [n, coord bins] float32."""
        return self.coord_decoder(self._normed(hidden)).float()

    def size_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of ``hidden`` [n, dim]: [n, 2, size bins] float32, width first, then height."""
        logits = self.size_decoder(self._normed(hidden)).float()
        return logits.view(len(hidden), 2, logits.shape[-1] // 2)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.ln is None else self.ln(hidden)


def coord_of_bin(index: int, num_bins: int = 1024) -> Coord:
    """Returns the coordinate ``index / num_bins``, which is exact in binary for 1024 bins (moondream.md section 7)."""
    return Coord(index / num_bins)


def size_of_bins(width: int, height: int, num_bins: int = 1024) -> Size:
    """Returns the size of two logarithmic bins, from 2^-10 at bin 0 to 1 at the last bin (moondream.md section 7)."""
    return Size(*(2.0 ** (10 * index / (num_bins - 1) - 10) for index in (width, height)))
