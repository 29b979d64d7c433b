"""What a CPU chooses where nothing is set: the precision, and for a large model the threads and the tiles of an image.

The choice depends on the machine and on free memory, not on how busy it is: answers stay the same after a restart.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..control_groups import CGROUPS, PROC, group_folders

if TYPE_CHECKING:
    from ..checkpoint.open import OpenedModel

LARGE_BYTES = 2**30
"""Models with fewer bytes in float32 answer within seconds on any CPU."""
TINY_BYTES = 2**26
"""Models with fewer bytes in float32 answer at once, and are computed in float32, whose answers are exact."""
MEMORY_SHARE = 0.4
"""The largest share of the machine's memory for weights that are not rounded. KV cache and other programs need some."""


def completed(config: RuntimeConfig, opened: OpenedModel) -> RuntimeConfig:
    """Returns ``config`` with what it leaves open chosen for the model. With a precision that is set, images keep all
    their tiles."""
    import torch

    is_open = config.precision == config.dtype == "auto" and config.weights == "stored"
    if not is_large(opened):
        is_faster = is_open and _float32_bytes(opened) >= TINY_BYTES and multiplies_bfloat16()
        return replace(config, precision="bfloat16") if is_faster else config
    threads = config.cpu_threads or min(torch.get_num_threads(), quota() or 2**16)
    config = replace(config, cpu_threads=threads)
    if not is_open:
        return config
    tiles = config.max_crops or threads * (2 if multiplies_bfloat16() else 1)
    return replace(
        config,
        precision=_precision(opened),
        fp8_gemms="auto",
        weights="auto",
        max_crops=None if tiles >= opened.config.vision.max_crops else tiles,
    )


def is_large(opened: OpenedModel) -> bool:
    """Whether the model takes seconds to answer on a CPU."""
    return _float32_bytes(opened) >= LARGE_BYTES


def _float32_bytes(opened: OpenedModel) -> int:
    import torch

    return opened.weight_bytes(torch.float32, torch.device("cpu"), narrow="wide")


def described(chosen: RuntimeConfig, config: RuntimeConfig) -> str:
    """Returns what ``chosen`` sets and ``config`` does not, with the flags that override it; empty if there is none."""
    parts = []
    if chosen.precision != config.precision:
        rounded = " (rounds weights to 8 bits)" if chosen.precision == "int8" else ""
        parts.append(f"--precision {chosen.precision}{rounded}")
    if chosen.cpu_threads != config.cpu_threads:
        parts.append(f"--threads {chosen.cpu_threads}")
    if chosen.max_crops != config.max_crops:
        parts.append(
            f"at most {chosen.max_crops} tiles of an image whose request sets no max_crops (all tiles with --precision)"
        )
    return f"chosen for this CPU, each flag overrides it: {', '.join(parts)}" if parts else ""


def multiplies_bfloat16() -> bool:
    """Whether torch's products in bfloat16 are faster than those in float32."""
    import torch

    return torch.cpu._is_avx512_bf16_supported()


def _precision(opened: OpenedModel) -> str:
    import torch

    from ..checkpoint.weights.memory import host_available, host_total

    wide = "bfloat16" if multiplies_bfloat16() else "float32"
    total, available = host_total(), host_available()
    if total is None or available is None:
        return wide
    needed = opened.weight_bytes(getattr(torch, wide), torch.device("cpu"), narrow="stored")
    return "int8" if needed > min(MEMORY_SHARE * total, available) else wide


def quota(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Returns the processors whose time the control groups (version 1 or 2) allow, rounded up; None without a limit."""
    found = [_processors(folder) for folder in group_folders("cpu", proc=proc, cgroups=cgroups)]
    return min((limit for limit in found if limit is not None), default=None)


def _processors(group: Path) -> int | None:
    """The limit of one group, at least 1; None without a limit, or if its files can't be read."""
    try:
        if (limits := group / "cpu.max").is_file():
            time, period = limits.read_text("ascii").split()
        elif (limit := group / "cpu.cfs_quota_us").is_file():
            time, period = (
                each.read_text("ascii") for each in (limit, group / "cpu.cfs_period_us")
            )
        else:
            return None
        # Version 2 has "max" and version 1 has -1 where there is no limit.
        return max(1, -(-int(time) // int(period))) if int(time) >= 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
