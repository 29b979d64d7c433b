"""The messages of a stream of frames as bytes, into which raw pixels are copied once.

Protobuf would copy them four times: into the message of the image, into that of the frame, and twice to encode it. If a
field with a message comes twice, its reader merges both. So the pixels follow the encoded rest of their frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._pb.kestrel.v1 import common_pb2
from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..images.image_forms import ImageInput, Pixels

ToImage = Callable[[ImageInput, list[Pixels]], common_pb2.Image]
"""Makes the message of an image, and puts raw pixels into the list in place of the message. It may read a file or fetch
an address."""

_PATH = (
    (common_pb2.RawImage, "data"),
    (common_pb2.Image, "raw"),
    (pb.Frame, "image"),
    (pb.StreamFramesRequest, "frame"),
)
"""The fields in which the pixels are, the innermost first."""


class FramesStub:
    """StreamFrames with requests that are encoded."""

    def __init__(self, channel: Any) -> None:
        self.StreamFrames = channel.stream_stream(
            "/kestrel.v1.VisionService/StreamFrames",
            response_deserializer=pb.StreamFramesResponse.FromString,
        )


def frame_bytes(frame_id: int, image: ImageInput, to_image: ToImage) -> bytes:
    """Encodes the request of a frame. Blocks. Raises what ``to_image`` raises."""
    pixels: list[Pixels] = []
    request = pb.StreamFramesRequest(frame=pb.Frame(frame_id=frame_id))
    request.frame.image.CopyFrom(to_image(image, pixels))
    encoded = request.SerializeToString()
    return b"".join((encoded, *(part for each in pixels for part in (_header(len(each)), each))))


def _header(num_bytes: int) -> bytes:
    """What comes before so many bytes of pixels: the keys and sizes of the fields in which they are."""
    header = b""
    for message, name in _PATH:
        key = message.DESCRIPTOR.fields_by_name[name].number << 3 | 2
        header = _varint(key) + _varint(len(header) + num_bytes) + header
    return header


def _varint(number: int) -> bytes:
    low = bytearray()
    while number > 0x7F:
        low.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*low, number))
