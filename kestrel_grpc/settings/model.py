"""The flags of the model and of the engine's limits: from them comes a RuntimeConfig.

Imports the engine only when asked for flags or a configuration: a client's command line starts without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .server import Flags, SettingsError, default_of, gib, seconds, size, whole
from .sources import name_of

if TYPE_CHECKING:
    from kestrel_engine import ConfigError, RuntimeConfig


def add_source_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> Flags:
    """Which model, and where it is; returns the group."""
    from kestrel_engine import RuntimeConfig

    model = Flags(parser, "model", section="model", environ=environ)
    model.add(
        "--model",
        default=default_of(RuntimeConfig, "model"),
        help="kestrel-tiny, moondream2, moondream3-preview, moondream3.1-9b-a2b, "
        "a hub id ORG/REPO[@REVISION][:FILE], or a path",
    )
    model.add(
        "--weights",
        "--model-path",
        metavar="PATH",
        shown="the model's own",
        help="a checkpoint folder, or one .safetensors or .pt file",
    )
    model.add(
        "--tokenizer",
        metavar="PATH",
        shown="beside the weights, else the model's own",
        help="tokenizer.json",
    )
    model.switch("--offline", help="don't ask the hub for anything that isn't in its cache")
    return model


def add_device_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> Flags:
    """Where it is computed, and how exactly; returns the group."""
    from kestrel_engine import RuntimeConfig

    device = Flags(parser, "device", section="device", environ=environ)
    device.add(
        "--device",
        default=default_of(RuntimeConfig, "device"),
        help="auto (CUDA if there is one), cpu, cuda or cuda:N",
    )
    device.add(
        "--dtype",
        default=default_of(RuntimeConfig, "dtype"),
        help="float32, bfloat16, float16, or auto (float32 on a CPU, bfloat16 on CUDA)",
    )
    device.add(
        "--threads",
        type=whole,
        metavar="N",
        shown="torch's choice",
        help="threads of one operator on a CPU",
    )
    return device


def add_model_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    from kestrel_engine import ImageLimits, RuntimeConfig

    model = add_source_flags(parser, environ)
    device = add_device_flags(parser, environ)
    device.add(
        "--fp8-experts",
        default=default_of(RuntimeConfig, "fp8_experts"),
        help="keep FP8 experts in FP8, or dequantise them; auto keeps them where the GPU computes in FP8",
    )
    device.add(
        "--fp8-gemms",
        default=default_of(RuntimeConfig, "fp8_gemms"),
        help="matrix products computed in FP8: vision, prefill, all or off; faster for some accuracy, from compute "
        "capability 8.9 on",
    )
    model.switch(
        "--random-weights",
        help="read no weights but make them up, of the named model or of a config.json; to measure speed with",
    )
    device.add(
        "--attention",
        default=default_of(RuntimeConfig, "attention"),
        help="on CUDA: who attends to prompts, flashinfer (which then decodes too), triton (our kernels) or torch; "
        "auto takes the fastest that is there",
    )
    device.switch(
        "--no-compile", help="on CUDA, plain torch operators instead of the Triton kernels"
    )
    device.switch(
        "--no-cuda-graphs", help="on CUDA, launch every kernel of a decode step by itself"
    )
    model.add(
        "--seed",
        type=whole,
        metavar="N",
        shown="drawn anew",
        help="makes the seeds of requests that name none repeatable, and chooses --random-weights",
    )
    limits = Flags(parser, "limits and defaults of requests", section="requests", environ=environ)
    limits.add(
        "--max-batch-size",
        type=whole,
        metavar="N",
        shown="16, on CUDA 64",
        help="most requests that are computed together",
    )
    limits.add(
        "--max-seq-length",
        type=whole,
        metavar="N",
        shown="the model's context",
        help="most positions of one request, picture, prompt and answer together",
    )
    limits.add(
        "--max-queue",
        type=whole,
        metavar="N",
        default=default_of(RuntimeConfig, "max_queue"),
        help="most requests that wait; more get RESOURCE_EXHAUSTED",
    )
    limits.add(
        "--max-queued-pixels",
        type=whole,
        metavar="N",
        default=default_of(RuntimeConfig, "max_queued_pixels"),
        help="pixels of pictures that may wait to be decoded",
    )
    limits.add(
        "--max-queue-wait",
        type=seconds,
        metavar="SECONDS",
        default=default_of(RuntimeConfig, "max_queue_wait_s"),
        shown="as long as the caller waits",
        help="how long a request may wait before it gets RESOURCE_EXHAUSTED",
    )
    limits.add(
        "--max-new-tokens",
        type=whole,
        metavar="N",
        shown="what the context has room for",
        help="most tokens that one request may ask for",
    )
    limits.add(
        "--default-max-new-tokens",
        type=whole,
        metavar="N",
        default=default_of(RuntimeConfig, "default_max_tokens"),
        help="most tokens generated when a request names no max_tokens",
    )
    limits.add(
        "--max-text-bytes",
        type=size,
        metavar="SIZE",
        default=default_of(RuntimeConfig, "max_text_bytes"),
        help="most UTF-8 bytes of a question or an object's name",
    )
    limits.add(
        "--max-image-bytes",
        type=size,
        metavar="SIZE",
        default=default_of(ImageLimits, "max_bytes"),
        shown="32MiB",
        help="largest encoded picture",
    )
    limits.add(
        "--max-image-pixels",
        type=whole,
        metavar="N",
        default=default_of(ImageLimits, "max_pixels"),
        help="most pixels of a picture, width times height",
    )
    limits.add(
        "--max-image-aspect-ratio",
        type=float,
        metavar="RATIO",
        default=default_of(ImageLimits, "max_aspect_ratio"),
        help="longest side of a picture over its shortest",
    )
    _add_schedule_flags(parser, environ)


def _add_schedule_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str] | None) -> None:
    from kestrel_engine import RuntimeConfig

    work = Flags(parser, "caches and steps", section="scheduler", environ=environ)
    work.add(
        "--kv-cache-pages",
        type=whole,
        metavar="N",
        shown="max-batch-size full requests, on CUDA eight times as many, as far as memory allows",
        help="pages of the KV cache",
    )
    work.add(
        "--kv-cache-gib",
        type=gib,
        metavar="GIB",
        shown="as --kv-cache-pages",
        help="size of the KV cache instead of its pages",
    )
    work.add(
        "--kv-cache-dtype",
        default=default_of(RuntimeConfig, "kv_cache_dtype"),
        help="keys and values in the model's type (model) or in FP8 (fp8): half the bytes for some accuracy; auto: fp8 "
        "where the checkpoint has scales for it and the GPU converts it",
    )
    work.add(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="reuse what was computed for prompts and pictures seen before",
    )
    work.add(
        "--image-cache-bytes",
        type=size,
        metavar="SIZE",
        default=default_of(RuntimeConfig, "image_cache_bytes"),
        shown="256MiB",
        help="decoded pictures kept in memory for repeats; 0 keeps none",
    )
    work.add(
        "--step-prefill-positions",
        type=whole,
        metavar="N",
        shown="768, on CUDA 11680",
        help="prompt positions a step takes on beside those who decode: less is smoother, more starts sooner",
    )
    work.add(
        "--step-crops",
        type=whole,
        metavar="N",
        shown="3, on CUDA 48",
        help="crops of pictures a step encodes beside those who decode",
    )
    work.add(
        "--step-pause",
        type=float,
        metavar="N",
        shown="0, on CUDA 4",
        help="steps that only decode after one that took on all it may: what comes meanwhile is taken on together",
    )
    work.add(
        "--steps-out",
        type=whole,
        metavar="N",
        shown="2, on CUDA 3",
        help="steps launched and not yet read, 1 to 4: more hide a busy host",
    )
    work.add(
        "--preprocess-threads",
        type=whole,
        metavar="N",
        shown="2, on CUDA two less than the processors, up to 8",
        help="pictures decoded at once",
    )
    work.add(
        "--step-timeout",
        type=seconds,
        metavar="SECONDS",
        default=default_of(RuntimeConfig, "step_timeout_s"),
        help="without the end of a step for so long the engine counts as hung",
    )


_FLAG_OF_FIELD = {
    "model_path": "--weights",
    "tokenizer_path": "--tokenizer",
    "cpu_threads": "--threads",
    "default_max_tokens": "--default-max-new-tokens",
    "compile": "--no-compile",
    "cuda_graphs": "--no-cuda-graphs",
    "max_queue_wait_s": "--max-queue-wait",
    "step_timeout_s": "--step-timeout",
    "image_limits.max_bytes": "--max-image-bytes",
    "image_limits.max_pixels": "--max-image-pixels",
    "image_limits.max_aspect_ratio": "--max-image-aspect-ratio",
}
"""Where a field of RuntimeConfig and its flag have different names."""


def runtime_config(args: argparse.Namespace) -> RuntimeConfig:
    """Raises SettingsError naming the flag at fault."""
    from kestrel_engine import ConfigError, ImageLimits, RuntimeConfig

    try:
        return RuntimeConfig(
            model=args.model,
            model_path=args.weights,
            tokenizer_path=args.tokenizer,
            device=args.device,
            dtype=args.dtype,
            offline=args.offline,
            random_weights=args.random_weights,
            fp8_experts=args.fp8_experts,
            fp8_gemms=args.fp8_gemms,
            attention=args.attention,
            compile=not args.no_compile,
            cuda_graphs=not args.no_cuda_graphs,
            max_batch_size=args.max_batch_size,
            max_seq_length=args.max_seq_length,
            max_queue=args.max_queue,
            max_queued_pixels=args.max_queued_pixels,
            max_queue_wait_s=args.max_queue_wait,
            kv_cache_pages=args.kv_cache_pages,
            kv_cache_gib=args.kv_cache_gib,
            kv_cache_dtype=args.kv_cache_dtype,
            max_new_tokens=args.max_new_tokens,
            default_max_tokens=args.default_max_new_tokens,
            max_text_bytes=args.max_text_bytes,
            prefix_cache=args.prefix_cache == "on",
            image_cache_bytes=args.image_cache_bytes,
            step_prefill_positions=args.step_prefill_positions,
            step_crops=args.step_crops,
            step_pause=args.step_pause,
            steps_out=args.steps_out,
            preprocess_threads=args.preprocess_threads,
            step_timeout_s=args.step_timeout,
            cpu_threads=args.threads,
            seed=args.seed,
            image_limits=ImageLimits(
                max_bytes=args.max_image_bytes,
                max_pixels=args.max_image_pixels,
                max_aspect_ratio=args.max_image_aspect_ratio,
            ),
        )
    except ConfigError as error:
        raise config_error(error, args) from None


def config_error(error: ConfigError, args: argparse.Namespace) -> SettingsError:
    """A ConfigError in terms of flag, variable or file, wherever the value is from."""
    flag = _FLAG_OF_FIELD.get(error.field, "--" + error.field.replace("_", "-"))
    return SettingsError(f"{name_of(args, flag)}={error.value}: {error.limit}")
