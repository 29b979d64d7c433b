"""The KV cache: the size of a page, and how many pages fit into the memory that weights and runtime leave free.

This module allocates nothing. What running sequences leave of the KV cache holds prefixes of earlier requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.runtime import RuntimeConfig
from ..errors import ConfigError, InsufficientMemoryError
from ..types.model_config import ModelConfig

GIB = 2**30
CUDA_SHARE = 0.9
"""The KV cache's share of the GPU memory that is left after the reserve. The rest is for other processes and for
fragmentation."""
CACHED_CONTEXTS = 8
"""The largest KV cache on a GPU, as a multiple of the running sequences at full length. A small model needs no more for
its prefix cache and leaves the rest of the memory free."""


LARGEST_DEFAULT_PAGE = 16
"""Positions. Attention speed doesn't depend on the page size; small pages waste little and share well."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The planned KV cache. ``max_seq_length``: the longest sequence in positions."""

    num_pages: int
    max_seq_length: int


def plan_pool(
    free_bytes: int | None,
    reserve_bytes: int,
    page_bytes: int,
    config: RuntimeConfig,
    model: ModelConfig,
    *,
    page_size: int,
    max_batch_size: int,
    share: float = CUDA_SHARE,
    contexts: int = CACHED_CONTEXTS,
) -> Pool:
    """Plans the KV cache. A configured size is used as it is. Otherwise the cache holds ``contexts`` times
    ``max_batch_size`` full sequences, or takes ``share`` of the room if that is less. ``free_bytes``: that the weights
    leave free; None if the device does not report them. ``reserve_bytes``: the part of them that computing needs.
    Raises InsufficientMemoryError, whose message names the settings to lower."""
    longest = config.max_seq_length or model.text.max_context
    room = None if free_bytes is None else max(0, free_bytes - reserve_bytes)
    pages = given_pages(config, page_bytes)
    if pages is None:
        pages = -(-longest // page_size) * max_batch_size * contexts
        if room is not None:
            pages = min(pages, int(room * share) // page_bytes)
        if pages * page_size < least_positions(model):
            lower = "use a narrower --precision, or a device with more memory"
            if max_batch_size > 1:
                lower = f"lower --max-batch-size (now {max_batch_size}) or --step-crops, or {lower}"
            raise InsufficientMemoryError(
                f"the weights leave {size_text(free_bytes or 0)} and computing needs {size_text(reserve_bytes)} of "
                f"them; {share:.0%} of the rest hold {pages} pages of the KV cache, but an image takes "
                f"{model.image_prefix // page_size} pages of {page_bytes} bytes, and its prompt some more; {lower}"
            )
    elif room is not None and pages * page_bytes > room:
        raise InsufficientMemoryError(
            f"a KV cache of {pages} pages takes {size_text(pages * page_bytes)}; the weights leave "
            f"{size_text(free_bytes or 0)} and computing needs {size_text(reserve_bytes)} of them; "
            f"{_lower(config, room, page_bytes)}, or --max-batch-size (now {max_batch_size})"
        )
    return Pool(pages, min(longest, pages * page_size))


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


def check_pool(config: RuntimeConfig, model: ModelConfig, page_size: int, page_bytes: int) -> None:
    """Raises ConfigError for sizes that can't hold the requests of the warm-up."""
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


def given_pages(config: RuntimeConfig, page_bytes: int) -> int | None:
    """Returns the pages that the configuration sets by number or by size; None if it sets neither."""
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB) // page_bytes
    return config.kv_cache_pages


def least_positions(model: ModelConfig) -> int:
    """Returns the positions that the warm-up needs: an image, a caption's prompt and 2 tokens."""
    return model.image_prefix + max(map(len, model.templates.caption.values())) + 2


def out_of_memory(
    config: RuntimeConfig, max_batch_size: int, reason: str
) -> InsufficientMemoryError:
    """Returns the error for a device that ran out of memory during startup. ``reason``: the device's own message."""
    cache = "" if config.kv_cache_gib is None else f" (now {config.kv_cache_gib:g})"
    length = "the model's context" if config.max_seq_length is None else config.max_seq_length
    return InsufficientMemoryError(
        f"the device ran out of memory while starting ({reason}); lower --kv-cache-gib{cache}, --max-batch-size (now "
        f"{max_batch_size}) or --max-seq-length (now {length})"
    )


def _lower(config: RuntimeConfig, room: int, page_bytes: int) -> str:
    if config.kv_cache_gib is not None:
        return f"lower --kv-cache-gib to at most {int(100 * room / GIB) / 100:g}"
    return f"lower kv_cache_pages to at most {room // page_bytes}"


def size_text(count: int) -> str:
    """Returns a number of bytes for a message."""
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"
