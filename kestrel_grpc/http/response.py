"""ResponseWriter: writes the response of one HTTP request, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from ..edge.calls.current_call import current_call
from ..edge.failures.errors import SlowReader
from .context import Send
from .forms import JSON, Form, Told, Whole
from .refusals import Rename


class ResponseWriter:
    """The response of one request. A write that the client does not read for ``limit_s`` seconds raises SlowReader."""

    def __init__(self, send: Send, limit_s: float | None, form: Form) -> None:
        self._send, self._limit_s, self._form = send, limit_s, form
        self.events: Callable[[Any], Iterable[bytes]] | None = None
        self.rename: Rename = lambda path: path
        """Until the request is read, errors have the client's names of fields."""
        self.has_read_all = False
        """Whether the request's body was read to its end. Otherwise the connection can't be used again."""
        self._has_begun = False

    async def write(self, message: Any) -> None:
        """Sends the events of one message of a stream."""
        assert self.events is not None, "only streams write"
        await self._stream(b"".join(self.events(message)))

    async def end(self) -> None:
        """Ends a stream."""
        await self._stream(self._form.ending)
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(self, body: Any) -> None:
        """Sends a whole response."""
        if not isinstance(body, Whole):
            body = Whole(orjson.dumps(body), JSON)
        await self._whole(200, body)

    async def refuse(self, told: Told) -> None:
        """Sends an error: as a response, or as the last part of a stream that has begun."""
        if not self._has_begun:
            await self._whole(told.status, told.whole)
            return
        await self._stream(told.event)
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, status: int, body: Whole) -> None:
        kind = (b"content-type", body.content_type)
        length = (b"content-length", str(len(body.data)).encode())
        await self._begin(status, (kind, length, *body.headers))
        await self._put({"type": "http.response.body", "body": body.data, "more_body": False})

    async def _stream(self, data: bytes) -> None:
        if not data:
            return
        if not self._has_begun:
            kind = (b"content-type", self._form.stream_type)
            await self._begin(200, (kind, (b"cache-control", b"no-cache")))
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        ids = [(key.encode(), value.encode()) for key, value in current_call().ids]
        close = () if self.has_read_all else ((b"connection", b"close"),)
        await self._put(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *ids, *close],
            }
        )

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._send(message)
        except TimeoutError:
            raise SlowReader(
                f"the client read nothing of its response for {self._limit_s:g} s"
            ) from None
