"""Incoming: reads the messages of one call one by one, checks their size, and decompresses and decodes them.

gRPC receives a message only when a handler reads it. Until then, a client can send only as much as a stream's window
holds, 64 KiB. So every method is registered as one with a stream of requests. Its handler reads the first message after
the caller is identified and memory for the largest message is reserved (security/admission/message_room.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from kestrel_engine import InvalidRequest

from ...security.admission.admission import MessageTooLarge
from ...security.admission.message_limits import COPIES, MessageLimits
from ...security.admission.message_room import Hold
from ...security.connections.connection_guard import ConnectionUse
from ..calls.call_limit import CallLimit
from ..failures.errors import NoMessage
from .field_limit import check_fields
from .inflating import inflated, is_compressed

_EOF: Any = cast(Any, grpc.aio).EOF
_A_MOMENT_S = 0.05
"""Seconds to wait after the end of a call's messages, because a cancellation arrives a moment later."""


class Incoming:
    """The messages of one call. ``decode``: converts bytes to a message. ``pulls``: limits the time in which a message
    must arrive. ``use``: the use of the call's connection. ``copies``: of each message's bytes in memory."""

    def __init__(
        self,
        context: Any,
        decode: Callable[[bytes], Any],
        hold: Hold,
        limits: MessageLimits,
        pulls: CallLimit,
        use: ConnectionUse,
        copies: int = COPIES,
    ) -> None:
        self._copies = copies
        self._context, self._decode, self._use = context, decode, use
        # Generated code decodes with a method of the message's class.
        self._descriptor = getattr(getattr(decode, "__self__", None), "DESCRIPTOR", None)
        self._hold, self._limits, self._pulls = hold, limits, pulls

    async def only(self) -> Any:
        """The message of a method with one request. Later messages are not read. Raises MessagesFull, MessageTooLarge,
        NoMessage, SlowSender, InvalidRequest."""
        data = await self._pull()
        if data is _EOF:
            await asyncio.sleep(_A_MOMENT_S)
            raise NoMessage("the call ended without a request message; the method needs one")
        return await self._message(data)

    async def all(self) -> AsyncIterator[Any]:
        """The messages of a method with a stream of requests. The memory of a message is reserved until the next one is
        read. Raises the same errors as ``only``."""
        while (data := await self._pull()) is not _EOF:
            message = await self._message(data)
            del data
            yield message
            del message

    async def reserved(self) -> Any:
        """The next message of a stream, whose memory the caller has reserved in the hold; None after the last one.
        Raises the same errors as ``only``, but not MessagesFull."""
        data = await self._read()
        return None if data is _EOF else await self._message(data)

    async def _pull(self) -> Any:
        await self._hold.reserve(self._limits.reserved_for(self._copies))
        return await self._read()

    async def _read(self) -> Any:
        use = self._use
        use.pulls += 1
        try:
            data = await self._pulls.within(self._context.read())
        finally:
            use.pulls -= 1
            use.heard += 1
        self._hold.arrived(0 if data is _EOF else len(data))
        return data

    async def _message(self, data: bytes) -> Any:
        self._check_size(len(data))
        if is_compressed(data):
            data = await inflated(data, self._limits.largest)
            self._check_size(len(data))
        self._hold.settle(self._copies * len(data))
        if self._descriptor is not None:
            check_fields(data, self._descriptor)
        try:
            return self._decode(data)
        except DecodeError:
            # Without this, gRPC would answer with INTERNAL and log a traceback.
            raise InvalidRequest("", "the request is not a valid message of its type") from None

    def _check_size(self, num_bytes: int) -> None:
        """Raises MessageTooLarge."""
        limits = self._limits
        if num_bytes > limits.largest:
            raise MessageTooLarge(
                "",
                f"the message has {num_bytes} bytes; the limit is {limits.largest}",
                value=num_bytes,
                limit=limits.largest,
            )
        if limits.held is not None and self._copies * num_bytes > limits.held:
            raise MessageTooLarge(
                "",
                f"the message has {num_bytes} bytes and is held {self._copies} times; all messages together may have "
                f"{limits.held}",
            )
