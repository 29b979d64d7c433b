"""How large the K/V pool is: planned from what a device has free beside weights and everything else of the runtime.

Arithmetic only. A pool larger than the running sequences need is not wasted: it is where prompts and images seen
before are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...config import RuntimeConfig
from ...errors import InsufficientMemoryError
from ...types.model_config import ModelConfig

GIB = 2**30
CUDA_SHARE = 0.9
"""Of what is left on a GPU after the reserve; the rest is for other processes and for fragments."""
CACHED_CONTEXTS = 8
"""On a GPU the pool holds at most so many times the running sequences at full length: a small model needs no more to
keep what it has seen, and leaves the rest of the card alone."""


@dataclass(frozen=True, slots=True)
class Pool:
    """``max_seq_length``: the longest sequence in positions, as wished for or as far as all pages together reach."""

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
    """``free_bytes``: what the device has left beside the weights, None if it doesn't tell. ``reserve_bytes``: what
    computing takes of them. A size that the configuration gives holds exactly; else the pool is ``contexts`` times
    ``max_batch_size`` full sequences, or ``share`` of the room if that is less.

    Raises InsufficientMemoryError saying what to lower.
    """
    longest = config.max_seq_length or model.text.max_context
    room = None if free_bytes is None else max(0, free_bytes - reserve_bytes)
    pages = given_pages(config, page_bytes)
    if pages is None:
        pages = -(-longest // page_size) * max_batch_size * contexts
        if room is not None:
            pages = min(pages, int(room * share) // page_bytes)
        if pages * page_size < least_positions(model):
            raise InsufficientMemoryError(
                f"{_size(free_bytes or 0)} are left beside the weights and {_size(reserve_bytes)} of them are needed "
                f"to compute; {share:.0%} of the rest hold {pages} pages of the KV cache, and an image takes "
                f"{model.image_prefix // page_size} pages of {page_bytes} bytes, with a prompt some more; lower "
                f"--max-batch-size (now {max_batch_size}) or --step-crops, or take a narrower --dtype"
            )
    elif room is not None and pages * page_bytes > room:
        raise InsufficientMemoryError(
            f"a KV cache of {pages} pages takes {_size(pages * page_bytes)}; {_size(free_bytes or 0)} are left beside "
            f"the weights and {_size(reserve_bytes)} are needed to compute; {_lower(config, room, page_bytes)}, "
            f"or --max-batch-size (now {max_batch_size})"
        )
    return Pool(pages, min(longest, pages * page_size))


def given_pages(config: RuntimeConfig, page_bytes: int) -> int | None:
    """Pages that the configuration asks for by number or size; None if it leaves them to the device."""
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB) // page_bytes
    return config.kv_cache_pages


def least_positions(model: ModelConfig) -> int:
    """Positions without which not even the warm-up runs: an image, a caption's prompt, 2 tokens."""
    return model.image_prefix + max(map(len, model.templates.caption.values())) + 2


def out_of_memory(
    config: RuntimeConfig, max_batch_size: int, reason: str
) -> InsufficientMemoryError:
    """What a device's own refusal while starting becomes; ``reason`` is its words."""
    cache = "" if config.kv_cache_gib is None else f" (now {config.kv_cache_gib:g})"
    length = "the model's context" if config.max_seq_length is None else config.max_seq_length
    return InsufficientMemoryError(
        f"the device ran out of memory while starting ({reason}); lower --kv-cache-gib{cache}, --max-batch-size (now "
        f"{max_batch_size}) or --max-seq-length (now {length})"
    )


def _lower(config: RuntimeConfig, room: int, page_bytes: int) -> str:
    if config.kv_cache_gib is not None:
        return f"lower --kv-cache-gib to at most {int(100 * room / GIB) / 100:g}"
    return f"lower --kv-cache-pages to at most {room // page_bytes}"


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"
