"""The edge of methods whose streams carry many requests, each with its responses: ModelStreamInfer, StreamFrames.

The caller is identified once. Each request is then a call of its own for limits, logs, metrics and traces, and runs
beside the others of its stream. A request that fails is answered by a message, and the stream continues; what concerns
the whole stream ends it with a status.

A message is read when memory for it is reserved, as everywhere. While requests of the stream run, this memory must be
spare, because the next request may not come soon. A stream without requests ends after the time that a message may
take, because it holds this memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc

from kestrel_engine import EngineClosed, Quota

from ..security.admission.admission import TooManyCalls
from ..security.admission.message_room import ADAPTED_COPIES, Hold
from ..security.identity.principal import Principal, needed_scopes
from .call_life import CallLife
from .calls.call import Call, CallLimit, Context, Metadata, OwnContext, new_id
from .failures.errors import ShuttingDown, SlowReader, SlowSender
from .failures.statuses import Complaint, complaint
from .grpc_method import GrpcMethod, Trailers, Writer

_MOST_REQUESTS = 64
_RETRY_S = 0.1
"""Seconds between two attempts to reserve spare memory."""

Refuse = Callable[[Any, Complaint, Metadata], Any]
"""Makes the message that answers a failed request, from the request, the error and the metadata of the stream; None if
the error must end the stream."""


class StreamState(Protocol):
    """What the requests of one stream share. Its behaviour finds it as ``context.state``."""

    @property
    def most_requests(self) -> int:
        """Limit on the requests that run at the same time. The next one is read when one of them has ended."""

    def take(self, message: Any, principal: Principal) -> bool:
        """Takes the next message, in the order of arrival. Returns whether it holds a request to answer. Raises the
        error that ends the stream."""


class _Independent:
    """The state of a stream whose messages are requests that have nothing in common."""

    most_requests = _MOST_REQUESTS

    def take(self, message: Any, principal: Principal) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class StreamKind:
    """What distinguishes one such method from the others."""

    refuse: Refuse = lambda request, complaint, metadata: None
    state: Callable[[], StreamState] = _Independent
    """Makes the state of a new stream."""
    copies: int = ADAPTED_COPIES
    """How often a message is in memory."""
    most_streams: int | None = None
    """Limit on the streams of one principal."""


class StreamMethod(GrpcMethod):
    """Such a method. Its behaviour takes one request, and a context to write responses to."""

    is_visit = True

    def __init__(
        self,
        life: CallLife,
        method: str,
        handler: Any,
        kind: StreamKind,
        writes: CallLimit,
        trailers: Callable[[str], Trailers] | None,
    ) -> None:
        # A stream limits the time for a message itself, because that time does not run while requests do.
        super().__init__(
            *(life, method, handler),
            pulls=CallLimit(None),
            writes=writes,
            copies=kind.copies,
            trailers=trailers,
        )
        self.kind = kind
        self.open: Counter[str] = Counter()
        """The number of open streams by principal."""

    @contextlib.contextmanager
    def _enter(self, call: Call) -> Iterator[None]:
        """Counts a stream while it is open. Raises NotAuthenticated, ScopeMissing, TooManyCalls."""
        principal = self.life.identify(call)
        principal.check(*needed_scopes(self.method))
        who, most = principal.name, self.kind.most_streams
        if most is not None and self.open[who] >= most:
            raise TooManyCalls(
                f"{self.open[who]} streams of this method are open; the limit is {most}",
                quota=Quota(who, "open streams", self.open[who], most),
            )
        self.open[who] += 1
        try:
            yield
        finally:
            self.open[who] -= 1
            if not self.open[who]:
                del self.open[who]

    async def read(self, call: Call, hold: None) -> None:  # type: ignore[override]
        """Reads nothing: the stream reads its requests."""

    async def answer(self, call: Call, request: Any) -> None:
        await _RequestStream(self, call, Writer(call, self._writes)).run()


class _RequestStream:
    """One stream. ``writer``: where its responses go."""

    def __init__(self, method: StreamMethod, call: Call, writer: Writer) -> None:
        self.method, self.call, self.writer = method, call, writer
        self.state = method.kind.state()
        self._writing = asyncio.Lock()
        self._is_stuck = False
        """Whether a write is in progress or was given up."""
        self._running: set[asyncio.Task[None]] = set()
        self._opening: Any = None
        """The last message that held no request: what all requests of the stream have in common."""

    async def run(self) -> None:
        """Answers requests until the client has ended the stream and all are answered. Raises what ends it."""
        reading: asyncio.Task[Any] | None = None
        call, guard = self.call, self.method.life.guard
        try:
            while True:
                with contextlib.ExitStack() as until_read:
                    hold = guard.hold(call.principal, call.peer)
                    until_read.callback(hold.close)
                    await self._reserve(hold)
                    reading = asyncio.create_task(self.method.incoming(call, hold).reserved())
                    request = await self._read(reading)
                    if request is None:
                        break
                    call.message = request  # For a capture, if it is refused.
                    is_request = self.state.take(request, call.principal)
                    call.message = None
                    if not is_request:
                        self._opening = request
                        continue
                    # The next request has arrived by the time that it may begin.
                    while len(self._running) >= self.state.most_requests:
                        await self._one_ends()
                    task = asyncio.create_task(self._answer(request))
                    # The task may be cancelled before it begins.
                    task.add_done_callback(lambda _, hold=hold: hold.close())  # type: ignore[misc]
                    until_read.pop_all()
                    self._running.add(task)
                    request = reading = None
            while self._running:
                await self._one_ends()
        except (ShuttingDown, EngineClosed):
            # A stopping server refuses new requests and ends those that run.
            if self._running:
                await asyncio.wait(self._running)
            raise
        finally:
            left = [*self._running, *([] if reading is None else [reading])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _reserve(self, hold: Hold) -> None:
        num_bytes = self.method.life.guard.messages.reserved_for(self.method.kind.copies)
        while self._running:
            if hold.reserve_spare(num_bytes):
                return
            await self._one_ends(timeout_s=_RETRY_S)
        await hold.reserve(num_bytes)

    async def _read(self, reading: asyncio.Task[Any]) -> Any:
        limit_s = self.method.life.guard.limits.read_s
        while not reading.done():
            timeout_s = None if self._running else limit_s
            if not await self._one_ends(reading, timeout_s=timeout_s):
                raise SlowSender(f"no request arrived on the stream within {limit_s:g} s")
        return reading.result()

    async def _one_ends(self, *others: asyncio.Task[Any], timeout_s: float | None = None) -> bool:
        """Waits for a request or one of ``others``. Returns whether one ended in time. Raises what ends the stream."""
        done, _ = await asyncio.wait(
            {*others, *self._running}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done & self._running:
            self._running.discard(task)
            task.result()
        return bool(done)

    async def _answer(self, message: Any) -> None:
        life, stream = self.method.life, self.call
        request = _Request(self, message)
        call = Call(
            method=stream.method,
            peer=stream.peer,
            context=cast(Context, request),
            metadata=stream.metadata,
            request_id=new_id(),
            principal=stream.principal,
            longest_s=life.guard.limits.deadline_s,
            opening=self._opening,
            streams=True,
        )
        await life.run(call, request, life.admit)

    async def write(self, message: Any) -> None:
        """Writes a response. gRPC allows one write at a time, none after one that was given up. Raises SlowReader."""
        async with self._writing:
            if self._is_stuck:
                raise SlowReader("the client does not read the stream")
            self._is_stuck = True
            await self.writer.write(message)
            self._is_stuck = False


class _Request(OwnContext):
    """One request of a stream: the transport of its call, and what a service asks of gRPC's context."""

    def __init__(self, stream: _RequestStream, message: Any) -> None:
        self._stream, self._message = stream, message
        self.state = stream.state
        self.write = stream.write

    async def read(self, call: Call, hold: Hold) -> Any:
        """The request, for whose memory the stream has a hold."""
        return self._message

    async def answer(self, call: Call, request: Any) -> None:
        await self._stream.method.behaviour(request, call.context)

    async def refuse(self, call: Call, error: Exception) -> None:
        """Writes the message that answers the request. Raises ``error`` if it must end the stream."""
        response = None
        if not isinstance(error, (SlowReader, grpc.aio.InternalError)):
            described = complaint(error, call.request_id)
            response = self._stream.method.kind.refuse(self._message, described, call.metadata)
        if response is None:
            self._stream.call.message = self._message
            raise error
        await self.write(response)

    def time_remaining(self) -> float | None:
        left: float | None = self._stream.call.context.time_remaining()
        return left
