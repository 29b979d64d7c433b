"""Converts pixels to the rows of the patch embedding's GEMM. It cuts, normalises, reorders and pads in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8
_COLUMNS = 128


# The number of rows is that of the crops of a pass, which may begin at any crop of an image: one kernel serves all.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["crops"])
def _patchify(
    crops,
    out,
    num_rows,
    side,
    grid_side,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    patches = grid_side * grid_side
    crop, patch = rows // patches, rows % patches
    # The order within a patch is channel, row, column.
    channel, inside = columns // (SIZE * SIZE), columns % (SIZE * SIZE)
    y = (patch // grid_side)[:, None] * SIZE + (inside // SIZE)[None, :]
    x = (patch % grid_side)[:, None] * SIZE + (inside % SIZE)[None, :]
    pixel = (crop.to(tl.int64)[:, None] * side + y) * side + x
    real = (rows < num_rows)[:, None] & (columns < CHANNELS * SIZE * SIZE)[None, :]
    value = tl.load(crops + pixel * CHANNELS + channel[None, :], mask=real, other=0)
    value = (tl.div_rn(value.to(tl.float32), 255.0) - 0.5) / 0.5
    value = tl.where(real, value, 0.0)
    target = rows.to(tl.int64)[:, None] * PADDED + columns[None, :]
    stored = (rows < num_rows)[:, None] & (columns < PADDED)[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=stored)


def patchify(crops: Tensor, size: int, padded: int, dtype: torch.dtype) -> Tensor:
    """Converts crops [n, S, S, channels] uint8, contiguous, to rows [n * (S / size)^2, padded] of ``dtype``. A row is a
    patch: its pixels in [-1, 1], computed in float32, in the order channel, row, column, then zeros.
    """
    n, side, _, channels = crops.shape
    grid_side = side // size
    rows = n * grid_side * grid_side
    assert crops.dtype == torch.uint8 and crops.is_contiguous(), (crops.dtype, crops.stride())
    assert channels * size * size <= padded, (channels, size, padded)
    out = torch.empty(rows, padded, dtype=dtype, device=crops.device)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(padded, _COLUMNS))
    _patchify[grid](
        crops,
        out,
        rows,
        side,
        grid_side,
        SIZE=size,
        CHANNELS=channels,
        PADDED=padded,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    return out
