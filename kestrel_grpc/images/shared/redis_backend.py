"""RedisBackend: values in Redis or Valkey, one primary.

Keys: ``kestrel:images:{OWNER}:IMAGE`` holds a value, and expires by itself. ``kestrel:images:{OWNER}`` is a sorted set
of the owner's values by the time at which they expire, and ``…:bytes`` their sum. A script changes all together, so
that the limit of an owner holds however many servers write. All keys of an owner are in one slot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from kestrel_engine import ConfigError

from ...settings.shared_images import SharedImagesConfig
from .backend import DamagedValue, owner_key

_CONNECTIONS = 16
_PUT = """
local value, index, sum = KEYS[1], KEYS[2], KEYS[3]
local id, size, limit, ttl = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function bytes(member) return tonumber(string.match(member, '^(%d+):')) end
local total = tonumber(redis.call('GET', sum) or '')
if not total or redis.call('EXISTS', index) == 0 then
  total = 0
  for _, member in ipairs(redis.call('ZRANGE', index, 0, -1)) do total = total + bytes(member) end
end
local function drop(member)
  redis.call('ZREM', index, member)
  total = total - bytes(member)
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, 1000)) do drop(member) end
local own = size .. ':' .. id
if redis.call('ZSCORE', index, own) then drop(own) end
local before = redis.pcall('STRLEN', value)
if type(before) == 'number' and redis.call('ZSCORE', index, before .. ':' .. id) then drop(before .. ':' .. id) end
while total + size > limit do
  local oldest = redis.call('ZRANGE', index, 0, 0)[1]
  if not oldest then break end
  drop(oldest)
  redis.call('UNLINK', index .. ':' .. string.match(oldest, ':(.*)$'))
end
redis.call('SET', value, ARGV[1], 'PX', ttl)
redis.call('ZADD', index, now + ttl, own)
redis.call('PEXPIRE', index, ttl)
redis.call('SET', sum, total + size, 'PX', ttl)
"""
_DELETE = """
local member = redis.call('STRLEN', KEYS[1]) .. ':' .. ARGV[1]
if redis.call('ZREM', KEYS[2], member) == 1 then
  redis.call('DECRBY', KEYS[3], string.match(member, '^(%d+):'))
end
return redis.call('UNLINK', KEYS[1])
"""


class RedisBackend:
    """Belongs to one event loop."""

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
        self._put = self._redis.register_script(_PUT)
        self._delete = self._redis.register_script(_DELETE)

    @asynccontextmanager
    async def opened(self, owner: str, image_id: str) -> AsyncIterator[_Value | None]:
        key = _keys(owner, image_id)[0]
        try:
            num_bytes = await self._redis.strlen(key)
        except self._refused as error:
            if "WRONGTYPE" in str(error):
                raise DamagedValue("it is of another type") from None
            raise
        yield _Value(self._redis, key, num_bytes) if num_bytes else None

    async def put(
        self, owner: str, image_id: str, value: bytes, *, ttl_s: float, owner_bytes: int
    ) -> None:
        arguments = (value, image_id, len(value), owner_bytes, int(1000 * ttl_s))
        await self._put(keys=_keys(owner, image_id), args=arguments)

    async def delete(self, owner: str, image_id: str) -> bool:
        return bool(await self._delete(keys=_keys(owner, image_id), args=(image_id,)))

    async def close(self) -> None:
        await self._redis.aclose()


class _Value:
    def __init__(self, redis: Any, key: str, num_bytes: int) -> None:
        self._redis, self._key, self.num_bytes = redis, key, num_bytes

    async def read(self) -> bytes:
        # The value may have been replaced by a larger one meanwhile.
        return bytes(await self._redis.getrange(self._key, 0, self.num_bytes - 1))


def _keys(owner: str, image_id: str) -> tuple[str, str, str]:
    index = f"kestrel:images:{{{owner_key(owner)}}}"
    return f"{index}:{image_id}", index, f"{index}:bytes"
