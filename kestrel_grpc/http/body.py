"""Bodies: reads the body of a request, after its headers are checked and memory is reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

from kestrel_engine import InvalidRequest

from ..edge.calls.call import CallLimit
from ..edge.failures.errors import NotServed, SlowSender, UnsupportedBody
from ..security.admission.admission import MessageTooLarge
from ..security.admission.guard import Guard
from ..security.admission.message_room import Hold, MessageLimits
from ..security.connections.connection_guard import ConnectionUse
from .context import Receive, Scope

BODY_COPIES = 4
"""Number of copies of a body in memory while it is read: as received, as text, decoded, and in a message."""
_TEXT_BYTES = 1024 * 1024
"""Bytes of a body in addition to its image."""


class Bodies:
    """The bodies of all requests of a port."""

    def __init__(self, guard: Guard) -> None:
        self.reads = CallLimit(
            guard.limits.read_s,
            lambda s: SlowSender(f"the request's body did not arrive within {s:g} s"),
        )
        self._largest = largest_body(guard.messages.largest)

    async def read(
        self,
        types: Collection[bytes],
        scope: Scope,
        receive: Receive,
        hold: Hold,
        encoding: bytes = b"",
    ) -> bytearray:
        """``types``: content types, of which the body has one. ``encoding``: the header that may say that the message
        is compressed. Raises MessageTooLarge, MessagesFull, SlowSender, InvalidRequest, UnsupportedBody, NotServed."""
        grows = check_head(types, scope, encoding)
        declared = content_length(scope["headers"])
        if declared is not None:
            self._check_size(declared)
        expected = self._largest if declared is None else declared
        await hold.reserve(BODY_COPIES * (self._largest if grows else expected))
        body = await self.reads.within(self._pull(receive, expected))
        hold.arrived(len(body))
        return cast(bytearray, body)

    async def _pull(self, receive: Receive, most_bytes: int) -> bytearray:
        """Raises MessageTooLarge if more arrives than was reserved, whatever was declared."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            body += message.get("body", b"")
            if len(body) > most_bytes:
                self._check_size(len(body))
                raise MessageTooLarge("", f"the body has more than the declared {most_bytes} bytes")
            if not message.get("more_body"):
                return body

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._largest:
            raise MessageTooLarge(
                "", f"the body has {num_bytes} bytes or more, the limit is {self._largest}"
            )


@dataclass(frozen=True, slots=True)
class Arriving:
    """A body that is read message by message, while its call is answered. ``pulls``: limits the time for a message."""

    receive: Receive
    hold: Hold
    limits: MessageLimits
    pulls: CallLimit
    use: ConnectionUse


def check_head(types: Collection[bytes], scope: Scope, encoding: bytes) -> bool:
    """Checks the headers of a body, as ``Bodies.read`` has them. Returns whether its messages may be compressed."""
    _check_type(types, scope["headers"])
    return _is_compressed(scope["headers"], encoding)


def _check_type(types: Collection[bytes], headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises UnsupportedBody. A browser sends text, forms and bodies without a type to another origin without asking
    the server. It asks before it sends any other type."""
    form = content_type(headers)
    if form not in types or (not form and b"origin" in dict(headers)):
        named = " or ".join(each.decode() for each in types if each)
        raise UnsupportedBody(f"the request needs the header content-type: {named}", types)


def content_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The type of a body without its parameters, in lower case; b"" if the header is missing."""
    return dict(headers).get(b"content-type", b"").partition(b";")[0].strip().lower()


def _is_compressed(headers: Iterable[tuple[bytes, bytes]], encoding: bytes) -> bool:
    """Whether the header ``encoding`` announces gzip. Raises NotServed for another compression, and InvalidRequest for
    a compressed body that unpacks to more than the server has reserved."""
    found = False
    for key, value in headers:
        if key not in (b"content-encoding", encoding) or value.lower() == b"identity":
            continue
        if key != encoding:
            raise InvalidRequest("", "the body is compressed; this path takes no compressed bodies")
        check_compression(value)
        found = True
    return found


def check_compression(name: bytes) -> None:
    """Raises NotServed unless the server can decompress what is so compressed."""
    if name.lower() != b"gzip":
        shown = name[:50].decode("latin-1")
        raise NotServed(f"unknown compression {shown!r}; this server takes gzip and identity")


def largest_body(largest_message: int) -> int:
    """The limit on the bytes of a body. base64 turns three bytes into four."""
    return largest_message * 4 // 3 + _TEXT_BYTES


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Returns the declared length of the body; None if there is none (a chunked body). Raises InvalidRequest."""
    for key, value in headers:
        if key == b"content-length":
            if not value.isdigit():
                raise InvalidRequest("", "the header content-length must be a whole number")
            return int(value)
    return None
