"""Backend: what the shared images need of a store. Values are bytes by owner and image id."""

from __future__ import annotations

import hashlib
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ...settings.shared_images import SharedImagesConfig


class Backend(Protocol):
    """A store. Its methods raise any exception if it fails; the caller limits their time."""

    def opened(self, owner: str, image_id: str) -> AbstractAsyncContextManager[OpenedValue | None]:
        """The value that is there, before its bytes are read; None if there is none."""
        ...

    async def put(
        self, owner: str, image_id: str, value: bytes, *, ttl_s: float, owner_bytes: int
    ) -> None:
        """Stores a value for ``ttl_s``. Drops the owner's oldest values until all have at most ``owner_bytes``."""
        ...

    async def delete(self, owner: str, image_id: str) -> bool:
        """Returns whether there was a value."""
        ...

    async def close(self) -> None: ...


class OpenedValue(Protocol):
    num_bytes: int

    async def read(self) -> bytes:
        """The bytes, not more than ``num_bytes``."""
        ...


class DamagedValue(Exception):
    """Something else than a value stands in its place. The store itself works."""


def open_backend(config: SharedImagesConfig) -> Backend:
    """The store that the configuration names. Connects to nothing yet. Raises ConfigError."""
    if config.is_redis:
        from .redis_backend import RedisBackend

        return RedisBackend(config)
    from .object_backend import ObjectBackend

    return ObjectBackend.open(config)


def owner_key(owner: str) -> str:
    """The owner's part of a key. Names of owners may have any characters, and are not shown in the store."""
    return hashlib.sha256(b"kestrel images\0" + owner.encode()).hexdigest()[:32]
