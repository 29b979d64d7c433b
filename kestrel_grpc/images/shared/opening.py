"""open_shared_images: the shared images that the configuration names."""

from __future__ import annotations

from collections.abc import Callable

from ...settings.shared_images import SharedImagesConfig
from .backend import Backend
from .records import Keys, Records
from .shared_images import SharedImageEvent, SharedImages


def open_shared_images(
    config: SharedImagesConfig, on_event: Callable[[SharedImageEvent], None]
) -> SharedImages | None:
    """None if the configuration names no store. Connects to nothing yet. Raises ConfigError."""
    if config.url is None:
        return None
    return SharedImages(config, open_backend(config), open_records(config), on_event)


def open_backend(config: SharedImagesConfig) -> Backend:
    """The store that the configuration names. Connects to nothing yet. Raises ConfigError."""
    if config.is_redis:
        from .redis_backend import RedisBackend

        return RedisBackend(config)
    from .object_backend import ObjectBackend

    return ObjectBackend.open(config)


def open_records(config: SharedImagesConfig) -> Records:
    """Reads the keys. Raises ConfigError."""
    keys = None if config.key_file is None else Keys.read(config.key_file)
    return Records(config.ttl_s, keys)
