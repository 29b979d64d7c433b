"""Malformed connections: silent, half open, garbage, truncated, reset repeatedly, or never read.

Each kind is a coroutine that connects, violates the protocol and closes. It raises no error for the server's reaction.
HTTP/2 is written by hand: a frame is nine bytes and a payload (RFC 9113), and headers are literals without an index
(RFC 7541, section 6.2.2).
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM, _END_HEADERS = 1, 4
_NO_WINDOW = b"\x00\x04\x00\x00\x00\x00"
"""SETTINGS_INITIAL_WINDOW_SIZE = 0: the server may send no byte of a message."""


@dataclass(frozen=True)
class RudeCall:
    """A valid call, with which some kinds of malformed connections begin."""

    path: str
    message: bytes
    token: str


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def headers(asked: RudeCall) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": asked.path,
        ":authority": "soak",
        "te": "trailers",
        "content-type": "application/grpc",
        "authorization": f"Bearer {asked.token}",
    }
    block = b""
    for name, value in fields.items():
        block += b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def call(asked: RudeCall, stream: int = 1) -> bytes:
    """Returns the bytes of a complete call."""
    body = b"\x00" + len(asked.message).to_bytes(4, "big") + asked.message
    return frame(_HEADERS, _END_HEADERS, stream, headers(asked)) + frame(
        _DATA, _END_STREAM, stream, body
    )


class RudeCaller:
    """Makes malformed connections. ``asked``: a call of a streaming method."""

    def __init__(self, address: str, asked: RudeCall, rng: random.Random) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._asked, self.rng = asked, rng
        self.kinds: tuple[Callable[[float], Awaitable[None]], ...] = (
            self.says_nothing, self.says_hello_only, self.talks_garbage, self.talks_http_1,
            self.sends_garbage_frames, self.sends_garbage_headers, self.announces_much, self.stops_half_way,
            self.resets_in_a_row, self.never_reads,
        )  # fmt: skip

    async def __call__(self, hold_s: float) -> str:
        """Makes a connection of a random kind for about ``hold_s`` seconds. Returns the name of the kind."""
        kind = self.rng.choice(self.kinds)
        try:
            await kind(hold_s)
        except OSError:  # The server has closed the connection.
            pass
        return kind.__name__

    async def says_nothing(self, hold_s: float) -> None:
        async with self._connection() as (_, _writer):
            await asyncio.sleep(hold_s)

    async def says_hello_only(self, hold_s: float) -> None:
        async with self._connection() as (_, writer):
            hello = PREFACE + frame(_SETTINGS, 0, 0)
            writer.write(hello[: self.rng.randrange(1, len(hello) + 1)])
            await asyncio.sleep(hold_s)

    async def talks_garbage(self, hold_s: float) -> None:
        await self._send(self.rng.randbytes(self.rng.randrange(1, 5000)), hold_s)

    async def talks_http_1(self, hold_s: float) -> None:
        await self._send(b"GET / HTTP/1.1\r\nHost: soak\r\nX: " + b"x" * 3000, hold_s)

    async def sends_garbage_frames(self, hold_s: float) -> None:
        rng, data = self.rng, PREFACE + frame(_SETTINGS, 0, 0)
        for _ in range(rng.randrange(1, 20)):
            kind, stream = rng.randrange(0, 12), rng.choice((0, 1, 2, 3, 2**31 - 1))
            data += frame(kind, rng.randrange(256), stream, rng.randbytes(rng.randrange(40)))
        await self._send(data, hold_s)

    async def sends_garbage_headers(self, hold_s: float) -> None:
        garbage = self.rng.randbytes(self.rng.randrange(1, 400))
        data = PREFACE + frame(_SETTINGS, 0, 0) + frame(_HEADERS, 0, 1, garbage)
        data += b"".join(frame(_CONTINUATION, 0, 1, garbage) for _ in range(self.rng.randrange(9)))
        await self._send(data, hold_s)

    async def announces_much(self, hold_s: float) -> None:
        """Announces a frame of 16 MB, or a message of 4 GB in a valid call."""
        start = PREFACE + frame(_SETTINGS, 0, 0)
        if self.rng.random() < 0.5:
            await self._send(start + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", hold_s)
        head = frame(_HEADERS, _END_HEADERS, 1, headers(self._asked))
        await self._send(start + head + frame(_DATA, 0, 1, b"\x00\xff\xff\xff\xff"), hold_s)

    async def stops_half_way(self, hold_s: float) -> None:
        data = PREFACE + frame(_SETTINGS, 0, 0) + call(self._asked)
        await self._send(data[: self.rng.randrange(len(PREFACE), len(data))], hold_s)

    async def resets_in_a_row(self, hold_s: float) -> None:
        """Rapid reset: cancels each call in the packet that starts it."""
        data = PREFACE + frame(_SETTINGS, 0, 0)
        for stream in range(1, 401, 2):
            data += call(self._asked, stream) + frame(_RESET, 0, stream, b"\x00\x00\x00\x08")
        await self._send(data, min(hold_s, 1.0))

    async def never_reads(self, hold_s: float) -> None:
        """Opens a stream without a flow-control window, so the answer stays in the server."""
        data = PREFACE + frame(_SETTINGS, 0, 0, _NO_WINDOW) + frame(_SETTINGS, 1, 0)
        await self._send(data + call(self._asked), hold_s)

    async def _send(self, data: bytes, hold_s: float) -> None:
        """Sends data, then reads until the server closes the connection or the time is over."""
        async with self._connection() as (reader, writer):
            writer.write(data)
            try:
                async with asyncio.timeout(hold_s):
                    await writer.drain()
                    while await reader.read(65536):
                        pass
            except TimeoutError:
                pass

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            yield reader, writer
        finally:
            if self.rng.random() < 0.5:
                writer.transport.abort()  # Closes with a TCP reset.
            else:
                writer.close()
