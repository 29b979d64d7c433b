"""One pass of an exact resize for many images in one launch: `exact_resize.AxisPass` over 8-bit RGB.

A job is a pass of one image. Its result is a plane, or overlapping tiles that are cut out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class ResampleJob(NamedTuple):
    """The input and output of a pass. Offsets count elements of the buffers' dtypes. ``pitch``: elements of a row of
    the source, three for each pixel. ``size``, ``whole``, ``groups``, ``taps``: as in `AxisPass`. ``positions``,
    ``weights``: offsets in the tables. The result is ``tiles`` tiles of ``rows`` x ``columns`` pixels, ``across`` of
    them side by side. Neighbouring tiles begin ``window`` pixels apart in both directions. ``kept``: 1 to write to the
    crops, 0 to the arena."""

    source: int
    result: int
    pitch: int
    size: int
    whole: int
    groups: int
    taps: int
    positions: int
    weights: int
    tiles: int
    across: int
    window: int
    rows: int
    columns: int
    kept: int


JOB_WIDTH = len(ResampleJob._fields)

BLOCK = (8, 256)
"""The rows, and the elements of a row, that a program computes."""


# The jobs of a launch begin anywhere in the buffer of all jobs, so their alignment must not select another variant.
@triton.jit(do_not_specialize_on_alignment=["jobs"])
def _resample(
    bytes_arena,
    wide_arena,
    crops,
    tables,
    jobs,
    JOB_WIDTH: tl.constexpr,
    VERTICAL: tl.constexpr,
    WIDE_IN: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    job = jobs + tl.program_id(2) * JOB_WIDTH
    source, result, pitch = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    size, whole, groups = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    taps = tl.load(job + 6)
    positions, weights = tables + tl.load(job + 7), tables + tl.load(job + 8)
    tiles, across, window = tl.load(job + 9), tl.load(job + 10), tl.load(job + 11)
    num_rows, num_elements = tl.load(job + 12), tl.load(job + 13) * 3
    kept = tl.load(job + 14)
    blocks = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0) // blocks
    if (tile < tiles) & (tl.program_id(1) * COLUMNS < num_elements):
        row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
        element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (element < num_elements)[None, :]
        y = (tile // across) * window + row
        flat = (tile % across) * (window * 3) + element
        if VERTICAL:
            at = tl.load(positions + y, mask=row < num_rows, other=0)
        else:
            at = tl.load(positions + flat // 3, mask=element < num_elements, other=0)
        first, phase = at >> 6, (at & 63) * taps
        total = tl.full((ROWS, COLUMNS), 2048, tl.int32)
        for tap in range(taps):
            group = tl.minimum(tl.maximum(first + tap, 0), groups - 1)
            weight = tl.load(weights + phase + tap)
            if WIDE_IN:
                # The rows are interpolated, not shrunk.
                place = source + group[:, None] * pitch + flat[None, :]
                value = tl.load(wide_arena + place, mask=inside, other=0).to(tl.int32)
            else:
                mean = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
                for step in range(whole):
                    pixel = tl.minimum(group * whole + step, size - 1)
                    if VERTICAL:
                        place = source + pixel[:, None] * pitch + flat[None, :]
                    else:
                        place = source + y[:, None] * pitch + (pixel * 3 + flat % 3)[None, :]
                    mean += tl.load(bytes_arena + place, mask=inside, other=0).to(tl.int32)
                # The product fits 32 unsigned bits.
                scaled = (mean + whole // 2).to(tl.uint32) * (16777216 // whole).to(tl.uint32)
                value = (scaled >> 24).to(tl.int32)
            total += value * (weight[:, None] if VERTICAL else weight[None, :])
        total = total >> 12
        target = result + (tile * num_rows + row)[:, None] * num_elements + element[None, :]
        if WIDE_OUT:
            tl.store(wide_arena + target, total.to(tl.int16), mask=inside)
        else:
            pixels = tl.minimum(tl.maximum(total, 0), 255).to(tl.uint8)
            if kept != 0:
                tl.store(crops + target, pixels, mask=inside)
            else:
                tl.store(bytes_arena + target, pixels, mask=inside)


def resample(
    arena: Tensor,
    crops: Tensor,
    tables: Tensor,
    device_jobs: Tensor,
    jobs: Sequence[ResampleJob],
    *,
    vertical: bool,
    wide_in: bool = False,
    wide_out: bool = False,
    block: tuple[int, int] = BLOCK,
) -> None:
    """Runs all ``jobs`` in one launch. ``device_jobs``: [len(jobs), JOB_WIDTH] int32, the jobs on the device.
    ``arena``: [n] uint8, n even, with images and intermediate results, which ``wide_in`` and ``wide_out`` read and
    write as int16. ``crops``: uint8, the output of jobs with ``kept``. ``tables``: [m] int32."""
    assert arena.dtype == crops.dtype == torch.uint8 and len(arena) % 2 == 0, (
        arena.dtype,
        crops.dtype,
    )
    assert tables.dtype == device_jobs.dtype == torch.int32, (tables.dtype, device_jobs.dtype)
    assert device_jobs.shape == (len(jobs), JOB_WIDTH) and device_jobs.is_contiguous()
    assert arena.is_contiguous() and crops.is_contiguous() and tables.is_contiguous()
    rows, columns = block
    grid = (
        max(job.tiles * -(-job.rows // rows) for job in jobs),
        max(-(-job.columns * 3 // columns) for job in jobs),
        len(jobs),
    )
    _resample[grid](
        arena,
        arena.view(torch.int16),
        crops,
        tables,
        device_jobs,
        JOB_WIDTH=JOB_WIDTH,
        VERTICAL=vertical,
        WIDE_IN=wide_in,
        WIDE_OUT=wide_out,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
