"""The callers of through_http.py: streams read from the HTTP port, in processes of their own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import orjson

from ..traffic.images import jpeg
from ..traffic.processes import ChildProcess
from .callers import CALLERS_A_CLIENT

Span = tuple[float, float]
"""The times of the first and the last data of a stream, on a clock that all processes share."""

_IMAGE = base64.b64encode(jpeg(1, 64, 64)).decode()


def caption_request(tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a streamed caption of Moondream's REST interface."""
    settings = {"max_tokens": tokens}
    return "/v1/caption", {"image_url": _IMAGE, "stream": True, "settings": settings}


def chat_request(tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a streamed chat completion of OpenAI's interface."""
    url = {"url": f"data:image/jpeg;base64,{_IMAGE}"}
    content = [
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": "What is it?"},
    ]
    message = {"role": "user", "content": content}
    return "/v1/chat/completions", {"messages": [message], "stream": True, "max_tokens": tokens}


def _client(pipe: Connection) -> None:
    """Executes orders (address, request, count) from ``pipe``: reads ``count`` streams at a time, and sends a Span for
    each."""

    async def read(address: str, request: bytes) -> Span:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        last = await reader.read(65536)
        first = time.perf_counter()
        assert last.startswith(b"HTTP/1.1 200 "), last
        while data := await reader.read(65536):
            last = last[-65536:] + data
        ended = time.perf_counter()
        writer.close()
        assert b'"completed":true' in last or b"data: [DONE]" in last, "the stream ended early"
        return first, ended

    async def main() -> None:
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            address, request, count = order
            pipe.send(await asyncio.gather(*(read(address, request) for _ in range(count))))

    asyncio.run(main())


class HttpCallers:
    """``num`` callers, whose processes run during the context."""

    def __init__(self, num: int) -> None:
        clients = -(-num // CALLERS_A_CLIENT)
        self._shares = [num // clients + (i < num % clients) for i in range(clients)]
        self._stack = contextlib.ExitStack()
        self._pipes: list[Connection] = []

    def __enter__(self) -> HttpCallers:
        self._pipes = [self._stack.enter_context(ChildProcess(_client)) for _ in self._shares]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def read_streams(
        self, address: str, make: Callable[[int], tuple[str, dict[str, Any]]], tokens: int
    ) -> list[Span]:
        """Each caller starts a stream, all at the same time, and reads it to its end."""
        path, body = make(tokens)
        data = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        for pipe, count in zip(self._pipes, self._shares, strict=True):
            pipe.send((address, head.encode() + data, count))
        return [span for pipe in self._pipes for span in pipe.recv()]
