"""Measures the limits of a device: copied bytes a second and matrix products a second, by the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ..reports.report import median


def synchronize(device: torch.device) -> None:
    """Waits for all enqueued work. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    work: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 2
) -> float:
    """Returns the median seconds of ``work``, by events of the device's current stream, or by the clock on a CPU."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    synchronize(device)
    return median([before.elapsed_time(after) / 1000 for before, after in pairwise(marks)])


def copy_rate(device: torch.device, *, num_bytes: int | None = None) -> float:
    """Returns the bytes a second, read and written, of a copy that is much larger than any cache."""
    if num_bytes is None:
        num_bytes = 4 << 30 if device.type == "cuda" else 64 << 20
    source = torch.empty(num_bytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device, repeats=9)


def gemm_rate(
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    repeats: int = 9,
) -> float:
    """Returns the FLOP/s of x [rows, inner] @ weight [columns, inner].T on random numbers. Caches are not flushed."""
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = (torch.randn(columns, inner, device=device) * inner**-0.5).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    took = seconds_of(lambda: torch.mm(x, weight.T, out=out), device, repeats=repeats)
    return 2 * rows * columns * inner / took


def fp8_gemm_rate(
    rows: int, columns: int, inner: int, device: torch.device, *, row_scales: bool, repeats: int = 9
) -> float:
    """Like `gemm_rate`, for float8_e4m3fn operands and bfloat16 results. Requires compute capability 8.9 or newer.

    ``row_scales``: a scale for each row of both operands instead of one for each operand.
    """
    fp8 = torch.float8_e4m3fn
    x = torch.randn(rows, inner, device=device).to(fp8)
    weight = torch.randn(columns, inner, device=device).to(fp8)
    scales: tuple[Tensor, Tensor]
    if row_scales:
        scales = torch.rand(rows, 1, device=device) + 0.5, torch.rand(1, columns, device=device)
    else:
        scales = torch.ones((), device=device), torch.ones((), device=device)

    def work() -> Tensor:
        return torch._scaled_mm(x, weight.T, *scales, out_dtype=torch.bfloat16)

    return 2 * rows * columns * inner / seconds_of(work, device, repeats=repeats)


def supports_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
