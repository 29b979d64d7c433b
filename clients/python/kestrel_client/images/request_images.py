"""The images of a request, wherever its fields hold them."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from .._pb.kestrel.v1 import common_pb2


def request_images(message: Message) -> Iterator[common_pb2.Image]:
    """Yields the images that are set in a request, in the order of the prompt."""
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None or not kind.full_name.startswith("kestrel.v1."):
            continue
        for each in (value,) if isinstance(value, Message) else value:
            if isinstance(each, common_pb2.Image):
                yield each
            elif isinstance(each, Message):
                yield from request_images(each)
