"""RedisBackend: values in Redis or Valkey, one primary.

Keys: ``kestrel:images:{OWNER}:IMAGE`` holds a value, and expires by itself. ``kestrel:images:{OWNER}`` is a sorted set
of the owner's values by the time at which they expire, and ``…:bytes`` their sum. A script changes all together, so
that the limit of an owner holds however many servers write. All keys of an owner are in one slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kestrel_engine import ConfigError

from ...settings.shared_images import SharedImagesConfig

_CONNECTIONS = 16


class DamagedValue(Exception):
    """Something else than a value stands in its place. The store itself works."""


class RedisBackend:
    """Values by owner and image id. Belongs to one event loop. Its methods raise any exception if the store fails; the
    caller limits their time."""

    def __init__(self, config: SharedImagesConfig) -> None:
        """Connects to nothing yet. Raises ConfigError."""
        assert config.url is not None, "the setting is on"
        try:
            import redis.asyncio as redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.credentials import CredentialProvider
            from redis.exceptions import ResponseError
        except ImportError:
            raise ConfigError(
                "shared_images",
                config.url,
                "needs the package redis: pip install ./clients/python '.[redis]'",
            ) from None
        self._refused = ResponseError
        parts = urlsplit(config.url)

        class Password(CredentialProvider):  # type: ignore[misc]
            """Reads the password at each connection, so that it can change."""

            def get_credentials(self) -> tuple[str] | tuple[str, str]:
                password = config.password() or ""
                return (parts.username, password) if parts.username else (password,)

            async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
                return self.get_credentials()

        has_password = parts.username or config.password_file or config.password()
        tls: dict[str, Any] = {}
        if parts.scheme == "rediss":
            tls = {"connection_class": redis.SSLConnection, "ssl_ca_certs": config.ca_file}
        # Operations beyond the number of connections wait for one.
        pool = redis.BlockingConnectionPool(
            max_connections=_CONNECTIONS,
            timeout=config.timeout_s,
            host=parts.hostname or "",
            port=parts.port or 6379,
            db=int(parts.path.strip("/") or 0),
            credential_provider=Password() if has_password else None,
            socket_timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            retry=Retry(NoBackoff(), 0),
            **tls,
        )
        self._redis = redis.Redis.from_pool(pool)
        self._put = self._redis.register_script(_script("put"))
        self._delete = self._redis.register_script(_script("delete"))

    @asynccontextmanager
    async def opened(self, owner: str, image_id: str) -> AsyncIterator[StoredValue | None]:
        """The value that is there, before its bytes are read; None if there is none."""
        key = _keys(owner, image_id)[0]
        try:
            num_bytes = await self._redis.strlen(key)
        except self._refused as error:
            if "WRONGTYPE" in str(error):
                raise DamagedValue("it is of another type") from None
            raise
        yield StoredValue(self._redis, key, num_bytes) if num_bytes else None

    async def put(
        self, owner: str, image_id: str, value: bytes, *, ttl_s: float, owner_bytes: int
    ) -> None:
        """Stores a value for ``ttl_s``. Drops the owner's oldest values until all have at most ``owner_bytes``."""
        arguments = (value, image_id, len(value), owner_bytes, int(1000 * ttl_s))
        await self._put(keys=_keys(owner, image_id), args=arguments)

    async def delete(self, owner: str, image_id: str) -> bool:
        """Returns whether there was a value."""
        return bool(await self._delete(keys=_keys(owner, image_id), args=(image_id,)))

    async def close(self) -> None:
        await self._redis.aclose()


class StoredValue:
    def __init__(self, redis: Any, key: str, num_bytes: int) -> None:
        self._redis, self._key, self.num_bytes = redis, key, num_bytes

    async def read(self) -> bytes:
        """The bytes, not more than ``num_bytes``."""
        # The value may have been replaced by a larger one meanwhile.
        return bytes(await self._redis.getrange(self._key, 0, self.num_bytes - 1))


def _script(name: str) -> str:
    return Path(__file__).with_name(f"{name}.lua").read_text(encoding="utf-8")


def _keys(owner: str, image_id: str) -> tuple[str, str, str]:
    index = f"kestrel:images:{{{owner_key(owner)}}}"
    return f"{index}:{image_id}", index, f"{index}:bytes"


def owner_key(owner: str) -> str:
    """The owner's part of a key. Names of owners may have any characters, and are not shown in the store."""
    return hashlib.sha256(b"kestrel images\0" + owner.encode()).hexdigest()[:32]
