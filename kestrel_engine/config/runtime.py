"""RuntimeConfig: the settings of an engine. They are checked once, before the engine reads any weight.

This module imports no torch and queries no device. ``types.step.RuntimeLimits`` holds the values that the device
determines (number of pages, captured batch sizes). The service's ``settings`` package reads the environment. A new
setting is one field made with ``setting``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .adapters import AdapterSources
from .dtypes import PRECISIONS, dtype_name
from .groups import DEVICE, MODEL, REQUESTS, SCHEDULER
from .images import ImageLimits
from .setting import check_settings, setting
from .sizes import Sizes, default_sizes

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "kestrel-tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The settings of an engine.

    ``model`` is a name (``kestrel-tiny``, ``moondream2``, ``moondream3-preview``, ``moondream3.1-9b-a2b``), a hub id
    ``org/repo[@revision][:file]``, ``s3://bucket/prefix``, or a path. ``model_path`` gives weights that replace the
    model's own. Each field's ``help`` describes it. With None, the device or the model determines the value. Raises
    ConfigError, which names field, value and limit.
    """

    model: str = setting(
        DEFAULT_MODEL,
        MODEL,
        "kestrel-tiny, moondream2, moondream3-preview, moondream3.1-9b-a2b, "
        "a hub id ORG/REPO[@REVISION][:FILE], a bucket s3://BUCKET/PREFIX, or a path",
    )
    model_path: str | Path | None = setting(
        None,
        MODEL,
        "folder of a checkpoint, one .safetensors or .pt file, or s3://BUCKET/PREFIX, to use instead of the model's "
        "own weights",
        flag="--weights",
        aliases=("--model-path",),
        metavar="PATH",
        shown="the model's own",
    )
    weights_cache: str | Path = setting(
        "~/.cache/kestrel/weights",
        MODEL,
        "folder that keeps models of buckets; all processes and containers of a machine may share it, and it may be "
        "read-only if the model is there",
        metavar="DIR",
    )
    tokenizer_path: str | Path | None = setting(
        None,
        MODEL,
        "file tokenizer.json, or a folder that holds it",
        flag="--tokenizer",
        metavar="PATH",
        shown="the one beside the weights, else the model's own",
    )
    refiner: str | Path = setting(
        "auto",
        MODEL,
        "segmentation refiner: a file of its weights, moondream/SegHeadRefiner (released for Moondream 3), off, or "
        "auto, the file refiner.safetensors beside the weights if there is one",
        metavar="auto|off|PATH|moondream/SegHeadRefiner",
    )
    calibration: str | Path = setting(
        "auto",
        MODEL,
        "file of the model's score calibration, from 'kestrel-grpc calibrate'; auto: score_calibration.json beside the "
        "weights, if there is one; off: raw scores",
        metavar="FILE",
    )
    adapters_dir: str | Path | None = setting(
        None,
        MODEL,
        "folder of adapters (LoRA) that requests may name: NAME.safetensors, NAME.pt or a folder NAME each; files may "
        "come, change and go while the server runs",
        metavar="DIR",
        shown="no adapters",
    )
    adapter_cache_bytes: int = setting(
        1024 * 1024 * 1024,
        MODEL,
        "limit on the memory of all loaded adapters together; the least recently used ones are dropped",
        kind="bytes",
        metavar="SIZE",
        low=1,
    )
    adapter_sources: AdapterSources = field(default_factory=AdapterSources)
    offline: bool = setting(
        False, MODEL, "never contact the hub; use its cache and local files only", switch=True
    )
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
    fp8_experts: str = setting(
        "auto",
        DEVICE,
        "keep FP8 experts in FP8, or dequantise them; auto keeps them if the GPU computes in FP8",
        choices=("auto", "keep", "dequantise"),
    )
    fp8_gemms: str = setting(
        "auto",
        DEVICE,
        "matrix products to compute in FP8: vision, prefill, all or off; faster, but less accurate; needs compute "
        "capability 8.9 or newer; auto: off, or all with --precision fp8",
        choices=("auto", "off", "vision", "prefill", "all"),
    )
    """Never auto after the initialisation. Each row of weights and activations has a scale. The FP8 weights are copies.
    With all, decode steps read them too."""
    random_weights: bool = setting(
        False,
        MODEL,
        "generate random weights for the named model or a config.json instead of reading weights, to measure speed",
        switch=True,
    )
    attention: str = setting(
        "auto",
        DEVICE,
        "on CUDA, the library that computes the attention of prompts: flashinfer (which then also decodes), triton "
        "(our kernels) or torch; auto uses the fastest combination that needs no nvcc: our kernels with cuDNN",
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
    decode_beside: str = setting(
        "auto",
        DEVICE,
        "on CUDA, decode beside images and prompts that take longer than --itl-target-ms; auto: on for models without "
        "experts",
        choices=("auto", "on", "off"),
    )
    """Needs CUDA graphs and our own attention kernels; without them, it has no effect. One H100, 64 requests of 30
    tokens in flight: Moondream 3 answers 57 requests a second with it and 67 without, Moondream 2 82 and 84, with a p95
    gap between tokens of 18 instead of 59 ms."""
    seed: int | None = setting(
        None,
        MODEL,
        "seed of --random-weights and of the requests that set no seed, so that results repeat after a restart",
        kind="whole",
        metavar="N",
        low=0,
        high=2**64 - 1,
        shown="random at each start",
    )
    max_batch_size: int | None = setting(
        None,
        REQUESTS,
        "limit on the requests that one step computes together",
        kind="whole",
        metavar="N",
        low=1,
        high=4096,
        shown="16, on CUDA 64",
    )
    max_seq_length: int | None = setting(
        None,
        REQUESTS,
        "limit on the positions of one request: image, prompt and answer together",
        kind="whole",
        metavar="N",
        low=2,
        shown="the model's context",
    )
    page_size: int | None = None
    """KV positions of a page. Must divide the image prefix. Default: the largest divisor up to 16."""
    max_queue: int = setting(
        512,
        REQUESTS,
        "limit on the requests that wait, including those in preprocessing; further ones get RESOURCE_EXHAUSTED",
        kind="whole",
        metavar="N",
        low=1,
    )
    max_images: int = setting(
        16,
        REQUESTS,
        "limit on the images of one request; the model's context limits them further",
        kind="whole",
        metavar="N",
        low=1,
        high=64,
    )
    """Moondream 2 holds two images, Moondream 3 five, kestrel-tiny six."""
    max_queued_pixels: int = setting(
        4_000_000_000,
        REQUESTS,
        "limit on the pixels of all images that wait to be decoded",
        kind="whole",
        metavar="N",
        low=1,
    )
    """A decoder decodes about 100 million pixels a second."""
    decode_bytes: int = setting(
        1024 * 1024 * 1024,
        REQUESTS,
        "limit on the memory of all images that are being decoded, together",
        kind="bytes",
        metavar="SIZE",
        low=64 * 1024 * 1024,
    )
    """Cheap images, one in each decoder, use at most half. An expensive image waits until it fits into the rest."""
    decode_timeout_s: float = setting(
        30.0,
        REQUESTS,
        "limit on the time to decode one image; beyond it, the request gets INVALID_ARGUMENT",
        kind="seconds",
        metavar="SECONDS",
        above=0,
    )
    max_queue_wait_s: float | None = setting(
        None,
        REQUESTS,
        "limit on the time that a request waits; beyond it, the request gets RESOURCE_EXHAUSTED",
        kind="seconds",
        metavar="SECONDS",
        above=0,
        shown="the caller's deadline",
    )
    max_new_tokens: int | None = setting(
        None,
        REQUESTS,
        "limit on the tokens of one answer, including its reasoning; a request with a larger max_tokens is refused",
        kind="whole",
        metavar="N",
        low=1,
        shown="the room that is left in the context",
    )
    default_max_tokens: int = setting(
        768,
        REQUESTS,
        "limit on the tokens of an answer if its request does not set max_tokens",
        kind="whole",
        flag="--default-max-new-tokens",
        metavar="N",
        low=1,
    )
    """If the context has less room left, that room is the limit."""
    max_text_bytes: int = setting(
        32 * 1024 - 1,
        REQUESTS,
        "limit on the UTF-8 bytes of a question or an object's name",
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
    min_score: float = setting(
        0.0,
        REQUESTS,
        "least score of a point, a box or a segment that is returned, unless the request sets its own; 0 returns all",
        kind="number",
        metavar="SCORE",
        low=0,
        high=1,
    )
    max_absence: float = setting(
        0.5,
        REQUESTS,
        "a question is not answered if an object that it presupposes is absent with a higher probability, unless the "
        "request sets its own; 1 answers all",
        kind="number",
        metavar="P",
        low=0,
        high=1,
    )
    kv_cache_pages: int | None = setting(
        None,
        SCHEDULER,
        "number of pages of the KV cache",
        kind="whole",
        metavar="N",
        low=1,
        shown="room for --max-batch-size full requests, on CUDA for eight times as many, if memory allows",
    )
    kv_cache_gib: float | None = setting(
        None,
        SCHEDULER,
        "size of the KV cache in GiB, rounded down to whole pages; an alternative to --kv-cache-pages",
        kind="number",
        metavar="GIB",
        above=0,
        shown="the default of --kv-cache-pages",
    )
    kv_cache_dtype: str = setting(
        "auto",
        SCHEDULER,
        "type of keys and values: the model's type (model), or FP8 (fp8), which takes half the bytes and is less "
        "accurate; auto uses fp8 if the checkpoint has scales for it and the GPU converts it",
        choices=("auto", "model", "fp8"),
    )
    """FP8 uses the checkpoint's scales, and 1 for a scale that the checkpoint lacks. "auto" requires compute capability
    8.9 or newer and a computation in bfloat16 or float16."""
    prefix_cache: bool = setting(
        True, SCHEDULER, "reuse the results computed for earlier prompts and images"
    )
    embedding_cache_bytes: int | None = setting(
        None,
        SCHEDULER,
        "bytes of images' embeddings to keep on the device, so that an image whose keys and values were evicted is not "
        "encoded again; 0 keeps none; default: 16 images",
        kind="bytes",
        metavar="SIZE",
        low=0,
    )
    """An image takes 3 MB with a released model in bfloat16, where its keys and values take 137 MB. Without them, it
    costs the prompt only, a quarter of the time of a new image."""
    priority_aging_s: float = 10.0
    """A priority that was not served for this many seconds counts as one better, so no request waits forever."""
    image_cache_bytes: int = setting(
        256 * 1024 * 1024,
        SCHEDULER,
        "bytes of decoded images to keep in memory for repeated images; 0 keeps none",
        kind="bytes",
        metavar="SIZE",
        low=0,
    )
    """One image takes 1 to 6 MB."""
    crop_cache_bytes: int = setting(
        0,
        SCHEDULER,
        "bytes of crops' features to keep on the device, so that equal crops of later images, like the frames of a "
        "fixed camera, are not encoded again; 0 keeps none",
        kind="bytes",
        metavar="SIZE",
        low=0,
    )
    """A crop takes 0.25 MB with kestrel-tiny in float32, and 1.7 MB with a released model in bfloat16."""
    step_prefill_positions: int | None = setting(
        None,
        SCHEDULER,
        "prompt positions that a step computes beside decoding requests; lower values give smoother tokens, higher "
        "values start requests sooner",
        kind="whole",
        metavar="N",
        low=1,
        shown="768, on CUDA 11680",
    )
    step_crops: int | None = setting(
        None,
        SCHEDULER,
        "crops of images that a step encodes beside decoding requests; shares one allowance with the positions",
        kind="whole",
        metavar="N",
        low=1,
        shown="3, on CUDA 48",
    )
    step_pause: float | None = setting(
        None,
        SCHEDULER,
        "number of steps that only decode, after a step that accepted as much new work as it may; requests that arrive "
        "meanwhile start together",
        kind="number",
        metavar="N",
        low=0,
        high=1000,
        shown="0, on CUDA 4",
    )
    itl_target_ms: float = setting(
        15.0,
        SCHEDULER,
        "with --decode-beside: ms that new images and prompts may delay a token. Longer steps run beside decoding",
        kind="number",
        metavar="MS",
        low=0,
        high=10_000,
    )
    steps_out: int | None = setting(
        None,
        SCHEDULER,
        "steps that are launched and not yet read, 1 to 4; higher values hide a busy host",
        kind="whole",
        metavar="N",
        low=1,
        high=4,
        shown="2, on CUDA 3",
    )
    """Each further step costs one row for every answer that ends by itself, and delays new requests by a step."""
    preprocess_threads: int | None = setting(
        None,
        SCHEDULER,
        "number of images that are decoded at the same time",
        kind="whole",
        metavar="N",
        low=1,
        shown="2, on CUDA the number of processors less two, up to 8",
    )
    step_timeout_s: float = setting(
        300.0,
        SCHEDULER,
        "time after which the engine counts as hung, if there is work and no step ends",
        kind="seconds",
        metavar="SECONDS",
        above=0,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ConfigError("model", self.model, "must be a model name, hub id or path")
        for name in (
            "model_path",
            "weights_cache",
            "tokenizer_path",
            "adapters_dir",
            "kernel_cache_dir",
        ):
            value = getattr(self, name)
            if value is not None and not str(value):
                raise ConfigError(name, value, "must not be empty")
        if not str(self.calibration):
            raise ConfigError("calibration", self.calibration, "must be auto, off or a file")
        self._check_device()
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_settings(self)
        for name, value in PRECISIONS[self.precision].items():
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)
        if self.kv_cache_dtype == "fp8" and self.attention == "flashinfer":
            raise ConfigError(
                "kv_cache_dtype",
                "fp8",
                "flashinfer can't read an FP8 KV cache; set attention to auto, triton or torch",
            )
        if self.kv_cache_gib is not None and self.kv_cache_pages is not None:
            raise ConfigError(
                "kv_cache_gib",
                self.kv_cache_gib,
                f"kv_cache_pages={self.kv_cache_pages} is set too; set only one of the two",
            )
        self._check_embedded()

    @property
    def has_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return self.adapters_dir is not None or self.adapter_sources.downloads

    def sizes(self, *, cuda: bool) -> Sizes:
        """Returns the fields that may be None, with the defaults of the device. Read these fields only here."""
        given = {f.name: getattr(self, f.name) for f in fields(Sizes)}
        chosen = {name: value for name, value in given.items() if value is not None}
        return replace(default_sizes(cuda=cuda), **chosen)

    def _check_embedded(self) -> None:
        """Checks the fields that have no flag."""
        if self.page_size is not None:
            _whole("page_size", self.page_size, 1)
        _whole("default_max_objects", self.default_max_objects, 1)
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


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(name, value, f"must be a whole number of at least {low}")
