"""Frames that are encoded without protobuf's copies of their pixels."""

import numpy as np
import pytest
from PIL import Image

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client.calls.frame_messages import frame_bytes
from kestrel_client.images.image_forms import to_image

PIXELS = np.random.default_rng(0).integers(0, 256, (150, 200, 4), np.uint8)


@pytest.mark.parametrize(
    "image",
    [
        PIXELS,
        PIXELS[:3, :2, :3],  # not contiguous
        PIXELS[:1, :1, 0],
        Image.fromarray(PIXELS),
        b"a file",
    ],
    ids=["array", "part", "one pixel", "Pillow", "bytes"],
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
