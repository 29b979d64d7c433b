"""The callers of grpc_overhead.py, in processes of their own so that they are not what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb

from ..traffic.images import jpeg
from ..traffic.processes import ChildProcess
from .echo_server import STREAM, UNARY
from .servers import Pace

CALLERS_A_CLIENT = 16
"""A client process takes that many callers, so that clients are not what is measured."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What one caller heard of a stream: its messages and when they came, seconds of a clock all processes share."""

    messages: list[bytes]
    times: list[float]


def _client(pipe: Connection) -> None:
    """Does what it is told, one thing at a time: ("streams", address, request, count) or ("calls", address, request,
    pace); answers with a Heard for each stream, or with (an answer, seconds of each call). Connections stay."""

    async def read(call: Any, request: bytes) -> Heard:
        messages, times = [], []
        async for message in call(request):
            times.append(time.perf_counter())
            messages.append(message)
        return Heard(messages, times)

    async def ask(method: Any, request: bytes, pace: Pace) -> tuple[bytes, list[float]]:
        times: list[float] = []
        answers: list[bytes] = []

        async def once() -> None:
            began = time.perf_counter()
            answers[:] = [await method(request)]
            times.append(time.perf_counter() - began)

        await pace.run(once)
        return answers[0], times

    async def main() -> None:
        channels: dict[str, grpc.aio.Channel] = {}
        while (told := await asyncio.to_thread(pipe.recv)) is not None:
            kind, address, request, share = told
            if address not in channels:
                channels[address] = grpc.aio.insecure_channel(address)
                await channels[address].channel_ready()
            channel: Any = channels[address]
            if kind == "streams":
                stream = channel.unary_stream(STREAM)
                pipe.send(await asyncio.gather(*(read(stream, request) for _ in range(share))))
            else:
                pipe.send(await ask(channel.unary_unary(UNARY), request, share))
        for channel in channels.values():
            await channel.close()

    asyncio.run(main())


class Callers:
    """``num`` callers in processes that live as long as the context; they call one server at a time."""

    def __init__(self, num: int) -> None:
        clients = -(-num // CALLERS_A_CLIENT)
        self._shares = [num // clients + (i < num % clients) for i in range(clients)]
        self._stack = contextlib.ExitStack()
        self._pipes: list[Connection] = []

    def __enter__(self) -> Callers:
        self._pipes = [self._stack.enter_context(ChildProcess(_client)) for _ in self._shares]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def read_streams(self, address: str, tokens: int) -> list[Heard]:
        """A stream each, begun together and read to the ends."""
        inner = pb.CaptionRequest(image=common_pb2.Image(encoded=jpeg(1, 64, 64)))
        inner.sampling.max_tokens = tokens
        request = pb.StreamCaptionRequest(request=inner).SerializeToString()
        for pipe, count in zip(self._pipes, self._shares, strict=True):
            pipe.send(("streams", address, request, count))
        return [heard for pipe in self._pipes for heard in pipe.recv()]

    def call(self, address: str, request: bytes, pace: Pace) -> tuple[bytes, list[float]]:
        """An answer, and seconds of each call."""
        for pipe, count in zip(self._pipes, self._shares, strict=True):
            pipe.send(("calls", address, request, replace(pace, callers=count)))
        answers = [pipe.recv() for pipe in self._pipes]
        return answers[0][0], [t for _, times in answers for t in times]


def tokens_of(message: bytes) -> int:
    """How many there were when the message was made; 0 of a message that is no text."""
    event = pb.StreamCaptionResponse.FromString(message)
    return event.text_delta.output_tokens if event.HasField("text_delta") else 0


def gaps_ms(heard: list[Heard]) -> list[float]:
    """Between text messages of a stream, the first and the last few left out."""
    found = []
    for each in heard:
        times = [t for t, m in zip(each.times, each.messages, strict=True) if tokens_of(m)]
        found += [1e3 * (b - a) for a, b in itertools.pairwise(times[5:-5])]
    return found
