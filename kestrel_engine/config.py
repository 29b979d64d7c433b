"""RuntimeConfig: what the user decides, checked once, before any weight is read.

Knows no torch and probes no device: what the device decides (number of pages, captured batch sizes) is
``step.RuntimeLimits``, and the fields that it chooses defaults for are settled by ``sizes``. Reads no environment; that
is the service's ``settings`` package. A new knob is one field made with ``setting``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError
from .settings import SettingGroup, check_settings, setting

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "kestrel-tiny"
DTYPES = ("float32", "bfloat16", "float16")

MODEL = SettingGroup("model", "model")
DEVICE = SettingGroup("device", "device")
REQUESTS = SettingGroup("limits and defaults of requests", "requests")
SCHEDULER = SettingGroup("caches and steps", "scheduler")

_DTYPE_ALIASES = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "auto": "auto",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits on an image, checked from its header before any pixel is decoded."""

    max_bytes: int = setting(
        32 * 1024 * 1024,
        REQUESTS,
        "largest encoded image",
        kind="bytes",
        flag="--max-image-bytes",
        metavar="SIZE",
        low=1,
    )
    """32 MiB holds a 24 megapixel PNG."""
    max_pixels: int = setting(
        100_000_000,
        REQUESTS,
        "most pixels of an image, width times height",
        kind="whole",
        flag="--max-image-pixels",
        metavar="N",
        low=1,
    )
    """100 megapixels is the largest common camera."""
    max_aspect_ratio: float = setting(
        20.0,
        REQUESTS,
        "longest side of an image over its shortest",
        kind="number",
        flag="--max-image-aspect-ratio",
        metavar="RATIO",
        low=1,
    )
    """Beyond it the resize to crops leaves nothing to see."""
    max_progressive_pixels: int = setting(
        64_000_000,
        REQUESTS,
        "most pixels of a progressive JPEG, all of whose coefficients are kept until its end",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_interlaced_pixels: int = setting(
        64_000_000,
        REQUESTS,
        "most pixels of an interlaced PNG, which is decoded as a whole",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_webp_pixels: int = setting(
        40_000_000,
        REQUESTS,
        "most pixels of a WebP, which is decoded as a whole",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_avif_pixels: int = setting(
        24_000_000,
        REQUESTS,
        "most pixels of an AVIF, the dearest format in time and memory",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_heic_pixels: int = setting(
        24_000_000,
        REQUESTS,
        "most pixels of a HEIC, as dear as AVIF",
        kind="whole",
        metavar="N",
        low=1,
    )
    """The limits by format are lower than ``max_pixels`` where a pixel costs more (preprocess/costs.py)."""

    def __post_init__(self) -> None:
        check_settings(self, "image_limits.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The fields of RuntimeConfig whose defaults depend on the device, settled."""

    max_batch_size: int
    step_prefill_positions: int
    step_crops: int
    step_pause: float
    steps_out: int
    preprocess_threads: int


_CPU_SIZES = Sizes(
    max_batch_size=16,
    step_prefill_positions=768,
    step_crops=3,
    step_pause=0.0,
    steps_out=2,
    preprocess_threads=2,
)
"""Sixteen decode six times as fast together as one after the other; a step takes on one image prefix."""
_CUDA_SIZES = Sizes(
    max_batch_size=64,
    step_prefill_positions=11680,
    step_crops=48,
    step_pause=4.0,
    steps_out=3,
    preprocess_threads=2,
)
"""Four images a step, crops and prefixes together. One H200, 64 in flight, 3 tokens: 92 requests a second with three
eighths of it, 97 with three quarters (Moondream 2), 80 and 82 with three quarters and all (Moondream 3); between tokens
it shows as 50 to 80 ms while new images keep coming. Moondream 2, 30 tokens, by ``step_pause`` and ``steps_out``: 72
with 0 and 2, 77 with 2 and 3, 79 with 4 and 2, 84 with 4 and 3. ``preprocess_threads`` grows with the processors, up to
MOST_PREPROCESS_THREADS."""
MOST_PREPROCESS_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How to build an engine.

    ``model`` and ``model_path`` are alternatives: a name (``kestrel-tiny``, ``moondream2``,
    ``moondream3-preview``, ``moondream3.1-9b-a2b``, a hub id ``org/repo[@revision][:file]``, or a path), or a path.
    Each field's ``help`` says what it does. None leaves a value to the device or the model. Raises ConfigError naming
    field, value and limit.
    """

    model: str = setting(
        DEFAULT_MODEL,
        MODEL,
        "kestrel-tiny, moondream2, moondream3-preview, moondream3.1-9b-a2b, "
        "a hub id ORG/REPO[@REVISION][:FILE], or a path",
    )
    model_path: str | Path | None = setting(
        None,
        MODEL,
        "a checkpoint folder, or one .safetensors or .pt file, instead of the model's own weights",
        flag="--weights",
        aliases=("--model-path",),
        metavar="PATH",
        shown="the model's own",
    )
    tokenizer_path: str | Path | None = setting(
        None,
        MODEL,
        "tokenizer.json",
        flag="--tokenizer",
        metavar="PATH",
        shown="beside the weights, else the model's own",
    )
    offline: bool = setting(
        False, MODEL, "use only what is in the hub's cache or given as files", switch=True
    )
    device: str = setting("auto", DEVICE, "auto (CUDA if there is one), cpu, cuda or cuda:N")
    dtype: str | torch.dtype = setting(
        "auto", DEVICE, "float32, bfloat16, float16, or auto (float32 on a CPU, bfloat16 on CUDA)"
    )
    cpu_threads: int | None = setting(
        None,
        DEVICE,
        "threads of one operator on a CPU",
        kind="whole",
        flag="--threads",
        metavar="N",
        low=1,
        shown="torch's choice",
    )
    fp8_experts: str = setting(
        "auto",
        DEVICE,
        "keep FP8 experts in FP8, or dequantise them; auto keeps them where the GPU computes in FP8",
        choices=("auto", "keep", "dequantise"),
    )
    fp8_gemms: str = setting(
        "off",
        DEVICE,
        "matrix products computed in FP8: vision, prefill, all or off; faster for some accuracy, from compute "
        "capability 8.9 on",
        choices=("off", "vision", "prefill", "all"),
    )
    """Weights and activations are scaled row by row; the weights are copied. Decode steps keep their type."""
    random_weights: bool = setting(
        False,
        MODEL,
        "make the weights up, for the named model or a config.json, and read none; to measure speed with",
        switch=True,
    )
    attention: str = setting(
        "auto",
        DEVICE,
        "on CUDA, the library of prompt attention: flashinfer (which then decodes too), triton (our kernels) or torch; "
        "auto takes the fastest that needs no nvcc, our kernels with cuDNN",
        choices=("auto", "flashinfer", "triton", "torch"),
    )
    compile: bool = setting(
        True,
        DEVICE,
        "on CUDA, plain torch operators instead of the Triton kernels",
        flag="--no-compile",
        negated=True,
    )
    cuda_graphs: bool = setting(
        True,
        DEVICE,
        "on CUDA, launch every kernel of a decode step by itself",
        flag="--no-cuda-graphs",
        negated=True,
    )
    seed: int | None = setting(
        None,
        MODEL,
        "makes the seeds of requests that name none repeatable, and chooses --random-weights",
        kind="whole",
        metavar="N",
        low=0,
        high=2**64 - 1,
        shown="drawn anew",
    )
    max_batch_size: int | None = setting(
        None,
        REQUESTS,
        "most requests that one step computes together",
        kind="whole",
        metavar="N",
        low=1,
        high=4096,
        shown="16, on CUDA 64",
    )
    max_seq_length: int | None = setting(
        None,
        REQUESTS,
        "most positions of one request: image, prompt and answer together",
        kind="whole",
        metavar="N",
        low=2,
        shown="the model's context",
    )
    page_size: int | None = None
    """KV positions a page; must divide the image prefix. Default: the largest divisor up to 16."""
    max_queue: int = setting(
        512,
        REQUESTS,
        "most requests that wait, preprocessing included; more get RESOURCE_EXHAUSTED",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_queued_pixels: int = setting(
        4_000_000_000,
        REQUESTS,
        "most pixels of images that wait to be decoded",
        kind="whole",
        metavar="N",
        low=1,
    )
    """A decoder makes some 100 million pixels a second."""
    decode_bytes: int = setting(
        1024 * 1024 * 1024,
        REQUESTS,
        "memory for the images that are being decoded, all together",
        kind="bytes",
        metavar="SIZE",
        low=64 * 1024 * 1024,
    )
    """Half at most is for cheap images, one in each decoder; a dear one waits until it fits into the rest."""
    decode_timeout_s: float = setting(
        30.0,
        REQUESTS,
        "longest time that one image may be decoded; more gets INVALID_ARGUMENT",
        kind="seconds",
        metavar="SECONDS",
        above=0,
    )
    max_queue_wait_s: float | None = setting(
        None,
        REQUESTS,
        "how long a request may wait before it gets RESOURCE_EXHAUSTED",
        kind="seconds",
        metavar="SECONDS",
        above=0,
        shown="as long as the caller waits",
    )
    max_new_tokens: int | None = setting(
        None,
        REQUESTS,
        "most tokens of one answer, its reasoning included; a request that names more as max_tokens is refused",
        kind="whole",
        metavar="N",
        low=1,
        shown="what the context has room for",
    )
    default_max_tokens: int = setting(
        768,
        REQUESTS,
        "most tokens of an answer when a request names no max_tokens",
        kind="whole",
        flag="--default-max-new-tokens",
        metavar="N",
        low=1,
    )
    """Shrinks to the room that is left in the context."""
    max_text_bytes: int = setting(
        32 * 1024 - 1,
        REQUESTS,
        "most UTF-8 bytes of a question or an object's name",
        kind="bytes",
        metavar="SIZE",
        low=1,
    )
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    default_temperature: float = 0.2
    """For query and caption; point, detect and segment are greedy."""
    default_top_p: float = 0.9
    """For query and caption."""
    default_max_objects: int = 150
    """For point and detect."""
    kv_cache_pages: int | None = setting(
        None,
        SCHEDULER,
        "pages of the KV cache",
        kind="whole",
        metavar="N",
        low=1,
        shown="max-batch-size full requests, on CUDA eight times as many, as far as memory allows",
    )
    kv_cache_gib: float | None = setting(
        None,
        SCHEDULER,
        "size of the KV cache instead of its pages, rounded down to whole pages",
        kind="number",
        metavar="GIB",
        above=0,
        shown="as --kv-cache-pages",
    )
    kv_cache_dtype: str = setting(
        "auto",
        SCHEDULER,
        "keys and values in the model's type (model) or in FP8 (fp8): half the bytes for some accuracy; auto: fp8 "
        "where the checkpoint has scales for it and the GPU converts it",
        choices=("auto", "model", "fp8"),
    )
    """FP8 takes the checkpoint's scales, or 1 where it has none. "auto" asks for compute capability 8.9 and a
    computation in bfloat16 or float16."""
    prefix_cache: bool = setting(
        True, SCHEDULER, "reuse what was computed for prompts and images seen before"
    )
    kept_embeddings: int = 16
    """Image embeddings kept for images whose pages were evicted."""
    priority_aging_s: float = 10.0
    """A priority that was not served for so many seconds counts as one better, so that low priority never starves."""
    image_cache_bytes: int = setting(
        256 * 1024 * 1024,
        SCHEDULER,
        "decoded images kept in memory for repeats; 0 keeps none",
        kind="bytes",
        metavar="SIZE",
        low=0,
    )
    """One takes 1 to 6 MB."""
    step_prefill_positions: int | None = setting(
        None,
        SCHEDULER,
        "prompt positions that a step computes beside decoding rows: fewer make tokens smoother, more start requests "
        "sooner",
        kind="whole",
        metavar="N",
        low=1,
        shown="768, on CUDA 11680",
    )
    step_crops: int | None = setting(
        None,
        SCHEDULER,
        "crops of images that a step encodes beside decoding rows; shares one allowance with the positions",
        kind="whole",
        metavar="N",
        low=1,
        shown="3, on CUDA 48",
    )
    step_pause: float | None = setting(
        None,
        SCHEDULER,
        "steps that only decode after one that took on all the new work it may; requests that arrive meanwhile start "
        "together",
        kind="number",
        metavar="N",
        low=0,
        high=1000,
        shown="0, on CUDA 4",
    )
    steps_out: int | None = setting(
        None,
        SCHEDULER,
        "steps launched and not yet read, 1 to 4: more hide a busy host",
        kind="whole",
        metavar="N",
        low=1,
        high=4,
        shown="2, on CUDA 3",
    )
    """Each costs a row of every answer that ends by itself, and a step's time before new requests begin."""
    preprocess_threads: int | None = setting(
        None,
        SCHEDULER,
        "images decoded at once",
        kind="whole",
        metavar="N",
        low=1,
        shown="2, on CUDA two less than the processors, up to 8",
    )
    step_timeout_s: float = setting(
        300.0,
        SCHEDULER,
        "the engine counts as hung if no step ends for this long while there is work",
        kind="seconds",
        metavar="SECONDS",
        above=0,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ConfigError("model", self.model, "must be a model name, hub id or path")
        for name in ("model_path", "tokenizer_path"):
            value = getattr(self, name)
            if value is not None and not str(value):
                raise ConfigError(name, value, "must not be empty")
        self._check_device()
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_settings(self)
        if self.kv_cache_dtype == "fp8" and self.attention == "flashinfer":
            raise ConfigError(
                "kv_cache_dtype",
                "fp8",
                "needs another attention than flashinfer: auto, triton or torch",
            )
        if self.kv_cache_gib is not None and self.kv_cache_pages is not None:
            raise ConfigError(
                "kv_cache_gib",
                self.kv_cache_gib,
                f"excludes kv_cache_pages={self.kv_cache_pages}: give one of the two",
            )
        self._check_embedded()

    def sizes(self, *, cuda: bool) -> Sizes:
        """What was left to the device, settled for one: every reader of these fields asks here."""
        chosen = _CUDA_SIZES if cuda else _CPU_SIZES
        if cuda:
            threads = min(max(_processors() - 2, 2), MOST_PREPROCESS_THREADS)
            chosen = replace(chosen, preprocess_threads=threads)
        given = {f.name: getattr(self, f.name) for f in fields(Sizes)}
        return replace(chosen, **{k: v for k, v in given.items() if v is not None})

    def _check_embedded(self) -> None:
        """The fields that no command line sets."""
        if self.page_size is not None:
            _whole("page_size", self.page_size, 1)
        _whole("default_max_objects", self.default_max_objects, 1)
        _whole("kept_embeddings", self.kept_embeddings, 0)
        if not _finite(self.priority_aging_s) or self.priority_aging_s <= 0:
            limit = "must be a finite number of seconds above 0"
            raise ConfigError("priority_aging_s", self.priority_aging_s, limit)
        if not _finite(self.default_temperature) or self.default_temperature < 0:
            limit = "must be finite and at least 0"
            raise ConfigError("default_temperature", self.default_temperature, limit)
        if not _finite(self.default_top_p) or not 0 < self.default_top_p <= 1:
            raise ConfigError("default_top_p", self.default_top_p, "must be in (0, 1]")

    def _check_device(self) -> None:
        kind, _, index = (
            self.device.partition(":") if isinstance(self.device, str) else ("", "", "")
        )
        if kind not in ("auto", "cpu", "cuda") or (
            index and (kind != "cuda" or not index.isdigit())
        ):
            raise ConfigError("device", self.device, 'must be "auto", "cpu", "cuda" or "cuda:N"')


def dtype_name(dtype: object) -> str:
    """The canonical name of a dtype given as torch.dtype or string; raises ConfigError."""
    name = _DTYPE_ALIASES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise ConfigError(
            "dtype", dtype, f"must be auto, {', '.join(DTYPES)} or the torch.dtype of that name"
        )
    return name


def _processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(name, value, f"must be a whole number of at least {low}")
