"""DeviceSettings: where an engine computes, in which types, with which kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .groups import DEVICE
from .setting import checked, setting

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The settings of the group DEVICE; `RuntimeConfig` checks them."""

    device: str = setting(
        "auto", DEVICE, "auto (CUDA if the machine has a GPU, else the CPU), cpu, cuda or cuda:N"
    )
    precision: str = setting(
        "auto",
        DEVICE,
        "default of --dtype, --fp8-gemms and --kv-cache-dtype: float32 (float32, off, model), bfloat16 (bfloat16, off, "
        "model), fp8 (bfloat16, all, fp8) or auto (auto, off, auto)",
        choices=("auto", "float32", "bfloat16", "fp8"),
    )
    dtype: str | torch.dtype = setting(
        "auto", DEVICE, "float32, bfloat16, float16, or auto (float32 on a CPU, bfloat16 on CUDA)"
    )
    cpu_threads: int | None = setting(
        None,
        DEVICE,
        "number of CPU threads that one torch operator uses",
        kind="whole",
        flag="--threads",
        metavar="N",
        low=1,
        shown="torch's choice",
    )
    fp8_experts: str = checked("auto", choices=("auto", "keep", "dequantise"))
    """Keep FP8 experts in FP8, or dequantise them; auto keeps them if the GPU computes in FP8."""
    fp8_gemms: str = setting(
        "auto",
        DEVICE,
        "matrix products to compute in FP8: vision, prefill, all or off; faster, but less accurate; needs compute "
        "capability 8.9 or newer; auto: off, or all with --precision fp8",
        choices=("auto", "off", "vision", "prefill", "all"),
    )
    """Never auto after the initialisation. Each row of weights and activations has a scale. The FP8 weights are copies.
    With all, decode steps read them too."""
    attention: str = setting(
        "auto",
        DEVICE,
        "on CUDA, the library for the attention of prompts: flashinfer (which then also decodes), triton (our kernels) "
        "or torch; auto: our kernels with cuDNN, the fastest combination that needs no nvcc",
        choices=("auto", "flashinfer", "triton", "torch"),
    )
    compile: bool = setting(
        True,
        DEVICE,
        "on CUDA, use plain torch operators instead of the Triton kernels",
        flag="--no-compile",
        negated=True,
    )
    kernel_cache_dir: str | Path | None = setting(
        None,
        DEVICE,
        "on CUDA, folder of kernels from 'kestrel-grpc compile', which may be read-only; a kernel that is not there is "
        "compiled into Triton's own cache (TRITON_CACHE_DIR)",
        metavar="DIR",
        shown="Triton's own cache only",
    )
    cuda_graphs: bool = setting(
        True,
        DEVICE,
        "on CUDA, launch every kernel of a decode step separately",
        flag="--no-cuda-graphs",
        negated=True,
    )
    decode_beside: str = checked("auto", choices=("auto", "on", "off"))
    """On CUDA, decode beside images and prompts that take longer than --itl-target-ms; auto: on for models without
    experts. Needs CUDA graphs and our own attention kernels; without them, it has no effect. One H100, 64 requests of
    30 tokens in flight: Moondream 3 answers 57 requests a second with it and 67 without, Moondream 2 82 and 84, with a
    p95 gap between tokens of 18 instead of 59 ms."""
