"""A call's memory is freed when it ends in any way, without the garbage collector: messages are large, and the
collector runs seldom."""

import gc
import secrets
from collections.abc import Callable, Iterator

import grpc
import psutil
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.connections import connection_guard
from tests.abuse.served import METADATA, ServedInThread
from tests.waiting import wait_until

SIDE = 900
IMAGE_BYTES = 3 * SIDE * SIDE
CALLS = 16


@pytest.fixture(scope="module")
def vision() -> Iterator[VisionServiceStub]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with (
        ServedInThread(keeps=False) as served,
        grpc.insecure_channel(served.address, options=options) as channel,
    ):
        yield VisionServiceStub(channel)
        served.assert_at_rest()


def good() -> common_pb2.Image:
    data = bytes(IMAGE_BYTES - 8) + secrets.token_bytes(8)
    return common_pb2.Image(raw=common_pb2.RawImage(data=data, width=SIDE, height=SIDE))


REFUSED = pb.CaptionRequest(image=common_pb2.Image(encoded=b"\xff\xd8\xff" + bytes(IMAGE_BYTES)))
"""One for all: a client's exception holds its request, in this process."""


def answered(vision: VisionServiceStub) -> None:
    vision.Caption(pb.CaptionRequest(image=good()), metadata=METADATA)


def refused(vision: VisionServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        vision.Caption(REFUSED, metadata=METADATA)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def refused_stream(vision: VisionServiceStub) -> None:
    with pytest.raises(grpc.RpcError):
        list(vision.StreamCaption(REFUSED, metadata=METADATA))


def refused_task(vision: VisionServiceStub) -> None:
    tasks = [pb.Task(caption=pb.CaptionTask()), pb.Task(detect=pb.DetectTask(objects=[""]))]
    answer = vision.Analyze(pb.AnalyzeRequest(image=good(), tasks=tasks), metadata=METADATA)
    assert [result.WhichOneof("outcome") for result in answer.results] == ["caption", "error"]


def cancelled(vision: VisionServiceStub) -> None:
    request = pb.CaptionRequest(image=good())
    call = vision.StreamCaption(request, metadata=METADATA)
    next(call)
    call.cancel()


SLOW = [pytest.param(call, marks=pytest.mark.slow) for call in (refused_stream, refused_task)]


@pytest.mark.parametrize("call", [answered, refused, cancelled, *SLOW])
def test_a_call_that_has_ended_holds_nothing(
    vision: VisionServiceStub, call: Callable[[VisionServiceStub], None]
) -> None:
    process = psutil.Process()
    for _ in range(8):
        call(vision)
    gc.collect()
    gc.disable()
    try:
        before = process.memory_info().rss
        for _ in range(CALLS):
            call(vision)
        # Other threads let go of the last ones a little later.
        wait_until(
            lambda: process.memory_info().rss - before < 12 * IMAGE_BYTES,
            lambda: f"{(process.memory_info().rss - before) / IMAGE_BYTES:.0f} of {CALLS} pictures",
        )
    finally:
        gc.enable()
        gc.collect()


def test_the_metadata_of_ended_calls_is_collected_by_its_bytes(
    vision: VisionServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpcio holds it in reference cycles, of too few objects for Python to collect them soon."""
    monkeypatch.setattr(connection_guard, "TOTAL_BYTES", 10 * 15_000)
    value = secrets.token_hex(7_500)
    gc.collect()
    gc.disable()
    asked = pb.QueryRequest(query=pb.QueryTask(question="?"))
    try:
        for _ in range(60):
            vision.Query(asked, metadata=(*METADATA, ("large", value)))
        # By type first: some libraries' objects fail when they are compared with a text.
        pairs = [
            o
            for o in gc.get_objects()
            if issubclass(type(o), tuple) and [*map(type, o[:2])] == [str, str]
        ]
        held = [o for o in pairs if o[:2] == ("large", value)]
    finally:
        gc.enable()
    assert len(held) <= 15
