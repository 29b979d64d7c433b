"""The edge of a method whose stream carries many requests, each with responses of its own: ModelStreamInfer and
StreamFrames.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc

from kestrel_engine import EngineClosed, Quota

from ..security.admission.admission import TooManyCalls
from ..security.admission.guard import Guard
from ..security.admission.message_limits import ADAPTED_COPIES
from ..security.admission.message_room import Hold
from ..security.identity.principal import Principal, needed_scopes
from .calls.call import Call, Context, Metadata, code_of_cancellation, new_id
from .calls.call_limit import CallLimit
from .calls.call_watcher import CallWatcher
from .calls.current_call import current
from .calls.in_flight import InFlight
from .calls.request_ids import own_id
from .failures.endings import Endings, delay_refusal, finish, forget_frames, note
from .failures.errors import ShuttingDown, SlowReader, SlowSender
from .failures.statuses import Complaint, complaint
from .messages.bounded_context import BoundedContext
from .messages.incoming import Incoming

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
        ...

    def take(self, message: Any, principal: Principal) -> bool:
        """Takes the next message, in the order of arrival. Returns whether it holds a request to answer. Raises the
        error that ends the stream."""
        ...


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


class _EndStream(Exception):
    """``error`` must end the stream with its status."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class RequestStreams:
    """Wraps the handlers of such methods. Their behaviour takes one request, and a context to write responses to."""

    def __init__(
        self,
        guard: Guard,
        endings: Endings,
        in_flight: InFlight,
        end_call: Callable[[Call], None],
        watcher: CallWatcher | None,
        kinds: Mapping[str, StreamKind],
    ) -> None:
        """``kinds``: by method. A method that is absent has the defaults of StreamKind."""
        self.guard, self.in_flight, self.end_call = guard, in_flight, end_call
        self.watcher, self._kinds = watcher, kinds
        self._open: Counter[tuple[str, str]] = Counter()
        """The number of open streams by method and principal."""
        self.limit = CallLimit(guard.limits.deadline_s)
        self.pulls = CallLimit(None)
        """A stream limits the time for a message itself, because that time does not run while requests do."""
        self._endings = endings

    def edge(self, method: str, handler: Any) -> Any:
        """A handler that wraps ``handler``."""
        kind = self._kinds.get(method, StreamKind())

        async def handle(_messages: Any, context: Context) -> None:
            call = Call.begin(method, context)
            failed: Exception | None = None
            stream: _RequestStream | None = None
            guard, limits = self.guard, self.guard.limits
            use = guard.connections.use(call.peer)
            try:
                with use, contextlib.ExitStack() as stack:
                    call.principal = principal = guard.principal(call.metadata, context)
                    principal.check(*needed_scopes(method))
                    use.is_known = True
                    stack.enter_context(self._counted(kind, method, principal.name))
                    writer: Any = context
                    if limits.write_s is not None:
                        writer = BoundedContext(context, limits.write_s)
                        stack.callback(writer.close)
                    stream = _RequestStream(self, kind, handler, call, writer)
                    await stream.run()
            except grpc.aio.InternalError:
                # A message could not be sent, because the connection is lost.
                raise asyncio.CancelledError from None
            except Exception as error:
                failed = error.error if isinstance(error, _EndStream) else error
                await self._endings.fail(call, failed)
            finally:
                if failed is not None:
                    self.end_call(call)
                    if self.watcher is not None:
                        self.watcher.end(call)
                    forget_frames(failed)
                    failed = None
                call.release()
                stream = None

        return grpc.stream_stream_rpc_method_handler(
            handle, response_serializer=handler.response_serializer
        )

    @contextlib.contextmanager
    def _counted(self, kind: StreamKind, method: str, principal: str) -> Iterator[None]:
        """Counts a stream while it is open. Raises TooManyCalls."""
        key = (method, principal)
        if kind.most_streams is not None and self._open[key] >= kind.most_streams:
            raise TooManyCalls(
                f"{self._open[key]} streams of this method are open; the limit is {kind.most_streams}",
                quota=Quota(principal, "open streams", self._open[key], kind.most_streams),
            )
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


class _RequestStream:
    """One stream. ``writer``: where its responses go."""

    def __init__(
        self, edge: RequestStreams, kind: StreamKind, handler: Any, call: Call, writer: Any
    ) -> None:
        self._edge, self._kind, self._handler, self._call = edge, kind, handler, call
        self.state = kind.state()
        self._writer, self._writing = writer, asyncio.Lock()
        self._is_stuck = False
        """Whether a write is in progress or was given up."""
        self._running: set[asyncio.Task[None]] = set()
        self._opening: Any = None
        """The last message that held no request: what all requests of the stream have in common."""

    async def run(self) -> None:
        """Answers the requests until the client has ended the stream and all are answered."""
        reading: asyncio.Task[Any] | None = None
        guard, call = self._edge.guard, self._call
        try:
            while True:
                hold = guard.hold(call.principal, call.peer)
                try:
                    await self._reserve(hold)
                    incoming = Incoming(
                        *(call.context, self._handler.request_deserializer, hold),
                        *(guard.messages, self._edge.pulls, guard.connections.use(call.peer)),
                        copies=self._kind.copies,
                    )
                    reading = asyncio.create_task(incoming.reserved())
                    request = await self._read(reading)
                except BaseException:
                    hold.close()
                    raise
                if request is None:
                    hold.close()
                    break
                try:
                    call.message = request  # For a capture, if it is refused.
                    is_request = self.state.take(request, call.principal)
                    call.message = None
                    # The next request has arrived by the time that it may begin.
                    while is_request and len(self._running) >= self.state.most_requests:
                        await self._one_ends()
                except BaseException:
                    hold.close()
                    raise
                if not is_request:
                    hold.close()
                    self._opening = request
                    continue
                task = asyncio.create_task(self._answer(request))
                # The task may be cancelled before it begins.
                task.add_done_callback(lambda _, hold=hold: hold.close())  # type: ignore[misc]
                self._running.add(task)
                del request, reading
                reading = None
            while self._running:
                await self._one_ends()
        except _EndStream as end:
            if isinstance(end.error, (ShuttingDown, EngineClosed)) and self._running:
                # A stopping server refuses new requests and ends those that run.
                await asyncio.wait(self._running)
            raise
        finally:
            left = [*self._running, *([] if reading is None else [reading])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _reserve(self, hold: Hold) -> None:
        num_bytes = self._edge.guard.messages.reserved_for(self._kind.copies)
        while self._running:
            if hold.reserve_spare(num_bytes):
                return
            await self._one_ends(timeout_s=_RETRY_S)
        await hold.reserve(num_bytes)

    async def _read(self, reading: asyncio.Task[Any]) -> Any:
        limit_s = self._edge.guard.limits.read_s
        while not reading.done():
            timeout_s = None if self._running else limit_s
            if not await self._one_ends(reading, timeout_s=timeout_s):
                raise SlowSender(f"no request arrived on the stream within {limit_s:g} s")
        return reading.result()

    async def _one_ends(self, *others: asyncio.Task[Any], timeout_s: float | None = None) -> bool:
        """Waits for the end of a request or one of ``others``. Returns whether one has ended in time. Raises what ends
        the stream."""
        done, _ = await asyncio.wait(
            {*others, *self._running}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done & self._running:
            self._running.discard(task)
            task.result()
        return bool(done)

    async def _answer(self, request: Any) -> None:
        edge, stream = self._edge, self._call
        guard, watcher, method = edge.guard, edge.watcher, stream.method
        call = Call(
            method=method,
            peer=stream.peer,
            context=cast(Context, _RequestContext(self, self._writer)),
            metadata=stream.metadata,
            request_id=own_id(request) or new_id(),
            owner=stream.principal.name,
            principal=stream.principal,
            longest_s=guard.limits.deadline_s,
            message=request,
            opening=self._opening,
            streams=True,
        )
        current.set(call)
        if watcher is not None:
            watcher.begin(call)
        failed: Exception | None = None
        with edge.in_flight:
            try:
                with guard.admit(call.principal, method):
                    guard.check_room(method)
                    if watcher is not None:
                        watcher.on_message(call)
                    behaviour = self._handler.stream_stream
                    await edge.limit.within(behaviour(request, call.context))
            except asyncio.CancelledError:
                call.code = code_of_cancellation(self._writer)
                raise
            except grpc.aio.InternalError:
                call.code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                failed = error.error if isinstance(error, _EndStream) else error
                note(call, failed)
                await delay_refusal(guard.refusals, call, failed)
                await self._refuse(call, request, failed)
            finally:
                finish(call, edge.end_call, watcher, failed)
                failed = None

    async def _refuse(self, call: Call, request: Any, error: Exception) -> None:
        """Raises _EndStream if the error must end the stream."""
        told = None
        if not isinstance(error, SlowReader):
            described = complaint(error, call.request_id)
            told = self._kind.refuse(request, described, call.metadata)
        if told is None:
            self._call.message = request
            raise _EndStream(error) from None
        await self.write(told)

    async def write(self, message: Any) -> None:
        """Writes a response. gRPC allows one write at a time, and none after one that was given up. Raises SlowReader,
        _EndStream."""
        async with self._writing:
            if self._is_stuck:
                raise _EndStream(SlowReader("the client does not read the stream"))
            self._is_stuck = True
            await self._writer.write(message)
            self._is_stuck = False


class _RequestContext:
    """What a service asks of gRPC's context, for one request of the stream."""

    def __init__(self, stream: _RequestStream, writer: Any) -> None:
        self._stream, self._writer = stream, writer
        self.state = stream.state

    def time_remaining(self) -> float | None:
        left: float | None = self._writer.time_remaining()
        return left

    async def send_initial_metadata(self, metadata: Any) -> None:
        """The stream's metadata belongs to all of its requests. Responses carry their request's id."""

    async def write(self, message: Any) -> None:
        await self._stream.write(message)
