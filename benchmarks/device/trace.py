"""DeviceTrace: the activity of a GPU by torch's profiler: the time in which kernels ran, and the kernels' shares."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

LONGEST_LISTED = 15
"""The most kernels that a trace lists by name."""


@dataclass(frozen=True)
class DeviceTrace:
    """``busy_s``: seconds in which at least one kernel ran. ``wall_s``: seconds from the first kernel's start to the
    last kernel's end. ``begin``, ``end``: times of the monotonic clock. ``kernels``: name, share of kernel time,
    calls."""

    busy_s: float
    wall_s: float
    num_kernels: int
    begin: float
    end: float
    kernels: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """The share of the wall time; nan if no kernel ran."""
        return self.busy_s / self.wall_s if self.wall_s else float("nan")


def record(seconds: float) -> DeviceTrace:
    """Profiles the device for a number of seconds, for work of all threads. Blocks. Requires CUDA."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    device = torch.autograd.DeviceType.CUDA
    found = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == device
    ]
    return summarised(found, begin, end)


def summarised(found: Iterable[tuple[str, int, int]], begin: float, end: float) -> DeviceTrace:
    """Makes a DeviceTrace of (name, start, end) in ns. Copies and fills do not count as kernels."""
    kernels = [k for k in found if not k[0].startswith(("Memcpy", "Memset"))]
    if not kernels:
        return DeviceTrace(0.0, 0.0, 0, begin, end)
    kernels.sort(key=lambda kernel: kernel[1])
    busy, covered = 0, kernels[0][1]
    times: dict[str, list[int]] = defaultdict(list)
    for name, start, stop in kernels:
        busy += max(0, stop - max(start, covered))
        covered = max(covered, stop)
        times[name].append(stop - start)
    total = sum(map(sum, times.values())) or 1
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:LONGEST_LISTED]
    return DeviceTrace(
        busy_s=busy / 1e9,
        wall_s=(covered - kernels[0][1]) / 1e9,
        num_kernels=len(kernels),
        begin=begin,
        end=end,
        kernels=[(name, sum(each) / total, len(each)) for name, each in longest],
    )
