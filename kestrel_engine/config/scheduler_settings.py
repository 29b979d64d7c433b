"""SchedulerSettings: caches, and what a step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from .groups import SCHEDULER
from .setting import checked


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    page_size: int | None = checked(None, low=1)
    """KV positions of a page. Must divide the image prefix. Default: the largest divisor up to 16."""
    kv_cache_pages: int | None = checked(None, low=1)
    """Number of pages of the KV cache, in place of ``kv_cache_gib``."""
    kv_cache_gib: float | None = SCHEDULER.setting(
        None,
        "size of the KV cache in GiB, rounded down to whole pages",
        metavar="GIB",
        above=0,
        shown="room for --max-batch-size full requests, on CUDA for eight times as many, if memory allows",
    )
    prefix_cache: bool = checked(True)
    """Reuse the results computed for earlier prompts and images."""
    embedding_cache_bytes: int | None = checked(None, low=0)
    """Bytes of images' embeddings to keep on the device, so that an image whose keys and values were evicted is not
    encoded again; None: 16 images. An image takes 3 MB with a released model in bfloat16, where its keys and values
    take 137 MB. With its embedding, it costs the prompt only, a quarter of the time of a new image."""
    priority_aging_s: float = checked(10.0, above=0)
    """A priority that was not served for this many seconds counts as one better, so no request waits forever."""
    image_cache_bytes: int = SCHEDULER.setting(
        256 * 1024 * 1024,
        "bytes of memory that keep images for repeated use: nine tenths for decoded images, a tenth for encoded ones; "
        "0 keeps none",
        low=0,
    )
    """One image takes 1 to 6 MB."""
    crop_cache_bytes: int = SCHEDULER.setting(
        0,
        "bytes of crops' features to keep on the device, so that equal crops of later images, like the frames of a "
        "fixed camera, are not encoded again; 0 keeps none",
        low=0,
    )
    """A crop takes 1.3 MB with kestrel-small in float32, and 1.7 MB with a released model in bfloat16."""
    step_prefill_positions: int | None = checked(None, low=1)
    """Prompt positions that a step computes beside decoding requests; lower values give smoother tokens, higher values
    start requests sooner."""
    step_crops: int | None = SCHEDULER.setting(
        None,
        "crops of images that a step encodes beside decoding requests; shares one allowance with prompt positions",
        low=1,
        shown="3, on CUDA 48 (with experts 10) or less by --itl-target-ms",
    )
    step_pause: float | None = checked(None, low=0, high=1000)
    """Number of steps that only decode, after a step that accepted as much new work as it may; requests that arrive
    meanwhile start together."""
    itl_target_ms: float = SCHEDULER.setting(
        15.0,
        "on CUDA: ms that new images and prompts may delay a token. For models without experts, longer steps "
        "run at the same time as decode steps, which under load on Hopper begin about half this time apart. "
        "Below 15, steps hold less new work (--step-crops): smoother tokens, fewer requests a second",
        metavar="MS",
        low=0,
        high=10_000,
    )
    steps_out: int | None = checked(None, low=1, high=4)
    """Steps that are launched and not yet read, 1 to 4; higher values hide a busy host. Each further step costs one row
    for every answer that ends by itself, and delays new requests by a step."""
    preprocess_threads: int | None = SCHEDULER.setting(
        None,
        "number of images that are decoded at the same time",
        low=1,
        shown="2, on CUDA the number of processors less two, up to 8",
    )
    step_timeout_s: float = SCHEDULER.setting(
        300.0,
        "time after which the engine counts as hung, if there is work and no step ends",
        above=0,
    )
