"""DeviceSettings: where an engine computes, in which types, with which kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .dtypes import PRECISIONS
from .groups import DEVICE
from .setting import checked

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    device: str = DEVICE.setting(
        "auto", "auto (CUDA if the machine has a GPU, else the CPU), cpu, cuda or cuda:N"
    )
    precision: str = DEVICE.setting(
        "auto",
        "type of weights, matrix products, keys and values. auto on a CPU: bfloat16 if the processor multiplies it, "
        "else float32; int8 for a large model where memory is short; float32 for one below 64 MiB. auto on CUDA: "
        "bfloat16, and FP8 keys and values if the checkpoint has scales for them and the GPU converts them. float32, "
        "bfloat16, float16: this type for all; fp8: bfloat16 with all products, keys and values in FP8, faster but "
        "less accurate; only the products (fp8-gemms), those of prompts and images (fp8-prefill) or of images "
        "(fp8-vision), or only keys and values (fp8-kv). FP8 needs compute capability 8.9 or newer. int4: the text "
        "decoder's weights in 4 bits; int8, on a CPU: all large weights in 8 bits. 4-bit checkpoints stay in 4 bits, "
        "except with fp8, fp8-gemms and fp8-prefill",
        choices=tuple(PRECISIONS),
    )
    """Gives the values of dtype, fp8_gemms, kv_cache_dtype and weights where they are auto."""
    dtype: str | torch.dtype = checked("auto")
    """float32, bfloat16, float16, or auto: bfloat16 on CUDA, on a CPU float32 or what `building.cpu_choice` chooses."""
    cpu_threads: int | None = DEVICE.setting(
        None,
        "number of CPU threads that one torch operator uses",
        flag="--threads",
        low=1,
        shown="torch's choice; with a large model, at most what a container's quota allows",
    )
    fp8_experts: str = checked("auto", choices=("auto", "keep", "dequantise"))
    """Keep FP8 experts in FP8, or dequantise them; auto keeps them if the GPU computes in FP8."""
    fp8_gemms: str = checked("auto", choices=("auto", "off", "vision", "prefill", "all"))
    """Matrix products to compute in FP8; never auto after the initialisation. Each row of weights and activations has a
    scale. The FP8 weights are copies. With all, decode steps read them too."""
    kv_cache_dtype: str = checked("auto", choices=("auto", "model", "fp8"))
    """The type of keys and values. FP8 takes half the bytes and is less accurate. It uses the checkpoint's scales, and
    1 for a scale that the checkpoint lacks. "auto" requires such scales, compute capability 8.9 or newer and a
    computation in bfloat16 or float16; otherwise it is the model's type."""
    weights: str = checked("auto", choices=("auto", "stored", "int4", "int8"))
    """Round the weights of linears to 4 or 8 bits while they are loaded, or keep what the checkpoint stores; never auto
    after the initialisation. Activations have ``dtype``; on a CPU, auto is bfloat16 with int4 and int8 if the processor
    multiplies bfloat16."""
    attention: str = DEVICE.setting(
        "auto",
        "on CUDA, the library for the attention of prompts: flashinfer (which then also decodes), triton (our kernels) "
        "or torch; auto: our kernels with cuDNN, the fastest combination that needs no nvcc",
        choices=("auto", "flashinfer", "triton", "torch"),
    )
    compile: bool = DEVICE.setting(
        True,
        "on CUDA, use plain torch operators instead of the Triton kernels",
        flag="--no-compile",
        negated=True,
    )
    kernel_cache_dir: str | Path | None = DEVICE.setting(
        None,
        "on CUDA, folder of kernels from 'kestrel-grpc compile', which may be read-only; a kernel that is not there is "
        "compiled into Triton's own cache (TRITON_CACHE_DIR)",
        metavar="DIR",
        shown="Triton's own cache only",
    )
    cuda_graphs: bool = checked(True)
    """On CUDA, launch a decode step as a graph. False launches each of its kernels separately, for debugging."""
    decode_beside: str = checked("auto", choices=("auto", "on", "off", "slices"))
    """On CUDA, decode beside images and prompts that take longer than --itl-target-ms. Needs CUDA graphs and our own
    attention kernels; without them, it has no effect. One H100, 64 requests of 30 tokens in flight: Moondream 3 answers
    57 requests a second with it and 67 without, Moondream 2 82 and 84, with a p95 gap between tokens of 18 instead of
    59 ms. slices: decode with each short step of crops or of prompts (config/sizes.py); on a CPU, too. auto on CUDA:
    slices for models with experts, on for others."""
