"""try_store: writes a small value to the store of shared images, reads and deletes it. For ``doctor``."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from kestrel_engine import clock

from ...settings.shared_images import SharedImagesConfig
from ..store import StoredImage
from .records import OVERHEAD_BYTES, Records
from .redis_backend import RedisBackend
from .shared_images import reason_of

_SOURCE = b"kestrel-grpc doctor"


class TrialError(Exception):
    """The store does not do what a server needs. ``remedy``: what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


async def try_store(config: SharedImagesConfig) -> float:
    """Returns the milliseconds of a write and a read. The value is no caller's, and no caller can name it.

    Raises ConfigError and TrialError.
    """
    backend, records = RedisBackend(config), Records.open(config)
    image = StoredImage(f"img_{secrets.token_hex(16)}", _SOURCE, 1, 1)
    owner = f"doctor\0{secrets.token_hex(16)}"
    began, doing = clock.now(), "write"
    try:
        async with asyncio.timeout(config.timeout_s):
            await backend.put(
                owner,
                image.image_id,
                records.pack(owner, image),
                ttl_s=min(60.0, config.ttl_s),
                owner_bytes=OVERHEAD_BYTES + len(_SOURCE),
            )
        doing = "read"
        async with asyncio.timeout(config.timeout_s):
            async with backend.opened(owner, image.image_id) as value:
                data = None if value is None else await value.read()
        took_ms = 1e3 * (clock.now() - began)
        if data is None or records.unpack(owner, image.image_id, data).source != _SOURCE:
            raise TrialError(
                "what was written is not there",
                "does it drop values at once? Set maxmemory and maxmemory-policy volatile-ttl",
            )
        doing = "delete"
        async with asyncio.timeout(config.timeout_s):
            await backend.delete(owner, image.image_id)
        return took_ms
    except TrialError:
        raise
    except Exception as error:  # The store and its library may raise anything.
        message = f"can't {doing}: {reason_of(error, config.timeout_s)}"
        raise TrialError(message, _remedy(error)) from None
    finally:
        with suppress(Exception):
            async with asyncio.timeout(config.timeout_s):
                await backend.close()


def _remedy(error: Exception) -> str:
    text = f"{type(error).__name__} {error}".lower()
    if any(word in text for word in ("auth", "noperm", "wrongpass", "permission")):
        return (
            "give the password with KESTREL_SHARED_IMAGES_PASSWORD or --shared-images-password-file, and the user "
            "the rights that docs/run/scaling.md lists (Secrets)"
        )
    if "ssl" in text or "certificate" in text:
        return "rediss:// needs a server with TLS; --shared-images-ca names its authority"
    return "check the address of --shared-images, the network and whether the store runs; a server works without"
