"""RuntimeConfig: what the user decides, checked once, before any weight is read.

Knows no torch and probes no device: what the device decides (number of pages, captured batch sizes) is
``step.RuntimeLimits``, and the fields that it chooses defaults for are settled by ``sizes``. Reads no environment; that
is the service's ``settings.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "kestrel-tiny"
DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "flashinfer", "triton", "torch")
FP8_EXPERTS = ("auto", "keep", "dequantise")
KV_CACHE_DTYPES = ("auto", "model", "fp8")
FP8_GEMMS = ("off", "vision", "prefill", "all")
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
    """Limits on a picture, checked from its header before any pixel is decoded."""

    max_bytes: int = 32 * 1024 * 1024
    """Encoded size in bytes. 32 MiB holds a 24 megapixel PNG."""
    max_pixels: int = 100_000_000
    """Width times height. 100 megapixels is the largest common camera."""
    max_aspect_ratio: float = 20.0
    """Longer side over shorter. Beyond it the resize to crops leaves nothing to see."""

    def __post_init__(self) -> None:
        _whole("image_limits.max_bytes", self.max_bytes, 1)
        _whole("image_limits.max_pixels", self.max_pixels, 1)
        if not _finite(self.max_aspect_ratio) or self.max_aspect_ratio < 1:
            raise ConfigError(
                "image_limits.max_aspect_ratio", self.max_aspect_ratio, "must be at least 1"
            )


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
"""Four pictures a step, crops and prefixes together. One H200, 64 in flight, 3 tokens: 92 requests a second with three
eighths of it, 97 with three quarters (Moondream 2), 80 and 82 with three quarters and all (Moondream 3); between tokens
it shows as 50 to 80 ms while new pictures keep coming. Moondream 2, 30 tokens, by ``step_pause`` and ``steps_out``: 72
with 0 and 2, 77 with 2 and 3, 79 with 4 and 2, 84 with 4 and 3. ``preprocess_threads`` grows with the processors, up to
MOST_PREPROCESS_THREADS."""
MOST_PREPROCESS_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How to build an engine.

    ``model`` and ``model_path`` are alternatives: a name (``kestrel-tiny``, ``moondream2``,
    ``moondream3-preview``, ``moondream3.1-9b-a2b``, a hub id ``org/repo[@revision][:file]``, or a path), or a path.
    Raises ConfigError naming field, value and limit.
    """

    model: str = DEFAULT_MODEL
    """Name, hub id or path of the model."""
    model_path: str | Path | None = None
    """A checkpoint folder, or one .safetensors or .pt file. Overrides ``model`` as the source of weights."""
    tokenizer_path: str | Path | None = None
    """tokenizer.json; default: beside the weights, else the model's own from the hub."""
    offline: bool = False
    """Ask no hub: what isn't in its cache or given as files is absent."""
    device: str = "auto"
    """"auto" (CUDA if there is one, else CPU), "cpu", "cuda" or "cuda:N"."""
    dtype: str | torch.dtype = "auto"
    """Computation type, a torch.dtype or its name. "auto": float32 on CPU, bfloat16 on CUDA."""
    random_weights: bool = False
    """Make the weights up on the device instead of reading any: the named architecture, or that of a config.json. For
    measuring; ``seed`` chooses them."""
    fp8_experts: str = "auto"
    """FP8 experts of a checkpoint: "keep" them in FP8 on the device, "dequantise" them to ``dtype``; "auto" keeps them
    where the GPU computes in FP8."""
    fp8_gemms: str = "off"
    """On CUDA, whose matrix products are computed in FP8, weights and activations scaled row by row: of the "vision"
    tower, of the decoder's "prefill", of "all" or, "off", of none. Faster, and a copy of those weights, for some
    accuracy. Decode steps keep their type."""
    attention: str = "auto"
    """On CUDA, who attends to prompts: "flashinfer" (which then decodes too), "triton" (our kernels) or "torch"; "auto"
    takes the fastest that is there. But for "flashinfer" our own kernel decodes."""
    compile: bool = True
    """On CUDA: Triton kernels. False takes plain torch operators there."""
    cuda_graphs: bool = True
    """On CUDA: decode steps are captured once and replayed."""
    max_batch_size: int | None = 4
    """Most sequences that decode in one step. None: 16 on a CPU, 64 on CUDA."""
    max_seq_length: int | None = None
    """Most positions of one sequence, image prefix included. Default: the model's context."""
    page_size: int | None = None
    """KV positions a page; must divide the image prefix. Default: the largest divisor up to 16."""
    kv_cache_pages: int | None = None
    """Pages in the pool. Default: max_batch_size full sequences, on CUDA more for the prefix cache; where it fits."""
    kv_cache_gib: float | None = None
    """The pool's size in GiB instead, rounded down to whole pages."""
    kv_cache_dtype: str = "auto"
    """How keys and values are kept: as "model" computes them; "fp8": one byte each, by the checkpoint's scales, or by 1
    where it has none. "auto": "fp8" if the checkpoint has scales for all layers and a GPU that converts FP8 (compute
    capability 8.9) computes in bfloat16 or float16, else "model"."""
    max_queue: int = 512
    """Requests that may wait, preprocessing included, before EngineOverloaded is raised."""
    max_queued_pixels: int = 4_000_000_000
    """Pixels of pictures that may wait to be decoded: a decoder makes some 100 million a second."""
    max_queue_wait_s: float | None = None
    """Seconds that a request may wait before it fails with QueueTimeout. Default: as long as its caller does."""
    priority_aging_s: float = 10.0
    """Waiting this many seconds is worth one step of priority, so that low priority never starves."""
    step_prefill_positions: int | None = None
    """Prompt positions that a step takes on while others decode: the knob between TTFT and ITL. None: 768 on a CPU, one
    image prefix; 11680 on CUDA, sixteen."""
    step_crops: int | None = None
    """Crops that a step encodes while others decode; shares one allowance with the positions. None: 3, 48 on CUDA."""
    step_pause: float | None = None
    """Steps that only decode after one that took on new work: so many if it used all of its allowance and nobody else
    waits, less otherwise. What comes meanwhile is taken on together. None: 0 on a CPU, 4 on CUDA."""
    steps_out: int | None = None
    """Steps that may be launched and not yet read: one runs while the host works on the others. More hide a busy host;
    each costs a row of every answer that ends by itself, and a step's time before new requests begin. None: 2 on a CPU,
    3 on CUDA."""
    step_timeout_s: float = 300.0
    """The engine counts as hung when no step ends for so long while there is work. Big models on a CPU are slow."""
    prefix_cache: bool = True
    """Reuse the KV of prompts and pictures seen before."""
    kept_embeddings: int = 16
    """Picture embeddings kept for pictures whose pages were evicted."""
    image_cache_bytes: int = 256 * 1024 * 1024
    """Decoded and tiled pictures kept in memory, by the bytes they came from; 0 keeps none. One takes 1 to 6 MB."""
    default_max_tokens: int = 768
    """Tokens generated when a request names no max_tokens; shrinks to the room that is left."""
    max_new_tokens: int | None = None
    """Most tokens that one request may ask for. Default: as many as its context has room for."""
    default_temperature: float = 0.2
    """For query and caption; point, detect and segment are greedy."""
    default_top_p: float = 0.9
    """For query and caption."""
    default_max_objects: int = 150
    """For point and detect."""
    max_text_bytes: int = 32 * 1024 - 1
    """Most UTF-8 bytes of a question or object name: 32 KiB are refused."""
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    preprocess_threads: int | None = None
    """Pictures decoded at once. None: 2 on a CPU, which computes the model too; on CUDA two less than there are
    processors, at least 2 and at most 8: more decode no more pictures and disturb the step thread."""
    cpu_threads: int | None = None
    """Threads of one CPU operator (torch intra-op). Default: torch's own choice, the physical cores."""
    seed: int | None = None
    """Seed of the per-request seeds when a request names none. Default: drawn from the system."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ConfigError("model", self.model, "must be a model name, hub id or path")
        for name in ("model_path", "tokenizer_path"):
            value = getattr(self, name)
            if value is not None and not str(value):
                raise ConfigError(name, value, "must not be empty")
        self._check_device()
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name, allowed in (
            ("attention", ATTENTIONS),
            ("fp8_experts", FP8_EXPERTS),
            ("fp8_gemms", FP8_GEMMS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(name, getattr(self, name), f"must be {_one_of(allowed)}")
        if self.kv_cache_dtype == "fp8" and self.attention == "flashinfer":
            raise ConfigError(
                "kv_cache_dtype",
                "fp8",
                "needs another attention than flashinfer: auto, triton or torch",
            )
        for name in ("offline", "random_weights", "compile", "cuda_graphs", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "must be True or False")
        if self.max_batch_size is not None:
            _whole("max_batch_size", self.max_batch_size, 1, 4096)
        self._check_pool()
        for name, low in (
            ("max_seq_length", 2),
            ("page_size", 1),
            ("kv_cache_pages", 1),
            ("cpu_threads", 1),
            ("max_new_tokens", 1),
            ("step_prefill_positions", 1),
            ("step_crops", 1),
            ("preprocess_threads", 1),
        ):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, low)
        for name in (
            "max_queue",
            "max_queued_pixels",
            "default_max_tokens",
            "default_max_objects",
            "max_text_bytes",
        ):
            _whole(name, getattr(self, name), 1)
        for name in ("kept_embeddings", "image_cache_bytes"):
            _whole(name, getattr(self, name), 0)
        for name in ("priority_aging_s", "step_timeout_s", "max_queue_wait_s"):
            value = getattr(self, name)
            if value is not None and (not _finite(value) or value <= 0):
                raise ConfigError(name, value, "must be a finite number of seconds above 0")
        if self.steps_out is not None:
            _whole("steps_out", self.steps_out, 1, 4)
        if self.step_pause is not None and not (
            _finite(self.step_pause) and 0 <= self.step_pause <= 1000
        ):
            raise ConfigError("step_pause", self.step_pause, "must be from 0 to 1000")
        if not _finite(self.default_temperature) or self.default_temperature < 0:
            raise ConfigError(
                "default_temperature", self.default_temperature, "must be finite and at least 0"
            )
        if not _finite(self.default_top_p) or not 0 < self.default_top_p <= 1:
            raise ConfigError("default_top_p", self.default_top_p, "must be in (0, 1]")
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)

    def sizes(self, *, cuda: bool) -> Sizes:
        """What was left to the device, settled for one: every reader of these fields asks here."""
        chosen = _CUDA_SIZES if cuda else _CPU_SIZES
        if cuda:
            threads = min(max(_processors() - 2, 2), MOST_PREPROCESS_THREADS)
            chosen = replace(chosen, preprocess_threads=threads)
        given = {f.name: getattr(self, f.name) for f in fields(Sizes)}
        return replace(chosen, **{k: v for k, v in given.items() if v is not None})

    def _check_pool(self) -> None:
        if self.kv_cache_gib is None:
            return
        if not _finite(self.kv_cache_gib) or self.kv_cache_gib <= 0:
            raise ConfigError("kv_cache_gib", self.kv_cache_gib, "must be a finite number above 0")
        if self.kv_cache_pages is not None:
            raise ConfigError(
                "kv_cache_gib",
                self.kv_cache_gib,
                f"excludes kv_cache_pages={self.kv_cache_pages}: give one of the two",
            )

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


def _one_of(allowed: tuple[str, ...]) -> str:
    return f"{', '.join(allowed[:-1])} or {allowed[-1]}"


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        raise ConfigError(
            name,
            value,
            f"must be a whole number of at least {low}" + (f" and at most {high}" if high else ""),
        )


def describe(config: RuntimeConfig) -> Mapping[str, Any]:
    """The configuration as plain values, for logs and GetServerInfo."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
