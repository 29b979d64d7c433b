"""The choices that depend on the device: device, dtype, kernels, and what is computed and kept in FP8.

Imports torch when called, not before.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..checkpoint.open import OpenedModel
    from ..kernels.kernel_cache import CompileMeter
    from ..models.kv_format import Scales

logger = logging.getLogger(__name__)


def compile_meter(carried: Path | None) -> CompileMeter:
    """Prepares Triton's cache. ``carried``: a folder of compiled kernels."""
    from ..kernels.kernel_cache import settle_keys, use_carried_kernels, watch_compiler

    if carried is not None:
        use_carried_kernels(carried)
    settle_keys()
    return watch_compiler()


def uses_kernels(config: RuntimeConfig, device: torch.device) -> bool:
    """Whether GpuRuntime computes, else plain torch. Raises ConfigError for settings that this device can't serve."""
    from ..runtime.gpu.device import library_version, require_supported

    require_supported(device)
    wanted = device.type == "cuda" and config.compile
    kernels = wanted and library_version("triton") is not None
    if device.type == "cuda" and not kernels:
        why = "Triton isn't there" if wanted else "--no-compile"
        logger.warning("%s: plain torch computes on %s, at a fraction of the speed", why, device)
    if config.attention in ("flashinfer", "triton") and not kernels:
        raise ConfigError(
            "attention", config.attention, "needs CUDA and Triton, without --no-compile; else torch"
        )
    if config.attention == "flashinfer" and library_version("flashinfer") is None:
        raise ConfigError("attention", config.attention, "needs the package flashinfer-python")
    return kernels


def keeps_fp8(config: RuntimeConfig, device: torch.device, kernels: bool) -> bool:
    from ..runtime.gpu.device import capabilities

    if config.fp8_experts == "dequantise" or not kernels:
        return config.fp8_experts == "keep"
    found = capabilities(device)
    if config.fp8_experts == "keep" and not found.fp8:
        raise ConfigError(
            "fp8_experts", "keep", f"needs a card of compute capability 8.9; {found.name} is older"
        )
    return found.fp8


def narrow_of(config: RuntimeConfig, device: torch.device, kernels: bool) -> str:
    """The weights that are narrower than the model's dtype, as in checkpoint.weights.rounding. Raises ConfigError."""
    from ..runtime.gpu.footprint import FP8_PREFILL

    if config.weights == "int8" and device.type != "cpu":
        raise ConfigError("weights", "int8", f"is for CPUs, not for {device}; use int4 or fp8")
    # Products in FP8 round the wide weights of the text decoder.
    return "wide" if kernels and config.fp8_gemms in FP8_PREFILL else config.weights


def kv_scales_of(
    config: RuntimeConfig,
    opened: OpenedModel,
    device: torch.device,
    dtype: torch.dtype,
    kernels: bool,
) -> tuple[Scales, ...] | None:
    """Each layer's scales of a KV cache in FP8; None: the cache has the model's dtype. Raises CheckpointError."""
    import torch

    from ..checkpoint.weights import kv_scales
    from ..runtime.gpu.device import capabilities

    choice, layers = config.kv_cache_dtype, opened.config.text.n_layers
    if choice == "auto":
        # A caller who sets float32 wants exact numbers.
        fits = kernels and dtype != torch.float32 and config.attention != "flashinfer"
        if not fits or (device.type == "cuda" and not capabilities(device).fp8):
            return None
        if not kv_scales.is_complete(opened.plan, layers):
            return None
    return None if choice == "model" else kv_scales.read(opened.plan, opened.files, layers)


def check_fp8_gemms(
    config: RuntimeConfig, device: torch.device, dtype: torch.dtype, kernels: bool
) -> None:
    """Raises ConfigError where FP8 products can't be computed. GpuRuntime on a CPU, which only tests build, can."""
    import torch

    from ..runtime.gpu.device import capabilities

    choice = config.fp8_gemms
    if choice == "off":
        return
    if not kernels:
        raise ConfigError(
            "fp8_gemms", choice, "needs CUDA and Triton, without --no-compile; else off"
        )
    if device.type != "cuda":
        return
    if not (found := capabilities(device)).fp8:
        raise ConfigError(
            "fp8_gemms", choice, f"needs a card of compute capability 8.9; {found.name} is older"
        )
    if dtype == torch.float32:
        raise ConfigError("fp8_gemms", choice, "needs dtype bfloat16 or float16")
    from ..runtime.gpu.gemm import fp8_refused

    if (reason := fp8_refused(device, dtype)) is not None:
        raise ConfigError("fp8_gemms", choice, f"torch can't on {found.name}: {reason}")


def check_device(config: RuntimeConfig) -> None:
    """Raises ConfigError for a CUDA device that isn't there."""
    import torch

    if config.device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(config.device.partition(":")[2] or 0)
        if index >= count:
            raise ConfigError("device", config.device, f"torch sees {count} CUDA devices here")


def device_of(config: RuntimeConfig) -> torch.device:
    import torch

    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(config)
    return torch.device(config.device)


def dtype_of(config: RuntimeConfig) -> torch.dtype:
    import torch

    if config.dtype == "auto":
        # With narrow weights, the type is that of activations, which is a matter of speed.
        half = config.weights != "stored" and torch.cpu._is_avx512_bf16_supported()
        on_cpu = device_of(config).type == "cpu"
        return torch.float32 if on_cpu and not half else torch.bfloat16
    dtype = getattr(torch, str(config.dtype))
    assert isinstance(dtype, torch.dtype)
    return dtype
