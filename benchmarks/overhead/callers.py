"""The callers of through_grpc.py, in separate processes, so that their cost is not measured."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb

from ..traffic.processes import ChildProcess
from ..traffic.random_images import jpeg
from .echo_server import STREAM, UNARY
from .servers import Pace

_HTTP = "http://"
CALLERS_A_CLIENT = 16
"""Callers of one client process. So few callers do not limit the measured rates."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The messages that one caller received from a stream, and their times on a clock that all processes share."""

    messages: list[bytes]
    times: list[float]


def _client(pipe: Connection) -> None:
    """Executes orders from ``pipe`` one after the other: ("streams", address, request, count) or ("calls", address,
    request, pace). Sends a Heard for each stream, or an answer. Connections stay open."""

    async def read(call: Any, request: bytes) -> Heard:
        messages, times = [], []
        async for message in call(request):
            times.append(time.perf_counter())
            messages.append(message)
        return Heard(messages, times)

    async def ask(method: Any, request: bytes, pace: Pace) -> bytes:
        answers: list[bytes] = []

        async def once() -> None:
            answers[:] = [await method(request)]

        await pace.run(once)
        return answers[0]

    async def main() -> None:
        channels: dict[str, grpc.aio.Channel] = {}
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            kind, address, request, share = order
            if address not in channels and not address.startswith(_HTTP):
                channels[address] = grpc.aio.insecure_channel(address)
                await channels[address].channel_ready()
            channel: Any = channels.get(address)
            if kind == "streams":
                stream = (
                    functools.partial(_by_connect, address)
                    if channel is None
                    else channel.unary_stream(STREAM)
                )
                pipe.send(await asyncio.gather(*(read(stream, request) for _ in range(share))))
            else:
                pipe.send(await ask(channel.unary_unary(UNARY), request, share))
        for channel in channels.values():
            await channel.close()

    asyncio.run(main())


async def _by_connect(address: str, request: bytes) -> AsyncIterator[bytes]:
    """The messages of a stream by the Connect protocol, read without a library: ``address`` begins with http://."""
    host, _, port = address.removeprefix(_HTTP).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = struct.pack(">BI", 0, len(request)) + request
    head = f"POST {STREAM} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: application/connect+proto\r\n\r\n".encode() + body)
    status = await reader.readuntil(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200 "), status
    flags, arrived = 0, bytearray()
    while not flags:
        size = int(await reader.readuntil(b"\r\n"), 16)
        arrived += (await reader.readexactly(size + 2))[:size]
        while len(arrived) >= 5 and len(arrived) >= (end := 5 + int.from_bytes(arrived[1:5])):
            flags, message = arrived[0], bytes(arrived[5:end])
            del arrived[:end]
            if not flags:
                yield message
    assert message == b"{}", message
    writer.close()


class Callers(contextlib.ExitStack):
    """``num`` callers, whose processes end with the context. They call one server at a time."""

    def __init__(self, num: int) -> None:
        super().__init__()
        clients = -(-num // CALLERS_A_CLIENT)
        self._shares = [num // clients + (i < num % clients) for i in range(clients)]
        self._pipes = [self.enter_context(ChildProcess(_client)) for _ in self._shares]

    def read_streams(self, address: str, tokens: int) -> list[Heard]:
        """Each caller starts a stream, all at the same time, and reads it to its end."""
        request = pb.CaptionRequest(image=common_pb2.Image(encoded=jpeg(1, 64, 64)))
        request.caption.max_tokens = tokens
        for pipe, count in zip(self._pipes, self._shares, strict=True):
            pipe.send(("streams", address, request.SerializeToString(), count))
        return [heard for pipe in self._pipes for heard in pipe.recv()]

    def call(self, address: str, request: bytes, pace: Pace) -> bytes:
        """Makes unary calls and returns an answer."""
        for pipe, count in zip(self._pipes, self._shares, strict=True):
            pipe.send(("calls", address, request, replace(pace, callers=count)))
        answers: list[bytes] = [pipe.recv() for pipe in self._pipes]
        return answers[0]


def tokens_of(message: bytes) -> int:
    """Returns the number of tokens up to a message; 0 for a message without text."""
    event = pb.StreamCaptionResponse.FromString(message)
    return event.text_delta.output_tokens if event.HasField("text_delta") else 0
