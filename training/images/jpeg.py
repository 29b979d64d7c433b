"""A JPEG round trip in torch, so that training images have the artefacts of served images.

Colour conversion, chroma subsampling with libjpeg's smooth upsampling, the exact 8 x 8 DCT and libjpeg's
quality-scaled tables. It omits entropy coding, which is lossless.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LUMA = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMA = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99, *((99,) * 32),
)  # fmt: skip


def quality_tables(quality: Tensor) -> tuple[Tensor, Tensor]:
    """Luma and chroma quantisation tables [B, 8, 8] for integer qualities [B], 1..100."""
    q = quality.float()
    scale = torch.where(q < 50, torch.floor(5000 / q), 200 - 2 * q).view(-1, 1)
    tables = []
    for base in (_LUMA, _CHROMA):
        table = torch.tensor(base, dtype=torch.float32, device=quality.device).view(1, 64)
        tables.append(torch.floor((table * scale + 50) / 100).clamp(1, 255).view(-1, 8, 8))
    return tables[0], tables[1]


def dct_matrix(device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal DCT-II matrix [8, 8]: frequency by sample."""
    k = torch.arange(8, dtype=torch.float64).view(-1, 1)
    n = torch.arange(8, dtype=torch.float64).view(1, -1)
    m = torch.cos((2 * n + 1) * k * math.pi / 16) * 0.5
    m[0] *= math.sqrt(0.5)
    return m.float().to(device)


def split_colours(x: Tensor) -> tuple[Tensor, Tensor]:
    """RGB [B, 3, H, W] -> luma [B, 1, H, W] and chroma [B, 2, H, W], whole numbers centred at 0."""
    r, g, b = x[:, 0:1].float(), x[:, 1:2].float(), x[:, 2:3].float()
    luma = torch.round(0.299 * r + 0.587 * g + 0.114 * b) - 128
    cb = torch.round(-0.168735892 * r - 0.331264108 * g + 0.5 * b)
    cr = torch.round(0.5 * r - 0.418687589 * g - 0.081312411 * b)
    return luma.to(x.dtype), torch.cat((cb, cr), 1).to(x.dtype)


def requantise(frequencies: Tensor, table: Tensor) -> Tensor:
    """Coefficients rounded to multiples of the table's steps."""
    t = table.float()
    return (torch.round(frequencies.float() / t) * t).to(frequencies.dtype)


def join_colours(luma: Tensor, chroma: Tensor) -> Tensor:
    """Back to RGB grey levels 0..255; luma and chroma as the inverse transform gave them."""
    y = torch.round(luma.float()).clamp(-128, 127) + 128
    c = torch.round(chroma.float())
    cb, cr = c[:, 0:1], c[:, 1:2]
    rgb = torch.cat((y + 1.402 * cr, y - 0.344136286 * cb - 0.714136286 * cr, y + 1.772 * cb), 1)
    return torch.round(rgb).clamp(0, 255).to(luma.dtype)


@dataclass(frozen=True)
class Stages:
    """The pointwise stages; a GPU compiles them."""

    split: Callable[[Tensor], tuple[Tensor, Tensor]] = split_colours
    requantise: Callable[[Tensor, Tensor], Tensor] = requantise
    join: Callable[[Tensor, Tensor], Tensor] = join_colours

    @classmethod
    def compiled(cls) -> Stages:
        return cls(
            torch.compile(split_colours, dynamic=True),
            torch.compile(requantise, dynamic=True),
            torch.compile(join_colours, dynamic=True),
        )


EAGER = Stages()


def _through_blocks(plane: Tensor, table: Tensor, stages: Stages) -> Tensor:
    """Through the DCT and back. plane [B, C, H, W] centred at 0, sides multiples of 8; table [B, 8, 8]."""
    b, c, h, w = plane.shape
    m = dct_matrix(plane.device).to(plane.dtype)
    rows = torch.matmul(m, plane.reshape(b, c, h // 8, 8, w))
    freq = torch.matmul(rows.view(b, c, h // 8, 8, w // 8, 8), m.t())
    freq = stages.requantise(freq, table.view(b, 1, 1, 8, 1, 8))
    rows = torch.matmul(freq, m).view(b, c, h // 8, 8, w)
    return torch.matmul(m.t(), rows).view(b, c, h, w)


def jpeg_round_trip(
    pixels: Tensor, quality: Tensor, subsample: bool = True, stages: Stages = EAGER
) -> Tensor:
    """Encode and decode grey levels [B, 3, H, W] (whole numbers 0..255) at integer qualities [B].

    subsample: 4:2:0 chroma (every common writer below quality 90), else 4:4:4.
    """
    height, width = pixels.shape[-2:]
    unit = 16 if subsample else 8
    x = F.pad(pixels, (0, -width % unit, 0, -height % unit), mode="replicate")
    luma, chroma = stages.split(x)
    if subsample:
        chroma = torch.floor(F.avg_pool2d(chroma, 2) + 0.45)
    luma_table, chroma_table = quality_tables(quality)
    luma = _through_blocks(luma, luma_table, stages)
    chroma = _through_blocks(chroma, chroma_table, stages).round_().clamp_(-128, 127)
    if subsample:
        chroma = F.interpolate(chroma, scale_factor=2, mode="bilinear", align_corners=False)
    return stages.join(luma, chroma)[..., :height, :width]
