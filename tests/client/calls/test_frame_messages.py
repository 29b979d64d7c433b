"""Frames that are encoded without protobuf's copies of their pixels."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client.calls.frame_messages import frame_bytes
from kestrel_client.calls.frames import AsyncFrames, FrameCall, Frames
from kestrel_client.images.image_forms import to_image

PIXELS = np.random.default_rng(0).integers(0, 256, (150, 200, 4), np.uint8)


@pytest.mark.parametrize(
    "image",
    [
        PIXELS,
        PIXELS[:3, :2, :3],  # not contiguous
        PIXELS[:1, :1, 0],
        np.ma.masked_array(PIXELS, PIXELS > 9),
        Image.fromarray(PIXELS),
        b"a file",
    ],
    ids=["array", "part", "one pixel", "masked", "Pillow", "bytes"],
)
def test_the_server_reads_what_protobuf_would_have_encoded(image):
    def on_grey(image, pixels):
        message = to_image(image, 2**20, pixels)
        message.background = "#777777"
        assert not message.raw.data
        return message

    wanted = common_pb2.Image(background="#777777")
    wanted.MergeFrom(to_image(image, 2**20))
    frame = pb.Frame(frame_id=300, image=wanted)
    encoded = frame_bytes(300, image, on_grey)
    assert pb.StreamFramesRequest.FromString(encoded) == pb.StreamFramesRequest(frame=frame)


@pytest.mark.parametrize("kind", [Frames, AsyncFrames])
async def test_a_connection_that_is_lost_during_the_encoding_loses_no_frame(kind):
    """The next connection sends the frame."""
    lost = grpc.aio.Metadata()
    failures = [grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, lost, lost, "lost")]

    def encoded(image, pixels):
        if failures:
            stream._failed(failures.pop())
        return to_image(image, 2**20, pixels)

    async def ids(connection: int) -> list[int]:
        messages: Any = stream._messages(connection)
        sent = [m async for m in messages] if isinstance(messages, AsyncIterator) else [*messages]
        return [pb.StreamFramesRequest.FromString(each).frame.frame_id for each in sent[1:]]

    call = FrameCall(pb.FramesConfig(), {}, encoded, {}, reconnect=True)
    stream = kind(None, call, [PIXELS, PIXELS])
    assert await ids(0) == [] and await ids(1) == [1, 2]
    assert [*stream._under_way] == [1, 2]
