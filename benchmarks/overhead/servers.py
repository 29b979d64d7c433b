"""The measured server of through_grpc.py: a real server around a canned engine.

It runs in a separate process with one end of a pipe. It sends its address, replies to "window" with a Window and to
"cpu" with a Snapshot, and ends when it receives None.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TextIO, cast

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_grpc.logs.records import set_up_logging
from kestrel_grpc.process.event_loop import run as run_loop
from kestrel_grpc.process.interpreter import GC_THRESHOLDS, SWITCH_INTERVAL_S
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.batches import BatchesConfig
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig

from .canned_engine import CannedEngine, canned_info
from .cpu_window import snapshot

_NUM_DECODERS = max(2, (os.cpu_count() or 1) - 2)


@dataclass(frozen=True)
class Load:
    """``streams`` callers read ``tokens`` tokens each. The device needs ``step_s`` a step."""

    streams: int
    tokens: int
    step_s: float


def run_canned(pipe: Connection, load: Load, watched: bool, http: bool = False) -> None:
    """Runs the server with a CannedEngine. ``watched``: whether all optional monitoring is on: the access log in JSON,
    metrics, unsampled traces, load in trailers. ``http``: whether it has an HTTP port, whose address follows the other
    one after a comma, and takes batches."""

    async def main(folder: str) -> None:
        config = _config(load)
        engine: CannedEngine | None = None

        async def load_engine() -> InferenceEngine:
            nonlocal engine
            engine = CannedEngine(
                canned_info(config),
                step_s=load.step_s,
                streams=load.streams,
                observer=server.telemetry,
            )
            return cast(InferenceEngine, engine)

        served = _server_config(watched)
        if http:
            batches = BatchesConfig(path=f"{folder}/batches.db")
            served = replace(served, http=HttpConfig(http_listen=served.listen), batches=batches)
        server = KestrelServer(served, config, load_engine)
        await server.start()
        await server.load()
        gc.freeze()
        pipe.send(",".join((server.addresses[0], *server.http_addresses)))
        await _answer(pipe, engine)
        await server.stop(grace_s=0)

    _set_up_interpreter()
    with tempfile.TemporaryFile("w") as log, tempfile.TemporaryDirectory() as folder:
        if watched:
            _watch(log)
        run_loop(main(folder))


def _server_config(watched: bool) -> ServerConfig:
    listen = ("127.0.0.1:0",)
    if not watched:
        return ServerConfig(listen=listen)
    telemetry = TelemetryConfig(traces=("otlp",), prometheus="127.0.0.1:0")
    return ServerConfig(listen=listen, access_log="json", orca=True, telemetry=telemetry)


def _watch(log: TextIO) -> None:
    """Sets the process-wide parts of ``watched``: the log's destination, and a sampler that samples no trace."""
    set_up_logging("info", "json", log)
    os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"


QUESTION = "How many of the blue bars are higher than the red one?"
"""The question of unary calls, which have no image and one token."""


@dataclass(frozen=True)
class Pace:
    """``callers`` callers make ``calls`` calls each, one every ``pause_s``, in turn; 0: without a pause."""

    callers: int
    calls: int
    pause_s: float

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        async def repeat(delay: float) -> None:
            due = time.perf_counter() + delay
            for _ in range(self.calls):
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due += self.pause_s
                await call()

        delays = [self.pause_s * i / self.callers for i in range(self.callers)]
        await asyncio.gather(*(repeat(delay) for delay in delays))


def _config(load: Load) -> RuntimeConfig:
    return RuntimeConfig(
        max_batch_size=load.streams, max_seq_length=2048, preprocess_threads=_NUM_DECODERS
    )


def _set_up_interpreter() -> None:
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def _answer(pipe: Connection, source: Any) -> None:
    """Replies to requests from ``pipe`` until None arrives. ``source`` provides the window."""
    while (asked := await asyncio.to_thread(pipe.recv)) is not None:
        if asked == "window":
            pipe.send(source.window())
        else:
            pipe.send(snapshot())
