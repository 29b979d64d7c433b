"""Envelopes of messages in a body: a byte of flags, the length in four bytes, and the content. gRPC-Web calls them
frames."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from kestrel_engine import InvalidRequest

from ...edge.messages.incoming import check_fields
from ...security.admission.admission import MessageTooLarge

HEAD_BYTES = 5


def envelope(flags: int, content: bytes) -> bytes:
    return bytes([flags]) + len(content).to_bytes(HEAD_BYTES - 1) + content


def take_head(body: bytearray, name: str, largest: int | None = None) -> int:
    """Removes the head of the only envelope of a body, and returns its flags. ``name``: of envelopes, for errors.
    ``largest``: limit on the length. Raises InvalidRequest, MessageTooLarge."""
    if len(body) < HEAD_BYTES:
        raise InvalidRequest("", f"the body holds no whole {name}")
    flags, length = body[0], int.from_bytes(body[1:HEAD_BYTES])
    if largest is not None and length > largest:
        raise MessageTooLarge.of(length, largest)
    if length != (following := len(body) - HEAD_BYTES):
        raise InvalidRequest(
            "",
            f"the {name} announces {length} bytes, but {following} follow; the method takes one message",
        )
    del body[:HEAD_BYTES]
    return flags


def parse_proto(data: bytes | bytearray, message: Any) -> None:
    """Fills ``message``. Raises InvalidRequest."""
    try:
        with memoryview(data) as view:
            check_fields(view, message.DESCRIPTOR)
            message.ParseFromString(view)
    except DecodeError:
        raise InvalidRequest("", "the request is not a valid message of its type") from None
