"""ObjectBackend: values as objects ``OWNER/IMAGE`` of a bucket that speaks S3.

S3 knows no expiry of single objects. A value holds its own time (records.py), a put deletes the owner's expired
objects, and a lifecycle rule of the bucket deletes the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from kestrel_engine import ConfigError, clock

from ...settings.shared_images import SharedImagesConfig
from .backend import owner_key

_MOST_OBJECTS = 1000
"""Objects of one owner: one page of a listing."""


def answer_of(error: Exception) -> tuple[int, str] | None:
    """The HTTP status and S3's code, as in (404, "NoSuchBucket"), of the answer that an error of obstore tells; None if
    the store gave none. The code may be empty.

    Obstore's classes don't tell: a listing of a bucket that is not there raises GenericError. Its text also has random
    parts (an address, a time, S3's own ids), so only the parts with these two are read.
    """
    text = str(error).partition("\n\nDebug source:")[0]
    status = re.search(r" status code: ([0-9]{3})\b", text)
    if status is None:
        return None
    code = re.search(r"<Code>([A-Za-z]{1,64})</Code>", text)
    return int(status[1]), "" if code is None else code[1]


class ObjectBackend:
    def __init__(self, store: Any) -> None:
        """``store``: one of obstore's."""
        import obstore

        self._obstore, self._store = obstore, store

    @classmethod
    def open(cls, config: SharedImagesConfig) -> ObjectBackend:
        """Connects to nothing yet. Credentials, region and endpoint come from the variables AWS_…, a web identity or
        the machine's role. Raises ConfigError."""
        assert config.url is not None, "the setting is on"
        parts = urlsplit(config.url)
        timeout = timedelta(seconds=config.timeout_s)
        try:
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError:
            raise ConfigError(
                "shared_images",
                config.url,
                "needs the package obstore: pip install ./clients/python '.[s3]'",
            ) from None
        try:
            store = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                client_options={
                    "timeout": timeout,
                    "connect_timeout": timeout,
                    # With options of ours, the library does not read the variable.
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
                },
                retry_config={"max_retries": 1, "retry_timeout": timeout},
            )
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError("shared_images", config.url, f"can't be used: {reason}") from None
        return cls(store)

    @asynccontextmanager
    async def opened(self, owner: str, image_id: str) -> AsyncIterator[_Object | None]:
        try:
            found = await self._obstore.get_async(self._store, _path(owner, image_id))
        except FileNotFoundError:
            found = None
        yield None if found is None else _Object(found)

    async def put(
        self, owner: str, image_id: str, value: bytes, *, ttl_s: float, owner_bytes: int
    ) -> None:
        await self._make_room(owner, image_id, owner_bytes - len(value), ttl_s)
        await self._obstore.put_async(
            self._store, _path(owner, image_id), value, use_multipart=False
        )

    async def delete(self, owner: str, image_id: str) -> bool:
        path = _path(owner, image_id)
        try:
            await self._obstore.head_async(self._store, path)
        except FileNotFoundError:
            return False
        await self._obstore.delete_async(self._store, path)
        return True

    async def close(self) -> None:
        """The library closes its connections when nothing refers to the store."""

    async def _make_room(self, owner: str, image_id: str, left_bytes: int, ttl_s: float) -> None:
        """Deletes expired objects of the owner, and its oldest until the others have at most ``left_bytes``. Servers
        that put at the same time may exceed this by what they put."""
        pages = self._obstore.list(self._store, prefix=owner_key(owner), chunk_size=_MOST_OBJECTS)
        found = [each async for page in _first(pages) for each in page]
        oldest = datetime.fromtimestamp(clock.wall(), UTC) - timedelta(seconds=ttl_s)
        doomed, used, count = [], 0, 0
        for each in sorted(found, key=lambda each: each["last_modified"], reverse=True):
            if each["path"] == _path(owner, image_id):
                continue
            used, count = used + each["size"], count + 1
            if each["last_modified"] < oldest or used > left_bytes or count >= _MOST_OBJECTS:
                doomed.append(each["path"])
        if doomed:
            await self._obstore.delete_async(self._store, doomed)


class _Object:
    def __init__(self, found: Any) -> None:
        self._found = found
        self.num_bytes: int = found.meta["size"]

    async def read(self) -> bytes:
        return bytes(await self._found.bytes_async())


async def _first(pages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for page in pages:
        yield page
        return


def _path(owner: str, image_id: str) -> str:
    return f"{owner_key(owner)}/{image_id}"
