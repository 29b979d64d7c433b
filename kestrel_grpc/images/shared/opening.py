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
    backend: Backend
    if config.is_redis:
        from .redis_backend import RedisBackend

        backend = RedisBackend(config)
    else:
        from .object_backend import ObjectBackend

        backend = ObjectBackend.open(config)
    keys = None if config.key_file is None else Keys.read(config.key_file)
    return SharedImages(config, backend, Records(config.ttl_s, keys), on_event)
