"""The bare grpc.aio server that through_grpc.py compares with: no interceptors, no engine, prepared messages.

It runs in a separate process with one end of a pipe. It sends its address, then replies to "streamed" with the CPU time
of the latest round of streams and to "cpu" with a Snapshot. It ends when it receives None.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.process.interpreter import GC_THRESHOLDS, SWITCH_INTERVAL_S

from .cpu_window import snapshot

STREAM = "/kestrel.v1.VisionService/StreamCaption"
UNARY = "/kestrel.v1.VisionService/Query"
_TYPES: dict[str, tuple[Any, Any]] = {
    STREAM: (pb.StreamCaptionResponse, pb.CaptionRequest),
    UNARY: (pb.QueryResponse, pb.QueryRequest),
}
"""The response and the request of each method."""

_ID = (("x-request-id", 32 * "0"),)
"""A constant id with the length of the service's ids. Generating an id is a cost of the service."""


class _Echo:
    """Streams start together, when ``callers`` streams are open. Every ``pause_s``, all waiting calls are answered
    together, as after a step of a device."""

    def __init__(self, messages: list[Any], callers: int, pause_s: float, metadata: bool) -> None:
        self._messages, self._callers, self._pause_s = messages, callers, pause_s
        self._metadata = metadata
        self._waiters: list[asyncio.Future[None]] = []
        self._waited_for = asyncio.Event()
        self._came = 0
        self._began = asyncio.Event()
        self._cpu = [0.0, 0.0]

    @property
    def cpu_s(self) -> float:
        """CPU time of the latest round of streams, from the first message to the last."""
        return self._cpu[1] - self._cpu[0]

    async def unary(self, request: Any, context: Any) -> Any:
        if self._metadata:
            await context.send_initial_metadata(_ID)
        await self._turn()
        return self._messages[0]

    async def stream(self, request: Any, context: Any) -> None:
        self._came += 1
        began = self._began
        if self._came == self._callers:
            self._came, self._began = 0, asyncio.Event()
            self._cpu[0] = time.process_time()
            began.set()
        await began.wait()
        for message in self._messages:
            await self._turn()
            await context.write(message)
        self._cpu[1] = time.process_time()

    def _turn(self) -> asyncio.Future[None]:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._waited_for.set()
        return waiter

    async def tick(self) -> None:
        due = 0.0
        while True:
            if not self._waiters:
                self._waited_for.clear()
                await self._waited_for.wait()
            due = max(due + self._pause_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            ready, self._waiters = self._waiters, []
            for waiter in ready:
                if not waiter.done():
                    waiter.set_result(None)


def run_echo(
    pipe: Connection,
    method: str,
    messages: list[bytes],
    callers: int,
    pause_s: float,
    metadata: bool = False,
) -> None:
    """Runs the server. Every ``pause_s``, it sends the next of ``messages`` to all streams and answers waiting unary
    calls with the first message. ``metadata``: send the service's headers before an answer."""

    async def main() -> None:
        kind, asked = _TYPES[method]
        echo = _Echo([kind.FromString(m) for m in messages], callers, pause_s, metadata)
        types = {
            "request_deserializer": asked.FromString,
            "response_serializer": kind.SerializeToString,
        }
        handler = (
            grpc.unary_stream_rpc_method_handler(echo.stream, **types)
            if method == STREAM
            else grpc.unary_unary_rpc_method_handler(echo.unary, **types)
        )
        server = grpc.aio.server()
        service, _, name = method[1:].partition("/")
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ticking = asyncio.create_task(echo.tick())
        gc.freeze()
        pipe.send(f"127.0.0.1:{port}")
        while (question := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(echo.cpu_s if question == "streamed" else snapshot())
        ticking.cancel()
        await server.stop(None)

    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(main())
