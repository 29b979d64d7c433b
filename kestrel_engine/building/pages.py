"""The page size of the KV cache, and the check that its pages can hold a request."""

from __future__ import annotations

from ..config.runtime import RuntimeConfig
from ..errors import ConfigError
from ..types.model_config import ModelConfig

LARGEST_DEFAULT_PAGE = 16
"""Positions. Attention speed doesn't depend on the page size; small pages waste little and share well."""


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
    from ..runtime.gpu.memory import given_pages, least_positions

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
