"""compile_model: fills Triton's cache with all kernels that an engine launches for a model and its settings.

It builds the engine's runtime on a stand-in for the card, and runs what a server runs before it is ready: all passes
that are captured, and the warm-up. Afterwards the process should compute nothing: some modules remember the stand-in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from .. import clock
from ..building.factory import Built, build
from ..checkpoint.catalog import KNOWN, resolve
from ..checkpoint.open import OpenedModel, open_model
from ..checkpoint.weights.loader import stores_fp8
from ..config.adapters import AdapterSources
from ..config.runtime import RuntimeConfig
from ..errors import ConfigError, ModelLoadError
from ..preprocess.crops import cut_crops
from ..preprocess.decoding.decoded_image import DecodedImage
from ..runtime.gpu import capture
from ..runtime.gpu.device import library_version
from ..types.progress import Progress
from ..types.requests import ImageBlock, SamplingParams
from ..types.step import PREVIOUS, EncodeSlice, Row, SampleSpec, StepPlan, TokenRule
from .cards import Card, card_of


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """``compiled``: kernels that were not in the folder before. ``found``: those that were."""

    compiled: int
    found: int
    seconds: float


def compile_kernels(
    configs: Sequence[RuntimeConfig],
    arch: str,
    folder: Path,
    *,
    num_sms: int | None = None,
    progress: Progress | None = None,
) -> Iterator[CompiledKernels]:
    """Compiles the kernels of each configuration for cards of ``arch`` into ``folder``. Needs no GPU. ``num_sms``: the
    multiprocessors of a card with other than the usual number. The process should compute nothing afterwards. Raises
    ConfigError and ModelLoadError."""
    card = card_of(arch, num_sms)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", str(folder), error.strerror or str(error)) from None
    for config in configs:
        yield compile_model(config, card, folder.resolve(), progress)


def compile_model(
    config: RuntimeConfig, card: Card, folder: Path, progress: Progress | None = None
) -> CompiledKernels:
    """Compiles the kernels for ``config`` on ``card`` into ``folder``, but for those that it holds. Reads no weights
    and no network: a named model has its released shape. Raises ConfigError and ModelLoadError."""
    _check(config)
    began, opened = clock.now(), _opened(config)
    settings = replace(
        config,
        device="cuda:0",
        kernel_cache_dir=None,
        calibration="off",
        fp8_experts=config.fp8_experts if _has_fp8_experts(config, opened) else "dequantise",
        # Random weights are in 4 bits only if this asks for it.
        weights="int4" if opened.is_in_four_bits(config.weights) else config.weights,
    )
    # They import Triton.
    from ..kernels.kernel_cache import watch_compiler
    from .launches import compiled_launches
    from .stand_in_card import stand_in

    meter = watch_compiler()
    before = meter.counts
    # What a capture launches was launched by its rehearsal.
    empty_graph = patch.object(capture, "record_graph", lambda body, pool: torch.cuda.CUDAGraph())
    with tempfile.TemporaryDirectory() as empty, _triton_cache(folder), stand_in(card), empty_graph:
        if config.has_adapters:
            settings = replace(settings, adapters_dir=empty, adapter_sources=AdapterSources())
        with compiled_launches(card.compute_capability):
            built = build(settings, progress, opened=_shortened(opened))
            try:
                _start(built)
            finally:
                built.runtime.close()
    after = meter.counts
    return CompiledKernels(
        after.compiled - before.compiled, after.cached - before.cached, clock.now() - began
    )


def _check(config: RuntimeConfig) -> None:
    if not config.compile:
        raise ConfigError("compile", False, "without kernels there is nothing to compile")
    if config.attention == "flashinfer":
        raise ConfigError(
            "attention",
            "flashinfer",
            "compiles its own kernels on a GPU; use auto, triton or torch",
        )
    if library_version("triton") is None:
        raise ModelLoadError("Triton is not installed; pip install ./clients/python '.[gpu]'")
    from triton import knobs

    if knobs.runtime.interpret:
        raise ModelLoadError(
            "TRITON_INTERPRET is set, with which Triton compiles nothing; unset it"
        )


def _opened(config: RuntimeConfig) -> OpenedModel:
    """Returns the model with random weights. Its files' headers are read if the configuration names files."""
    if config.random_weights:
        return open_model(config)
    source = resolve(config.model, config.model_path, config.tokenizer_path)
    if source.hub is None:
        return replace(open_model(config), random_seed=0, refiner=None)
    if source.name not in KNOWN:
        raise ConfigError(
            "model", config.model, "is not a released model; give its files with --weights"
        )
    return open_model(replace(config, model=source.name, random_weights=True))


def _has_fp8_experts(config: RuntimeConfig, opened: OpenedModel) -> bool:
    """Returns whether the model's experts, which random weights have in FP8, are so in its checkpoint."""
    if config.random_weights:
        return True
    if opened.files:
        return stores_fp8(opened.plan)
    known = KNOWN.get(config.model.lower())
    return known is not None and known.fp8


def _shortened(opened: OpenedModel) -> OpenedModel:
    """Returns the model with REHEARSED_LAYERS layers of each kind."""
    text, vision = opened.config.text, opened.config.vision
    dense = text.n_layers if text.moe is None else text.moe.start_layer
    experts = text.n_layers - dense
    few = capture.REHEARSED_LAYERS
    if dense > few:
        dense = few
    moe = None if text.moe is None else replace(text.moe, start_layer=dense)
    text = replace(text, n_layers=dense + min(experts, few), moe=moe)
    vision = replace(vision, enc_n_layers=min(vision.enc_n_layers, few))
    return replace(opened, config=replace(opened.config, text=text, vision=vision))


def _start(built: Built) -> None:
    """Runs what follows the captures until a server is ready: the warm-up, and requests with and without an image."""
    runtime, config = built.runtime, built.model
    side, length = config.vision.crop_size, config.image_prefix
    blank = DecodedImage(np.zeros((side, side, 3), np.uint8))
    image = replace(cut_crops(blank, config.vision, device_pixels=built.device_pixels), key="blank")
    spec = SampleSpec(TokenRule(stop=config.ids.eos_id), SamplingParams(), 0)
    block = ImageBlock(image.key, config.image_positions)
    words = (0,) * 5
    page_size = built.info.page_size
    pages = tuple(range(-(-(length + len(words) + 2) // page_size)))
    prompt = Row(1, (config.ids.bos_id, block, *words), 0, pages, spec)
    text = Row(2, (config.ids.bos_id, *words), 0, pages, None)
    plans = (
        StepPlan(0, encode=(EncodeSlice(image, 0, image.num_crops),)),
        StepPlan(1, prefill=(prompt,)),
        StepPlan(2, prefill=(text,)),
        StepPlan(3, decode=(Row(1, (PREVIOUS,), length + len(words), pages, spec),)),
    )
    for plan in plans:
        runtime.collect(runtime.launch(plan))


@contextmanager
def _triton_cache(folder: Path) -> Iterator[None]:
    """Inside the context, Triton's cache is ``folder``."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        yield
