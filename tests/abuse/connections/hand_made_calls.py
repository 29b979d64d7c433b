"""HandMadeCalls: calls written frame by frame, for messages that no gRPC client sends.

Owns one connection: it obeys the server's windows, as a server would cut off a client that doesn't, and says what the
server answered. A message may be announced and never finished, compressed by hand, or sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.abuse.connections.rude_sockets import PREFACE, frame

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW, _FRAME = 65535, 16384


def head(path: str, **metadata: str) -> bytes:
    """The block of a call's headers: literals without an index."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "abuse",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in metadata.items()},
    }
    block = b""
    for name, value in fields.items():
        assert len(name) < 127 and len(value) < 127
        block += b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


@dataclass(frozen=True)
class Body:
    """What a call sends: ``start``, then zeros, ``sent`` bytes of a message that is announced to have ``announced``."""

    announced: int
    sent: int
    start: bytes = b""
    compressed: bool = False

    def pieces(self) -> AsyncIterator[bytes]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        prefix = bytes([self.compressed]) + self.announced.to_bytes(4, "big") + self.start
        yield prefix
        left, zeros = self.sent - len(self.start), bytes(_FRAME)
        while left > 0:
            yield zeros[:left]
            left -= _FRAME


def whole(message: bytes) -> Body:
    return Body(len(message), len(message), message)


def bomb(num_bytes: int) -> Body:
    """``num_bytes`` that travel as a thousandth of it."""
    data = gzip.compress(bytes(num_bytes), 9)
    return Body(len(data), len(data), data, compressed=True)


class HandMadeCalls:
    """A context; any number of calls on one connection, to ``address``: HOST:PORT."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._window = defaultdict(lambda: self._initial)
        self._initial = _INITIAL_WINDOW
        self._moved = asyncio.Event()
        self._next = 1
        self.ended: dict[int, bytes] = {}
        """By stream: all of its headers and trailers, as they came."""
        self.sent_bytes = 0
        self.closed = False

    async def __aenter__(self) -> HandMadeCalls:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        self._window[0] = _INITIAL_WINDOW
        self._writer.write(PREFACE + frame(_SETTINGS, 0, 0))
        self._reading = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._reading.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._reading

    async def call(
        self, path: str, *bodies: Body, end: bool = True, linger_s: float = 0.0, **metadata: str
    ) -> bytes:
        """Sends ``bodies`` as far as the server lets it within ``linger_s`` seconds, then what was answered; b"" for
        nothing yet. ``end`` False leaves the call open."""
        stream, self._next = self._next, self._next + 2
        self._writer.write(frame(_HEADERS, _END_HEADERS, stream, head(path, **metadata)))
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(linger_s or None):
                for body in bodies:
                    async for piece in body.pieces():
                        await self._send(stream, piece)
                if end and stream not in self.ended:
                    self._writer.write(frame(_DATA, _END_STREAM, stream))
                while stream not in self.ended and not self.closed:
                    self._moved.clear()
                    await self._moved.wait()
        return self.ended.get(stream, b"")

    async def _send(self, stream: int, piece: bytes) -> None:
        while piece and stream not in self.ended and not self.closed:
            size = min(len(piece), self._window[stream], self._window[0], _FRAME)
            if size <= 0:
                self._moved.clear()
                await self._moved.wait()
                continue
            self._window[stream] -= size
            self._window[0] -= size
            self._writer.write(frame(_DATA, 0, stream, piece[:size]))
            await self._writer.drain()
            self.sent_bytes += size
            piece = piece[size:]

    async def _read(self) -> None:
        try:
            while True:
                start = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(start[:3], "big"))
                self._take(start[3], start[4], int.from_bytes(start[5:], "big"), payload)
        except (OSError, asyncio.IncompleteReadError):
            self.closed = True
            self._moved.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                if payload[at : at + 2] == b"\x00\x04":
                    new = int.from_bytes(payload[at + 2 : at + 6], "big")
                    for key in [key for key in self._window if key]:
                        self._window[key] += new - self._initial
                    self._initial = new
            self._writer.write(frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._writer.write(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW:
            self._window[stream] += int.from_bytes(payload, "big")
        elif kind == _HEADERS and flags & _END_STREAM:
            self.ended[stream] = payload
        elif kind == _RESET:
            self.ended.setdefault(stream, b"reset")
        elif kind == _GOAWAY:
            self.closed = True
        self._moved.set()
