"""Traffic of the soak, in a separate process: all methods, with cancellations, deadlines, slow readers and
disconnections.

``traffic`` is the function of the process. It receives a number of seconds through its pipe, runs traffic for that
time, closes all connections, and sends a Counter of statuses and of malformed connections. It ends when it receives
None.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc
from google.protobuf.message import Message

from benchmarks.traffic.random_images import jpeg
from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.connections.rude_sockets import RudeCall, RudeCaller

NUM_CALLERS = 6
NUM_RUDE = 3
RUDE_HOLD_S = 2.5
"""Seconds of a malformed connection, which is longer than the server waits for a reader."""

QUESTIONS = ("What is this?", "How many red circles are there?", "Is there a star?")
_TOKENS = 24
_TEXT: Any = {"max_tokens": _TOKENS, "sampling": {"temperature": 1.0}}
_DETECT: Any = {"objects": ["red circle"]}

Made = tuple[Callable[..., Any], Message]
"""A method of a stub and its request."""


class Caller:
    """A caller that opens one channel after the other, and makes one call after the other."""

    def __init__(self, address: str, token: str, rng: random.Random, images: list[bytes]) -> None:
        self._address, self._rng, self._images = address, rng, images
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._seeds = 0
        self.came: Counter[str] = Counter()

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            async with grpc.aio.insecure_channel(
                self._address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                self._vision, self._image_service = (
                    VisionServiceStub(channel),
                    ImageServiceStub(channel),
                )
                self._models = ModelServiceStub(channel)
                leaving: Awaitable[Any] | None = None
                for _ in range(self._rng.randrange(1, 30)):
                    if time.monotonic() >= until:
                        break
                    await self._one()
                if self._rng.random() < 0.3:
                    # The channel closes during this call.
                    method, request = self._streamed()
                    leaving = method(request, metadata=self._metadata).read()
                    await asyncio.wait([asyncio.ensure_future(leaving)], timeout=0.1)
                    self.came["left"] += 1

    async def _one(self) -> None:
        timeout = self._rng.uniform(0.01, 0.5) if self._rng.random() < 0.2 else 30.0
        try:
            if self._rng.random() < 0.5:
                await self._unary(timeout)
            else:
                await self._stream(timeout)
        except grpc.aio.AioRpcError as error:
            name = error.code().name
            self.came[name] += 1
            if name in ("INTERNAL", "UNKNOWN", "UNAVAILABLE"):
                self.came[f"{name}: {error.details()}"] += 1
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.came["CANCELLED"] += 1
        else:
            self.came["OK"] += 1

    async def _unary(self, timeout: float) -> None:
        method, request = self._asked()
        call = method(request, timeout=timeout, metadata=self._metadata)
        if self._rng.random() < 0.15:
            await asyncio.sleep(self._rng.uniform(0, 0.2))
            call.cancel()
        await call

    async def _stream(self, timeout: float) -> None:
        method, request = self._streamed()
        call = method(request, timeout=timeout, metadata=self._metadata)
        enough = self._rng.randrange(1, 10) if self._rng.random() < 0.25 else None
        pause = self._rng.uniform(0.01, 0.2) if self._rng.random() < 0.2 else 0.0
        count = 0
        async for _ in call:
            count += 1
            if count == enough:
                call.cancel()
            await asyncio.sleep(pause)

    def _asked(self) -> Made:
        rng, query, image = self._rng, self._query(), self._image()
        star = {"objects": ["star"]}
        outline = {**star, "mask_format": pb.MASK_FORMAT_RLE}
        made: list[Made] = [
            (self._vision.Query, pb.QueryRequest(query=query)),
            (self._vision.Query, pb.QueryRequest(images=[image], query=query)),
            (self._vision.Caption, pb.CaptionRequest(image=image, caption=_TEXT)),
            (self._vision.Point, pb.PointRequest(image=image, point=star)),
            (self._vision.Detect, pb.DetectRequest(image=image, detect=_DETECT)),
            (self._vision.Segment, pb.SegmentRequest(image=image, segment=outline)),
            (self._vision.Analyze, self._analyze()),
            (self._vision.Query, pb.QueryRequest(query={"question": ""})),
            (self._vision.Caption, pb.CaptionRequest(image=self._broken())),
            (self._image_service.PutImage, image_service_pb2.PutImageRequest(image=image)),
            (
                self._image_service.DeleteImage,
                image_service_pb2.DeleteImageRequest(image_id="none"),
            ),
            (self._models.GetLoad, model_service_pb2.GetLoadRequest()),
        ]
        return rng.choice(made)

    def _streamed(self) -> Made:
        image = self._image()
        made: list[Made] = [
            (self._vision.StreamQuery, pb.QueryRequest(images=[image], query=self._query())),
            (self._vision.StreamCaption, pb.CaptionRequest(image=image, caption=_TEXT)),
            (self._vision.StreamDetect, pb.DetectRequest(image=image, detect=_DETECT)),
            (self._vision.StreamAnalyze, self._analyze()),
        ]
        return self._rng.choice(made)

    def _analyze(self) -> pb.AnalyzeRequest:
        detect = {**_DETECT, "max_objects": 3}
        tasks = [pb.Task(query=self._query()), pb.Task(detect=detect)]
        return pb.AnalyzeRequest(image=self._image(), tasks=tasks)

    def _image(self) -> common_pb2.Image:
        """Returns one of a few images or a new one, so that caches evict entries."""
        data = self._rng.choice(self._images)
        if self._rng.random() < 0.5:
            data += self._rng.randbytes(
                8
            )  # Other bytes, and so another image to all caches by source.
        return common_pb2.Image(encoded=data)

    def _broken(self) -> common_pb2.Image:
        data = self._rng.choice(self._images)
        return common_pb2.Image(encoded=data[: self._rng.randrange(1, len(data) - 10)])

    def _query(self) -> pb.QueryTask:
        return pb.QueryTask(question=self._rng.choice(QUESTIONS), **_TEXT)


class NewImageCaller(Caller):
    """Asks about a new image in each call, so that the caches of images fill."""

    async def run(self, until: float) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            self._vision = VisionServiceStub(channel)
            while time.monotonic() < until:
                await self._one()

    async def _one(self) -> None:
        data = self._rng.choice(self._images) + self._rng.randbytes(8)
        query = pb.QueryTask(question=QUESTIONS[1], max_tokens=3, sampling={"temperature": 0})
        request = pb.QueryRequest(images=[common_pb2.Image(encoded=data)], query=query)
        try:
            await self._vision.Query(request, timeout=120, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            self.came[error.code().name] += 1
        else:
            self.came["OK"] += 1


async def _run(
    seconds: float, address: str, token: str, rng: random.Random, images: list[bytes], new: int
) -> Counter[str]:
    until = time.monotonic() + seconds
    kind = NewImageCaller if new else Caller
    callers = [
        kind(address, token, random.Random(rng.random()), images) for _ in range(new or NUM_CALLERS)
    ]
    stream = pb.QueryRequest(query={"question": QUESTIONS[0]})
    asked = RudeCall("/kestrel.v1.VisionService/StreamQuery", stream.SerializeToString(), token)
    came: Counter[str] = Counter()

    async def rude() -> None:
        caller = RudeCaller(address, asked, random.Random(rng.random()))
        while (left := until - time.monotonic()) > 0:
            came[await caller(min(left, caller.rng.uniform(0.2, RUDE_HOLD_S + 1)))] += 1

    async with asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(caller.run(until))
        for _ in range(0 if new else NUM_RUDE):
            group.create_task(rude())
    for caller in callers:
        came += caller.came
    return came


def traffic(pipe: Connection, address: str, token: str, seed: int, new: int) -> None:
    """Sends a Counter for every number of seconds that it receives. Raises no errors. ``new``: this many callers send
    new images only; 0 for mixed and rude callers."""
    rng = random.Random(seed)
    images = [jpeg(i, 320 + 40 * i, 240) for i in range(6)]
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        pipe.send(asyncio.run(_run(seconds, address, token, rng, images, new)))
