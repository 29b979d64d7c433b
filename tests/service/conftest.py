"""A real server on a real socket, with the fake runtime behind the real engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_engine import InferenceEngine, RuntimeConfig, SkillRegistry
from kestrel_engine.types.requests import Token
from kestrel_engine.types.step import RuntimeLimits, StepPlan
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.server import ServerConfig
from tests.engine.fakes import fake_build, never_ends
from tests.fake_runtime import FakeRuntime, Script
from tests.service.certificates import authority, server_pair  # noqa: F401  # Fixtures of all rooms.
from tests.service.statuses import Failure, failure
from tests.waiting import WITHIN_S, outlived

LOCAL = (("grpc.use_local_subchannel_pool", 1),)

LIMITS = RuntimeLimits(
    num_pages=200, page_size=2, max_batch_size=3, max_seq_length=300, vocab_size=400
)

ENDLESS = replace(LIMITS, num_pages=40_000, max_seq_length=20_000)
NO_END = 18_000
"""So many tokens of EndlessRuntime take minutes, which is longer than any test waits."""


class EndlessRuntime(FakeRuntime):
    """Writes one letter after another, each in 5 ms, until ``ends`` is set."""

    def __init__(self, limits: RuntimeLimits = ENDLESS) -> None:
        super().__init__(limits, self._next, cost=lambda plan: 0.005)
        self.ends = threading.Event()

    def _next(self, fed: tuple[Token, ...]) -> int:
        return 0 if self.ends.is_set() else never_ends(fed)


class HeldRuntime(FakeRuntime):
    """Writes one letter after another. While ``gate`` is closed, each step waits for it. ``began``: a step has."""

    def __init__(self, limits: RuntimeLimits = LIMITS, script: Script = never_ends) -> None:
        super().__init__(limits, script, cost=self._wait)
        self.gate, self.began = threading.Event(), threading.Event()

    def _wait(self, plan: StepPlan) -> float:
        self.began.set()
        assert self.gate.wait(WITHIN_S), "nobody opened the gate"
        return 0.0


@dataclass
class Served:
    """A running server and what talks to it."""

    server: KestrelServer
    runtime: FakeRuntime
    channel: grpc.aio.Channel
    vision: VisionServiceStub = field(init=False)
    images: ImageServiceStub = field(init=False)
    models: ModelServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.vision = VisionServiceStub(self.channel)
        self.images = ImageServiceStub(self.channel)
        self.models = ModelServiceStub(self.channel)

    @property
    def engine(self) -> InferenceEngine:
        engine = self.server.served.default.loaded
        assert engine is not None
        return engine

    async def send(self, method: str, requests: Iterable[Any], **handling: Any) -> list[bytes]:
        """The responses to a stream of ``requests``, messages or bytes, to ``method``: "VisionService/StreamFrames", or
        the path of one of another package.

        Raises grpc.RpcError. gRPC's synchronous client sends it, because grpc.aio reports INTERNAL in place of the
        server's status if it cannot send a message any more when the server has ended the stream.
        """

        path = method if method.startswith("/") else f"/kestrel.v1.{method}"

        def ask() -> list[bytes]:
            with grpc.insecure_channel(self.server.addresses[0], LOCAL) as channel:
                call = channel.stream_stream(path, request_serializer=to_bytes)
                return list(call(iter(requests), **handling))

        return await asyncio.to_thread(ask)

    async def refusal(self, method: str, requests: Iterable[Any], **handling: Any) -> Failure:
        """How the stream of ``requests`` fails. See ``send``."""
        return await failure(self.send(method, requests, **handling))

    async def overdue(self, ask: Callable[[float], Any]) -> Failure:
        """How the call ``ask(timeout)`` fails whose deadline passes after a step has run meanwhile."""

        async def asked(timeout_s: float) -> tuple[Failure, bool]:
            steps = len(self.runtime.plans)
            return await failure(ask(timeout_s)), len(self.runtime.plans) > steps

        told, _ = await outlived(asked, lambda ended: ended[1])
        return told


def to_bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers; closes them at the end. ``load`` False leaves the model loading."""
    running: list[Served] = []

    async def start(
        runtime: FakeRuntime | None = None,
        *,
        family: str = "moondream3",
        listen: str = "127.0.0.1:0",
        load: bool = True,
        server_config: dict[str, Any] | None = None,
        skills: SkillRegistry | None = None,
        **config: Any,
    ) -> Served:
        runtime = runtime or FakeRuntime(LIMITS)
        settings = RuntimeConfig(max_batch_size=runtime.limits.max_batch_size, **config)

        async def load_engine() -> InferenceEngine:
            built = fake_build(settings, runtime, family)
            return InferenceEngine(settings, built, skills, observer=server.telemetry)

        server = KestrelServer(
            ServerConfig(listen=(listen,), **(server_config or {})), settings, load_engine
        )
        await server.start()
        channel = grpc.aio.insecure_channel(
            server.addresses[0],
            options=[
                ("grpc.max_receive_message_length", 64 * 1024 * 1024),
                ("grpc.max_send_message_length", -1),
                *LOCAL,
            ],
        )
        served = Served(server, runtime, channel)
        running.append(served)
        if load:
            await server.load()
        return served

    yield start
    for served in running:
        if isinstance(served.runtime, HeldRuntime):
            served.runtime.gate.set()
        await served.channel.close()
        await served.server.stop(grace_s=0)


def raw_image(width: int = 60, height: int = 40) -> common_pb2.Image:
    pixels = np.full((height, width, 3), 200, np.uint8)
    raw = common_pb2.RawImage(data=pixels.tobytes(), width=width, height=height)
    return common_pb2.Image(raw=raw)
