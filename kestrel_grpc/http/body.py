"""Bodies: reads the body of a request, after its headers are checked and memory is reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import cast

from kestrel_engine import InvalidRequest

from ..edge.calls.call import CallLimit
from ..edge.failures.errors import SlowSender, UnsupportedBody
from ..security.admission.admission import MessageTooLarge
from ..security.admission.guard import Guard
from ..security.admission.message_room import Hold
from .context import Receive, Scope

BODY_COPIES = 4
"""Number of copies of a body in memory while it is read: as received, as text, decoded, and in a message."""
_TEXT_BYTES = 1024 * 1024
"""Bytes of a body in addition to its image."""


class Bodies:
    """The bodies of all requests of a port."""

    def __init__(self, guard: Guard) -> None:
        self._reads = CallLimit(
            guard.limits.read_s,
            lambda s: SlowSender(f"the request's body did not arrive within {s:g} s"),
        )
        self._largest = guard.messages.largest * 4 // 3 + _TEXT_BYTES
        """Limit on the bytes of a body. base64 turns three bytes into four."""

    async def read(
        self, types: Collection[bytes], scope: Scope, receive: Receive, hold: Hold
    ) -> bytearray:
        """``types``: content types, of which the body has one. Raises MessageTooLarge, MessagesFull, SlowSender,
        InvalidRequest, UnsupportedBody."""
        _check_type(types, scope["headers"])
        _check_encoding(scope["headers"])
        declared = content_length(scope["headers"])
        if declared is not None:
            self._check_size(declared)
        expected = self._largest if declared is None else declared
        await hold.reserve(BODY_COPIES * expected)
        body = await self._reads.within(self._pull(receive, expected))
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


def _check_type(types: Collection[bytes], headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises UnsupportedBody. A browser sends text, forms and bodies without a type to another origin without asking
    the server. It asks before it sends any other type."""
    fields = dict(headers)
    given = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if given not in types or (not given and b"origin" in fields):
        named = " or ".join(each.decode() for each in types if each)
        raise UnsupportedBody(f"the request needs the header content-type: {named}")


def _check_encoding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises InvalidRequest for a compressed body, which would unpack to more than the server has reserved."""
    for key, value in headers:
        if key == b"content-encoding" and value.lower() != b"identity":
            raise InvalidRequest(
                "", "the body is compressed; this server takes uncompressed bodies only"
            )


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Returns the declared length of the body; None if there is none (a chunked body). Raises InvalidRequest."""
    for key, value in headers:
        if key == b"content-length":
            if not value.isdigit():
                raise InvalidRequest("", "the header content-length must be a whole number")
            return int(value)
    return None
