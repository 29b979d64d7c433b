"""build(config): from a configuration to a runtime. The only place that picks device, dtype, runtime and pool size.

Imports torch when called, not before; Triton only where it is to be used. Everything that can be wrong with the
configuration is found before any weight is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .adapters.library import AdapterLibrary
from .adapters.lora import LoRA
from .config.runtime import RuntimeConfig
from .config.sizes import Sizes
from .errors import ConfigError
from .runtime.protocol import Runtime
from .skills.base import TextCodec
from .types.adapter import Adapter
from .types.calibration import FILE_NAME, UNCALIBRATED, Calibration, from_text
from .types.info import EngineInfo, LoadTimes
from .types.model_config import ModelConfig
from .types.progress import Progress

if TYPE_CHECKING:
    import torch

    from .checkpoint.open import OpenedModel
    from .kernels.compile_meter import CompileMeter
    from .models.kv_format import Scales
    from .models.refiner import Refiner
    from .runtime.gpu.adapters.layout import SlabLayout
    from .runtime.gpu.memory import Pool

logger = logging.getLogger(__name__)


LARGEST_DEFAULT_PAGE = 16
"""Positions. Attention speed doesn't depend on the page size; small pages waste little and share well."""
CPU_POOL_SHARE = 0.5
"""On a CPU the KV pool's default takes at most this share of the memory left beside the weights."""


PLAIN_CROPS = 8
"""Crops that the plain vision tower encodes together."""


@dataclass(frozen=True, slots=True)
class Built:
    """The parts of an engine; ``info.skills``: the skills that the model can do."""

    runtime: Runtime
    model: ModelConfig
    codec: TextCodec
    info: EngineInfo
    compiling: CompileMeter | None = None
    """Counts compiled kernels; None if no kernels are compiled."""
    device_pixels: int = 0
    """Width times height of the largest image whose crops the runtime makes of its pixels; 0: it takes crops only."""
    calibration: Calibration = UNCALIBRATED
    adapters: AdapterLibrary | None = None
    lora: Adapter | None = None
    """The adapter of requests that name none."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The choices for a runtime, without weights and pool."""

    config: RuntimeConfig
    sizes: Sizes
    model: ModelConfig
    page_size: int
    page_bytes: int
    device: torch.device
    dtype: torch.dtype
    kv_scales: tuple[Scales, ...] | None
    refiner: Refiner | None
    slabs: SlabLayout | None
    progress: Progress | None

    @property
    def refine_bytes(self) -> int:
        """Memory for the activations of the masks that one step refines."""
        from .runtime.refinement import refine_bytes
        from .types.step import MOST_REFINED

        if self.refiner is None:
            return 0
        return refine_bytes(self.refiner.config, self.model.vision, self.dtype, MOST_REFINED)


def build(
    config: RuntimeConfig, progress: Progress | None = None, lora: LoRA | None = None
) -> Built:
    """Resolves, checks, downloads if necessary, and loads the model. Blocks. Raises ConfigError or ModelLoadError."""
    import torch

    from .checkpoint.open import load_weights, open_model
    from .checkpoint.refiner import load_refiner
    from .preprocess.tokenizer import Tokenizer
    from .runtime.gpu.memory import out_of_memory
    from .runtime.kv_cache import bytes_per_page, kv_dtype

    device, dtype = _device(config), _dtype(config)
    sizes = config.sizes(cuda=device.type == "cuda")
    kernels = _uses_kernels(config, device)
    _check_fp8_gemms(config, device, dtype, kernels)
    adapters_dir = _adapters_dir(config)
    compiling = _compile_meter() if kernels else None
    if config.attention == "flashinfer" and dtype == torch.float32:
        raise ConfigError("attention", "flashinfer", "needs dtype bfloat16 or float16")
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    opened = open_model(config, progress=progress)
    model = opened.config
    page_size = page_size_of(config, model)
    scales = kv_scales_of(config, opened, device, dtype, kernels)
    cache_dtype = kv_dtype(dtype, scales)
    page_bytes = bytes_per_page(model.text, page_size, cache_dtype)
    _check_pool(config, model, page_size, page_bytes)
    layout = None
    if kernels and (lora is not None or adapters_dir is not None):
        layout = _slab_layout(model, dtype, device)
    adapter = None if lora is None else lora.adapter(model.text, dtype, device, layout)
    codec = Tokenizer.from_file(opened.tokenizer_path, vocab_size=model.text.vocab_size)
    try:
        began = time.monotonic()
        loaded = load_weights(
            opened,
            dtype=dtype,
            device=device,
            keep_fp8=_keeps_fp8(config, device, kernels),
            progress=progress,
        )
        tensors = loaded.tensors
        calibration = read_calibration(config.calibration, opened.files, loaded.fingerprint)
        num_parameters = sum(t.numel() for n, t in tensors.items() if not n.endswith(".scale"))
        weights_bytes = sum(t.nbytes for t in tensors.values())
        read = time.monotonic()
        logger.info("weights: %.2f GB in %.2f s", weights_bytes / 1e9, read - began)
        refiner = None
        if opened.refiner is not None and find_spec("contourpy") is None:
            logger.warning(
                "refiner: %s is not used, because the package contourpy is not installed",
                opened.refiner,
            )
        elif opened.refiner is not None:
            refiner = load_refiner(opened.refiner, model.vision, dtype=dtype, device=device)
            logger.info("refiner: %s", opened.refiner)
        plan = _Plan(
            config,
            sizes,
            model,
            page_size,
            page_bytes,
            device,
            dtype,
            scales,
            refiner,
            layout,
            progress,
        )
        runtime, capture_s = (_gpu_runtime if kernels else _torch_runtime)(plan, tensors)
        built = time.monotonic()
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise out_of_memory(config, sizes.max_batch_size, reason) from error
    limits = runtime.limits
    logger.info(
        "%s: %d pages, %.2f GB of KV cache in %s, in %.2f s",
        type(runtime).__name__,
        limits.num_pages,
        limits.num_pages * page_bytes / 1e9,
        str(cache_dtype).removeprefix("torch."),
        built - read,
    )
    info = EngineInfo(
        model=opened.name,
        family=model.family,
        skills=model.skills,
        max_context=limits.max_seq_length,
        image_positions=model.image_positions,
        vocab_size=model.text.vocab_size,
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        weights_fingerprint=loaded.fingerprint,
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        dtype=str(dtype).removeprefix("torch."),
        max_batch_size=limits.max_batch_size,
        num_pages=limits.num_pages,
        page_size=page_size,
        kv_cache_bytes=limits.num_pages * page_bytes,
        kv_cache_dtype=str(cache_dtype).removeprefix("torch."),
        max_queue=config.max_queue,
        refines=limits.refines,
        torch_version=torch.__version__,
        calibrated=calibration.names,
        load=LoadTimes(
            weights_s=read - began, build_s=built - read - capture_s, capture_s=capture_s
        ),
    )
    adapters = None
    if adapters_dir is not None:
        adapters = AdapterLibrary(
            adapters_dir,
            model,
            dtype=dtype,
            device=device,
            max_bytes=config.adapter_cache_bytes,
            packer=layout,
        )
    if not kernels:
        return Built(
            runtime,
            model,
            codec,
            info,
            compiling,
            calibration=calibration,
            adapters=adapters,
            lora=adapter,
        )
    from .runtime.gpu.footprint import DEVICE_PIXELS

    # Crops are recognised by their bytes, which must be here for that.
    device_pixels = 0 if config.crop_cache_bytes else DEVICE_PIXELS
    return Built(
        runtime, model, codec, info, compiling, device_pixels, calibration, adapters, adapter
    )


def read_calibration(asked: str | Path, weights: Sequence[Path], fingerprint: str) -> Calibration:
    """The calibration that the setting ``asked`` names, for ``weights`` with this fingerprint. Raises ConfigError."""
    path = Path(asked).expanduser()
    if asked == "off":
        return UNCALIBRATED
    if asked == "auto":
        if not weights:
            return UNCALIBRATED
        path = weights[0].parent / FILE_NAME
        if not path.is_file():
            return UNCALIBRATED
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("calibration", str(path), f"cannot be read: {error}") from None
    return from_text(text, str(path), fingerprint)


def _adapters_dir(config: RuntimeConfig) -> Path | None:
    """The folder of adapters. Raises ConfigError."""
    if config.adapters_dir is None:
        return None
    folder = Path(config.adapters_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError("adapters_dir", str(config.adapters_dir), "is not a folder")
    return folder


def _slab_layout(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> SlabLayout:
    from .runtime.gpu.adapters.layout import SlabLayout

    return SlabLayout(model.text, dtype, device)


def _compile_meter() -> CompileMeter:
    from .kernels.compile_meter import watch_compiler

    return watch_compiler()


def _uses_kernels(config: RuntimeConfig, device: torch.device) -> bool:
    """Whether GpuRuntime computes, else plain torch. Raises ConfigError for settings that this device can't serve."""
    from .runtime.gpu.device import library_version, require_supported

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


def _keeps_fp8(config: RuntimeConfig, device: torch.device, kernels: bool) -> bool:
    from .runtime.gpu.device import capabilities

    if config.fp8_experts == "dequantise" or not kernels:
        return config.fp8_experts == "keep"
    found = capabilities(device)
    if config.fp8_experts == "keep" and not found.fp8:
        raise ConfigError(
            "fp8_experts", "keep", f"needs a card of compute capability 8.9; {found.name} is older"
        )
    return found.fp8


def kv_scales_of(
    config: RuntimeConfig,
    opened: OpenedModel,
    device: torch.device,
    dtype: torch.dtype,
    kernels: bool,
) -> tuple[Scales, ...] | None:
    """Each layer's scales of a KV cache in FP8; None: the cache has the model's dtype. Raises CheckpointError."""
    import torch

    from .checkpoint.weights import kv_scales
    from .runtime.gpu.device import capabilities

    asked, layers = config.kv_cache_dtype, opened.config.text.n_layers
    if asked == "auto":
        # A caller who sets float32 wants exact numbers.
        fits = kernels and dtype != torch.float32 and config.attention != "flashinfer"
        if not fits or (device.type == "cuda" and not capabilities(device).fp8):
            return None
        if not kv_scales.is_complete(opened.plan, layers):
            return None
    return None if asked == "model" else kv_scales.read(opened.plan, opened.files, layers)


def _check_fp8_gemms(
    config: RuntimeConfig, device: torch.device, dtype: torch.dtype, kernels: bool
) -> None:
    """Raises ConfigError where FP8 products can't be computed. GpuRuntime on a CPU, which only tests build, can."""
    import torch

    from .runtime.gpu.device import capabilities

    asked = config.fp8_gemms
    if asked == "off":
        return
    if not kernels:
        raise ConfigError(
            "fp8_gemms", asked, "needs CUDA and Triton, without --no-compile; else off"
        )
    if device.type != "cuda":
        return
    if not (found := capabilities(device)).fp8:
        raise ConfigError(
            "fp8_gemms", asked, f"needs a card of compute capability 8.9; {found.name} is older"
        )
    if dtype == torch.float32:
        raise ConfigError("fp8_gemms", asked, "needs dtype bfloat16 or float16")
    from .runtime.gpu.gemm import fp8_refused

    if (reason := fp8_refused(device, dtype)) is not None:
        raise ConfigError("fp8_gemms", asked, f"torch can't on {found.name}: {reason}")


def _torch_runtime(plan: _Plan, tensors: dict[str, torch.Tensor]) -> tuple[Runtime, float]:
    """Builds TorchRuntime. Returns it, and 0 seconds for capturing graphs."""
    from .models.moondream import Moondream
    from .runtime.gpu.footprint import reserve_bytes
    from .runtime.torch_runtime import TorchRuntime

    reserve = 0
    if plan.device.type == "cuda":
        # Plain operators keep what the kernels fuse away.
        reserve = 2 * reserve_bytes(
            plan.model,
            plan.dtype,
            max_batch_size=plan.sizes.max_batch_size,
            max_crops=PLAIN_CROPS,
        )
    pool = _pool(plan, reserve + plan.refine_bytes)
    runtime = TorchRuntime(
        Moondream(plan.model, tensors),
        plan.model,
        num_pages=pool.num_pages,
        page_size=plan.page_size,
        max_batch_size=plan.sizes.max_batch_size,
        max_seq_length=pool.max_seq_length,
        device=plan.device,
        dtype=plan.dtype,
        kv_scales=plan.kv_scales,
        refiner=plan.refiner,
    )
    return runtime, 0.0


def _gpu_runtime(plan: _Plan, tensors: dict[str, torch.Tensor]) -> tuple[Runtime, float]:
    """Builds GpuRuntime. Returns it, and the seconds that capturing graphs took."""
    from .runtime.gpu.runtime import GpuRuntime
    from .runtime.gpu.weights import pack_weights

    sizes = plan.sizes
    pack_weights(plan.model, tensors)
    fp8_gemms = plan.config.fp8_gemms
    reserve = reserve_of(plan.model, plan.dtype, sizes, fp8_gemms=fp8_gemms)
    if plan.config.adapters_dir is not None:
        reserve += plan.config.adapter_cache_bytes
    pool = _pool(plan, reserve + plan.refine_bytes)
    runtime = GpuRuntime(
        plan.model,
        tensors,
        num_pages=pool.num_pages,
        page_size=plan.page_size,
        max_batch_size=sizes.max_batch_size,
        max_seq_length=pool.max_seq_length,
        attention=plan.config.attention,
        fp8_gemms=fp8_gemms,
        kv_scales=plan.kv_scales,
        cuda_graphs=plan.config.cuda_graphs,
        decode_beside=_decodes_beside(plan.config, plan.model),
        max_crops=_most_crops(sizes),
        refiner=plan.refiner,
        adapters=plan.slabs,
        progress=plan.progress,
    )
    return runtime, runtime.capture_s


def _decodes_beside(config: RuntimeConfig, model: ModelConfig) -> bool:
    if config.decode_beside == "auto":
        return model.text.moe is None
    return config.decode_beside == "on"


def _most_crops(sizes: Sizes) -> int:
    """Crops that the vision tower encodes at once: those of the largest step, up to the size of a pass."""
    from .runtime.gpu.attention.patches import BATCHES
    from .scheduler.budget import StepBudget

    return min(sizes.step_crops * StepBudget(crops=sizes.step_crops).idle_scale, BATCHES[-1])


def reserve_of(
    model: ModelConfig, dtype: torch.dtype, sizes: Sizes, *, fp8_gemms: str = "off"
) -> int:
    """Bytes that GpuRuntime needs beside weights and pool, with the largest steps that the scheduler makes."""
    from .runtime.gpu.footprint import reserve_bytes

    return reserve_bytes(
        model,
        dtype,
        max_batch_size=sizes.max_batch_size,
        max_crops=_most_crops(sizes),
        fp8_gemms=fp8_gemms,
    )


def _pool(plan: _Plan, reserve_bytes: int) -> Pool:
    from .checkpoint.weights.memory import device_available
    from .runtime.gpu.memory import CACHED_CONTEXTS, CUDA_SHARE, plan_pool

    cuda = plan.device.type == "cuda"
    if cuda:
        import torch

        # Memory that loading and packing released must count as free.
        torch.cuda.empty_cache()
    return plan_pool(
        device_available(plan.device),
        reserve_bytes + plan.config.crop_cache_bytes,
        plan.page_bytes,
        plan.config,
        plan.model,
        page_size=plan.page_size,
        max_batch_size=plan.sizes.max_batch_size,
        share=CUDA_SHARE if cuda else CPU_POOL_SHARE,
        contexts=CACHED_CONTEXTS if cuda else 1,
    )


def check_device(config: RuntimeConfig) -> None:
    """Raises ConfigError for a CUDA device that isn't there."""
    import torch

    if config.device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(config.device.partition(":")[2] or 0)
        if index >= count:
            raise ConfigError("device", config.device, f"torch sees {count} CUDA devices here")


def _device(config: RuntimeConfig) -> torch.device:
    import torch

    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(config)
    return torch.device(config.device)


def _dtype(config: RuntimeConfig) -> torch.dtype:
    import torch

    if config.dtype == "auto":
        return torch.float32 if _device(config).type == "cpu" else torch.bfloat16
    dtype = getattr(torch, str(config.dtype))
    assert isinstance(dtype, torch.dtype)
    return dtype


def page_size_of(config: RuntimeConfig, model: ModelConfig) -> int:
    """A divisor of the image prefix, so that a prefix fills whole pages and no page is shared half full."""
    prefix = model.image_prefix
    if config.page_size is None:
        return max(n for n in range(1, LARGEST_DEFAULT_PAGE + 1) if prefix % n == 0)
    if prefix % config.page_size:
        divisors = [n for n in range(1, 129) if prefix % n == 0]
        raise ConfigError(
            "page_size",
            config.page_size,
            f"must divide the image prefix {prefix}: one of {divisors}",
        )
    return config.page_size


def _check_pool(config: RuntimeConfig, model: ModelConfig, page_size: int, page_bytes: int) -> None:
    """Raises ConfigError for sizes that can't hold the requests of the warm-up."""
    from .runtime.gpu.memory import given_pages, least_positions

    least = least_positions(model)
    if config.max_seq_length is not None and config.max_seq_length < least:
        raise ConfigError(
            "max_seq_length",
            config.max_seq_length,
            f"must be at least {least}, an image with a short prompt and answer",
        )
    pages = given_pages(config, page_bytes)
    if pages is not None and pages * page_size < least:
        field = "kv_cache_pages" if config.kv_cache_gib is None else "kv_cache_gib"
        raise ConfigError(
            field,
            getattr(config, field),
            f"of {page_size} positions can't hold {least}, an image with a short prompt and answer"
            if config.kv_cache_gib is None
            else f"holds {pages} pages of {page_size} positions; {least} are needed, an image with a short prompt and "
            "answer",
        )
