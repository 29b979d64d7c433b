"""Incoming: the messages of one call, asked for one by one. Owns what is checked between gRPC and a decoded message.

gRPC brings a message only once it is asked for: until then a caller may send as much as a stream's window holds, 64
KiB. So every method is registered as one that takes a stream of requests, and its handler asks for the first, when the
caller is known and there is room for the largest message (security/admission/message_room.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from kestrel_engine import InvalidRequest

from ..security.admission.admission import MessageTooLarge
from ..security.admission.message_limits import COPIES, MessageLimits
from ..security.admission.message_room import Hold
from ..security.connections.connection_guard import ConnectionUse
from .call_limit import CallLimit
from .errors import NoMessage
from .inflating import inflated, is_compressed

_EOF: Any = cast(Any, grpc.aio).EOF
_A_MOMENT_S = 0.05
"""The cancellation of a call comes a moment after the end of its messages."""


class Incoming:
    """``decode`` makes a message of its bytes. ``pulls`` limits how long one may take to arrive. ``use``: of the
    call's connection."""

    def __init__(
        self,
        context: Any,
        decode: Callable[[bytes], Any],
        hold: Hold,
        limits: MessageLimits,
        pulls: CallLimit,
        use: ConnectionUse,
    ) -> None:
        self._context, self._decode, self._use = context, decode, use
        self._hold, self._limits, self._pulls = hold, limits, pulls

    async def only(self) -> Any:
        """The message of a method that takes one. What comes after it is not asked for. Raises MessagesFull,
        MessageTooLarge, NoMessage, SlowSender, InvalidRequest."""
        data = await self._pull()
        if data is _EOF:
            await asyncio.sleep(_A_MOMENT_S)
            raise NoMessage("the call ended without a message, the method takes one")
        return await self._message(data)

    async def all(self) -> AsyncIterator[Any]:
        """The messages of a method that takes a stream; each holds its room until the next is asked for. Raises as
        ``only``."""
        while (data := await self._pull()) is not _EOF:
            message = await self._message(data)
            del data
            yield message
            del message

    async def _pull(self) -> Any:
        await self._hold.reserve(self._limits.reserved)
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
        self._hold.settle(COPIES * len(data))
        try:
            return self._decode(data)
        except DecodeError:
            # Left alone, gRPC would answer with INTERNAL and log a traceback.
            raise InvalidRequest("", "the request is not a valid message of its type") from None

    def _check_size(self, num_bytes: int) -> None:
        """Raises MessageTooLarge."""
        limits = self._limits
        if num_bytes > limits.largest:
            raise MessageTooLarge(
                "", f"the message has {num_bytes} bytes, the limit is {limits.largest}"
            )
        if limits.held is not None and COPIES * num_bytes > limits.held:
            raise MessageTooLarge(
                "",
                f"the message has {num_bytes} bytes and is held {COPIES} times, all together may have {limits.held}",
            )
