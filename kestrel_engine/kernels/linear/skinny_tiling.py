"""How the kernels of `skinny_linear` divide a weight: its tiles, and the parts of K. Shapes alone determine both."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_ROWS = 128
"""The most rows of x."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of the weight.

    ``prefetch``: K tiles that a program prefetches into L2 before it waits (``pdl`` only). ``one_row``: use
    multiply-adds for one row of x. ``boxes``: load tiles with the tensor memory accelerator (sm_90) if the weight's
    alignment allows.
    """

    block_n: int
    block_k: int
    stages: int = 4
    warps: int = 4
    prefetch: int = 0
    one_row: bool = False
    boxes: bool = False


def tiling_of(rows: int, n: int, k: int, splits: int, element_bytes: int) -> Tiling:
    """Returns the tiling for a shape, measured on an H200 in a chain of 24 layers.

    A layer of Moondream 2 without attention takes 30.7, 31.2 and 35.3 us with 1, 16 and 64 rows; cuBLAS takes 37.6,
    38.6 and 40.5 us; the memory floor is 23.5 us. Prefetching into L2 before the wait costs more than it gains, except
    for the output GEMM of one or two rows, in front of which attention leaves the memory idle: with it, a layer with
    attention takes 47.2 us instead of 48.1 on an H100. For one shape, all
    numbers of rows use tiles of the same depth, so a row has the same bits in every batch.
    """
    if element_bytes == 4:
        # Float32 does not use tensor cores, and its tiling is not tuned.
        return Tiling(32, 32, stages=3)
    if element_bytes == 1:
        # Twice as many programs as for two bytes: while one widens a tile, the other one waits for memory.
        if rows == 1 and n > 8192:
            # A step of Moondream 2 with one row takes 0.81 ms in its layers, with the tiles below 0.85 (an H100).
            return Tiling(64, 128, stages=6, boxes=True)
        deep = 256 if rows <= 32 and k // splits % 256 == 0 else 128
        return Tiling(64, deep, stages=3 if deep == 256 else 4, boxes=True)
    if n > 32768:
        return Tiling(64, 128, stages=4, boxes=True)
    if n > 8192:
        # Four tiles of x with 128 rows would exceed the shared memory.
        return Tiling(128, 128, stages=4 if rows <= 64 else 3, warps=8, boxes=True)
    if rows > 32:
        return Tiling(64, 128, stages=4, boxes=True)
    # Beside experts, as the output GEMM of Moondream 3 runs, the memory is not idle.
    return Tiling(64, 128, stages=6, prefetch=4 if rows <= 2 and splits > 1 and k > n else 0)


def tiling_of_groups(rows: int, group: int) -> Tiling:
    """Returns the tiling of a weight in 4 bits. A step reads ``group`` bytes of each row, and twice as much of x."""
    return Tiling(64, group, stages=3 if rows <= 64 else 2)


@dataclass(frozen=True, slots=True)
class RowTiling:
    """The tiling of a weight in 4 bits for one row of x. ``pairs``: of groups, along K."""

    block_n: int
    pairs: int
    warps: int


def tiling_of_row(pairs: int) -> RowTiling:
    """Returns the tiling for parts of K of ``pairs`` pairs of groups."""
    return RowTiling(16, min(2, pairs & -pairs), 4)


def content_parts(rows: int, weight: Tensor, tau_k: int) -> int:
    """Returns the number of partial sums over ``tau_k`` columns that `skinny_linear` writes."""
    n, k = weight.shape
    return -(-tau_k // tiling_of(rows, n, k, 1, weight.element_size()).block_n)


def adapter_parts(rows: int, weight: Tensor, begin: int) -> int:
    """Returns the number of partial sums over the columns from ``begin`` on that `skinny_linear` writes."""
    n, k = weight.shape
    block_n = tiling_of(rows, n, k, 1, weight.element_size()).block_n
    return -(-n // block_n) - begin // block_n


def splits_of(weight: Tensor) -> int:
    """Returns the parts of K for a weight [N, K]. In FP8 there are twice as many, because widening takes time, which
    two programs on a multiprocessor spend in turn."""
    (n, k), bytes_each = weight.shape, weight.element_size()
    splits = default_splits(n, k)
    return 2 * splits if bytes_each == 1 and k % (2 * splits * 256) == 0 else splits


def default_splits(n: int, k: int) -> int:
    """Returns the parts of K for about one tile of 64 rows on each of 132 multiprocessors.

    A part is a multiple of 256 if K allows.
    """
    tiles = (n + 63) // 64
    most = max(min(128 // tiles, k // 256), 1)
    return next((s for s in range(most, 0, -1) if k % (256 * s) == 0), most)
