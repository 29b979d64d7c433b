"""How many images' embeddings the device keeps for images whose keys and values were evicted."""

from __future__ import annotations

from ..config.runtime import RuntimeConfig
from ..types.model_config import ModelConfig

DEFAULT = 16
"""48 MB with a released model in bfloat16. `footprint.reserve_bytes` counts them."""


def kept_images(config: RuntimeConfig, model: ModelConfig, itemsize: int) -> int:
    """Returns the number of images. ``itemsize``: the bytes of a number of the embeddings."""
    if config.embedding_cache_bytes is None:
        return DEFAULT
    return config.embedding_cache_bytes // _bytes_of_one(model, itemsize)


def extra_bytes(config: RuntimeConfig, model: ModelConfig, itemsize: int) -> int:
    """Returns the bytes of the images beyond DEFAULT."""
    more = kept_images(config, model, itemsize) - DEFAULT
    return max(0, more) * _bytes_of_one(model, itemsize)


def _bytes_of_one(model: ModelConfig, itemsize: int) -> int:
    return model.image_positions * model.text.dim * itemsize
