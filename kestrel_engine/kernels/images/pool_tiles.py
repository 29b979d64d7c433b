"""Computes the projector's input from the features of an image's crops, with stitching and pooling by index arithmetic.

Neighbouring tiles overlap by two margins, and each tile keeps one of them (moondream.md section 5).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 64


# These differ from image to image. Triton would compile a kernel for each kind of value (1, a multiple of 16, any
# other) when it first comes, in the middle of serving.
@triton.jit(do_not_specialize=["tiles_down", "tiles_across", "first_tile", "widest"])
def _pool_tiles(
    features,
    out,
    crop_stride,
    row_stride,
    dim,
    grid_side,
    margin,
    tiles_down,
    tiles_across,
    first_tile,
    widest,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A program computes one row of the pooled grid for CHANNELS channels. CELLS >= grid_side."""
    i = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    j = tl.arange(0, CELLS)
    inside = (j < grid_side)[:, None] & (channels < dim)[None, :]
    target = out + (i * grid_side + j).to(tl.int64)[:, None] * (2 * dim) + channels[None, :]
    whole = features + (i * grid_side + j)[:, None] * row_stride + channels[None, :]
    tl.store(target, tl.load(whole, mask=inside, other=0.0), mask=inside)
    window = grid_side - 2 * margin
    height = window * tiles_down + 2 * margin
    width = window * tiles_across + 2 * margin
    top, bottom = i * height // grid_side, ((i + 1) * height + grid_side - 1) // grid_side
    left, right = j * width // grid_side, ((j + 1) * width + grid_side - 1) // grid_side
    total = tl.zeros((CELLS, CHANNELS), dtype=tl.float32)
    for y in range(top, bottom):
        down = tl.minimum(tl.maximum(y - margin, 0) // window, tiles_down - 1)
        for step in range(widest):
            x = left + step
            across = tl.minimum(tl.maximum(x - margin, 0) // window, tiles_across - 1)
            crop = (first_tile + down * tiles_across + across).to(tl.int64)
            cell = (y - down * window) * grid_side + x - across * window
            seen = inside & (x < right)[:, None]
            place = crop[:, None] * crop_stride + cell[:, None] * row_stride + channels[None, :]
            total += tl.load(features + place, mask=seen, other=0.0).to(tl.float32)
    mean = total / ((bottom - top) * (right - left)).to(tl.float32)[:, None]
    tl.store(target + dim, mean.to(out.dtype.element_ty), mask=inside)


def pool_tiles(
    features: Tensor, tiling: tuple[int, int], grid_side: int, margin: int, *, out: Tensor
) -> Tensor:
    """Writes the projector's input to ``out`` [grid_side^2, 2 * dim]: in each row the feature of the overview crop
    (crop 0), then the average of the stitched tiles' features under the cell, computed in float32. ``features``: [n,
    grid_side^2, dim] of an image's distinct crops. ``tiling``: (down, across). With (1, 1), crop 0 is also the tile;
    otherwise the tiles are crops 1 to n - 1."""
    down, across = tiling
    dim = features.shape[-1]
    first_tile = 0 if tiling == (1, 1) else 1
    assert features.shape == (first_tile + down * across, grid_side**2, dim), (
        tuple(features.shape),
        tiling,
        grid_side,
    )
    assert features.stride(-1) == 1, features.stride()
    assert out.shape == (grid_side**2, 2 * dim) and out.is_contiguous(), (out.shape, out.stride())
    width = (grid_side - 2 * margin) * across + 2 * margin
    widest = max(
        -(-(j + 1) * width // grid_side) - j * width // grid_side for j in range(grid_side)
    )
    _pool_tiles[(grid_side, triton.cdiv(dim, _CHANNELS))](
        features,
        out,
        features.stride(0),
        features.stride(1),
        dim,
        grid_side,
        margin,
        down,
        across,
        first_tile,
        widest,
        CELLS=triton.next_power_of_2(grid_side),
        CHANNELS=_CHANNELS,
    )
    return out
