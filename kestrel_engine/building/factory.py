"""build(config): from a configuration to a runtime, with its weights and what stands beside it.

Imports torch when called, not before; Triton only where it is to be used. All errors of the configuration are found
before any weight is read.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .. import clock
from ..adapters.library import AdapterLibrary
from ..adapters.lora import LoRA
from ..adapters.origins.origins import Origins
from ..config.runtime import RuntimeConfig
from ..config.sizes import Sizes
from ..errors import ConfigError
from ..runtime.protocol import Runtime
from ..skills.base import TextCodec
from ..types.adapter import Adapter
from ..types.calibration import UNCALIBRATED, Calibration
from ..types.info import EngineInfo, LoadTimes
from ..types.model_config import ModelConfig
from ..types.progress import Progress
from ..types.step import RuntimeLimits
from . import cpu_choice
from .claims import CLAIMS
from .device import (
    check_fp8_gemms,
    compile_meter,
    device_of,
    dtype_of,
    keeps_fp8,
    kv_scales_of,
    narrow_of,
    uses_kernels,
)
from .files import adapter_origins, kernel_cache_folder, read_calibration
from .kv_pool import check_pool, out_of_memory
from .room import Plan, fitted
from .runtimes import runtime_of

if TYPE_CHECKING:
    import torch

    from ..checkpoint.open import OpenedModel
    from ..kernels.kernel_cache import CompileMeter
    from ..models.refiner import Refiner
    from .early_kernels import EarlyKernels

logger = logging.getLogger(__name__)
FLASHINFER_HEADS = (64, 128, 256)
"""Head sizes for which FlashInfer merges the parts of a split sequence."""


@dataclass(frozen=True, slots=True)
class Built:
    """The parts of an engine; ``info.skills``: the skills that the model can do."""

    runtime: Runtime
    model: ModelConfig
    codec: TextCodec
    info: EngineInfo
    sizes: Sizes
    compiling: CompileMeter | None = None
    """Counts compiled kernels; None if no kernels are compiled."""
    device_pixels: int = 0
    """Width times height of the largest image whose crops the runtime makes of its pixels; 0: it takes crops only."""
    calibration: Calibration = UNCALIBRATED
    adapters: AdapterLibrary | None = None
    lora: Adapter | None = None
    """The adapter of requests that name none."""


async def build_off_loop(
    config: RuntimeConfig, progress: Progress | None = None, lora: LoRA | None = None
) -> Built:
    """As `build`, in a thread that ends with it: cuBLAS keeps 32 MB for each stream of a living thread."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="kestrel-loading")
    try:
        loading = thread.submit(copy_context().run, build, config, progress, lora)
        return await asyncio.wrap_future(loading)
    finally:
        thread.shutdown(wait=False)


def build(
    config: RuntimeConfig,
    progress: Progress | None = None,
    lora: LoRA | None = None,
    *,
    opened: OpenedModel | None = None,
) -> Built:
    """Resolves, checks, downloads if necessary, and loads the model. Blocks. ``opened``: the model, if the caller has
    opened it. Raises ConfigError or ModelLoadError."""
    with ExitStack() as running:
        return _build(config, progress, lora, opened, running)


def _early_kernels(
    config: RuntimeConfig, model: ModelConfig, running: ExitStack
) -> EarlyKernels | None:
    """Begins to compile the kernels that are missing, if the runtime will launch kernels on a GPU."""
    device = device_of(config)
    if device.type != "cuda" or config.kernel_cache_dir is not None:
        return None
    if not uses_kernels(config, device) or config.attention == "flashinfer":
        return None
    from triton import knobs

    from ..runtime.gpu.device import capabilities
    from .early_kernels import EarlyKernels

    begun = EarlyKernels.begin(config, model, capabilities(device), Path(knobs.cache.dir))
    if begun is not None:
        running.callback(begun.close)
    return begun


@dataclass(frozen=True, slots=True)
class _Weights:
    """``seconds``: that reading took."""

    tensors: dict[str, torch.Tensor]
    fingerprint: str
    calibration: Calibration
    num_parameters: int
    num_bytes: int
    seconds: float


def _build(
    config: RuntimeConfig,
    progress: Progress | None,
    lora: LoRA | None,
    opened: OpenedModel | None,
    running: ExitStack,
) -> Built:
    """As `build`: first what can be wrong, then the weights. ``running``: for what must end with this call."""
    import torch

    from ..checkpoint.open import open_model
    from ..preprocess.tokenizer import Tokenizer
    from ..runtime.gpu.footprint import DEVICE_PIXELS
    from ..runtime.thread_choice import forget_passes

    forget_passes()
    device, dtype = device_of(config), dtype_of(config)
    kernels = uses_kernels(config, device)
    check_fp8_gemms(config, device, dtype, kernels)
    origins = adapter_origins(config)
    carried = kernel_cache_folder(config)
    compiling = compile_meter(carried) if kernels else None
    if config.attention == "flashinfer" and dtype == torch.float32:
        raise ConfigError("attention", "flashinfer", "needs dtype bfloat16 or float16")
    early = None
    if opened is None:
        opened = open_model(config, progress=progress)
        early = _early_kernels(config, opened.config, running)
    if device.type == "cpu":
        config = _completed_for_cpu(config, opened)
        dtype = dtype_of(config)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    plan = _plan(
        config,
        opened,
        device,
        dtype,
        kernels,
        progress,
        adapted=lora is not None or origins is not None,
    )
    model, slabs = plan.model, plan.slabs
    check_pool(config, model, plan.page_size, plan.page_bytes)
    adapter = None if lora is None else lora.adapter(model.text, dtype, device, slabs)
    codec = Tokenizer.from_file(opened.tokenizer_path, vocab_size=model.text.vocab_size)
    try:
        with CLAIMS.turn(device):
            weights = _load(plan, opened)
            read_at = clock.now()
            refiner = _refiner(opened, plan)
            if early is not None:
                early.wait(progress)
            if kernels:
                from ..runtime.gpu.weights import pack_weights

                pack_weights(plan.model, weights.tensors)
            plan = fitted(plan, refiner)
            runtime, capture_s = runtime_of(plan, weights.tensors, refiner, opened.name)
            adapters = None
            if origins is not None:
                adapters = _adapter_library(origins, plan)
            built_s = clock.now() - read_at
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise out_of_memory(config, plan.sizes.max_batch_size, reason) from error
    load = LoadTimes(weights_s=weights.seconds, build_s=built_s - capture_s, capture_s=capture_s)
    info = _info(opened, plan, weights, runtime.limits, load)
    _log(runtime, info, built_s, compiling)
    return Built(
        runtime,
        model,
        codec,
        info,
        plan.sizes,
        compiling=compiling,
        device_pixels=DEVICE_PIXELS if kernels else 0,
        calibration=weights.calibration,
        adapters=adapters,
        lora=adapter,
    )


def _plan(
    config: RuntimeConfig,
    opened: OpenedModel,
    device: torch.device,
    dtype: torch.dtype,
    kernels: bool,
    progress: Progress | None,
    adapted: bool,
) -> Plan:
    """``adapted``: the weights or requests have adapters. Raises ConfigError where the model refuses a choice."""
    model = _seen(opened.config, config)
    if config.attention == "flashinfer":
        _check_flashinfer(model)
    scales = kv_scales_of(config, opened, device, dtype, kernels)
    slabs = None
    if kernels and adapted:
        from ..runtime.gpu.adapters.layout import SlabLayout

        slabs = SlabLayout(model, dtype, device)
    narrow = narrow_of(config, device, kernels)
    return Plan(
        config,
        model,
        device,
        dtype,
        kernels,
        scales,
        slabs,
        progress,
        narrow=narrow,
        four_bits=opened.is_in_four_bits(narrow),
    )


def _completed_for_cpu(config: RuntimeConfig, opened: OpenedModel) -> RuntimeConfig:
    """With what `cpu_choice` chooses for the model, which the log names."""
    completed = cpu_choice.completed(config, opened)
    if choice := cpu_choice.described(completed, config):
        logger.info("%s: %s", opened.name, choice)
    return completed


def _check_flashinfer(model: ModelConfig) -> None:
    """Raises ConfigError where FlashInfer's kernels don't take the model's heads."""
    head_dim = model.text.head_dim
    if head_dim not in FLASHINFER_HEADS:
        reason = f"has no kernels for heads of {head_dim} values"
        raise ConfigError("attention", "flashinfer", reason)


def _seen(model: ModelConfig, config: RuntimeConfig) -> ModelConfig:
    """The model, with the limit on the tiles of images whose requests set none."""
    return replace(model, vision=model.vision.within(config.max_crops or 0))


def _load(plan: Plan, opened: OpenedModel) -> _Weights:
    """Reads weights and calibration. Raises InsufficientMemoryError and ModelLoadError."""
    import torch

    from ..checkpoint.open import load_weights
    from ..checkpoint.weights.memory import returning_what_is_freed

    config, device, dtype = plan.config, plan.device, plan.dtype
    keep_fp8 = keeps_fp8(config, device, plan.kernels)
    fitted(plan, None, opened.weight_bytes(dtype, device, keep_fp8=keep_fp8, narrow=plan.narrow))
    began = clock.now()
    on_cpu = device.type == "cpu"
    with returning_what_is_freed() if on_cpu and cpu_choice.is_large(opened) else nullcontext():
        loaded = load_weights(
            opened,
            dtype=dtype,
            device=device,
            keep_fp8=keep_fp8,
            narrow=plan.narrow,
            progress=plan.progress,
        )
    calibration = read_calibration(config.calibration, opened.files, loaded.fingerprint)
    # The runtime packs the tensors, so they are counted now.
    num_parameters = sum(
        t.numel() * (2 if t.dtype == torch.uint8 else 1)
        for n, t in loaded.tensors.items()
        if not n.endswith(".scale")
    )
    num_bytes = sum(t.nbytes for t in loaded.tensors.values())
    seconds = clock.now() - began
    logger.info("weights: %.2f GB in %.2f s", num_bytes / 1e9, seconds)
    return _Weights(
        loaded.tensors, loaded.fingerprint, calibration, num_parameters, num_bytes, seconds
    )


def _info(
    opened: OpenedModel, plan: Plan, weights: _Weights, limits: RuntimeLimits, load: LoadTimes
) -> EngineInfo:
    import torch

    model, device = plan.model, plan.device
    return EngineInfo(
        model=opened.name,
        family=model.family,
        skills=model.skills,
        max_context=limits.max_seq_length,
        image_positions=model.image_positions,
        max_crops=model.vision.max_crops,
        vocab_size=model.text.vocab_size,
        num_parameters=weights.num_parameters,
        weights_bytes=weights.num_bytes,
        weights_fingerprint=weights.fingerprint,
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        dtype=str(plan.dtype).removeprefix("torch."),
        weights="int4" if plan.four_bits else plan.narrow if plan.narrow == "int8" else "",
        max_batch_size=limits.max_batch_size,
        num_pages=limits.num_pages,
        page_size=plan.page_size,
        kv_cache_bytes=limits.num_pages * plan.page_bytes,
        kv_cache_dtype=str(plan.kv_dtype).removeprefix("torch."),
        max_queue=plan.config.max_queue,
        torch_version=torch.__version__,
        refines=limits.refines,
        calibrated=weights.calibration.names,
        load=load,
    )


def _log(
    runtime: Runtime, info: EngineInfo, built_s: float, compiling: CompileMeter | None
) -> None:
    logger.info(
        "%s: %d pages, %.2f GB of KV cache in %s, in %.2f s",
        type(runtime).__name__,
        info.num_pages,
        info.kv_cache_bytes / 1e9,
        info.kv_cache_dtype,
        built_s,
    )
    if compiling is not None:
        counts = compiling.counts
        logger.info(
            "kernels: %d found compiled, %d compiled, in %.2f s",
            counts.cached,
            counts.compiled,
            counts.seconds,
        )


def _refiner(opened: OpenedModel, plan: Plan) -> Refiner | None:
    """The refiner of outlines; None if the model has none, or it cannot be used."""
    from ..checkpoint.refiner import load_refiner

    if opened.refiner is None:
        return None
    if find_spec("contourpy") is None:
        logger.warning(
            "refiner: %s is not used, because the package contourpy is not installed",
            opened.refiner,
        )
        return None
    refiner = load_refiner(opened.refiner, plan.model.vision, dtype=plan.dtype, device=plan.device)
    logger.info("refiner: %s", opened.refiner)
    return refiner


def _adapter_library(origins: Origins, plan: Plan) -> AdapterLibrary:
    """The named adapters, and what copies them to a device that is no CPU."""
    from ..runtime.gpu.adapters.upload import SlabUpload

    config, upload = plan.config, None
    if plan.device.type == "cuda":
        upload = SlabUpload(plan.device, 0 if plan.slabs is None else config.adapter_cache_bytes)
    return AdapterLibrary(
        origins,
        plan.model,
        dtype=plan.dtype,
        max_bytes=config.adapter_cache_bytes,
        host_bytes=config.adapter_sources.host_bytes,
        packer=plan.slabs,
        upload=upload,
    )
