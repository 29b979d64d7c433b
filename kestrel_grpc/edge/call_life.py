"""CallLife: the life of a call, the same for all transports. Owns the order of its steps, and how a call ends.

The caller is identified, the call is admitted, and memory is reserved before the request is read. The request then has
its id and its priority, and the service answers it within the server's limit. A call ends once: with its response, with
a refusal, or because its client has left. Services raise exceptions, and only this module takes them.

The request's id comes from the request's field, or else from ``x-request-id`` metadata, or else it is made here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from kestrel_engine import clock

from ..security.admission.guard import Guard
from ..security.admission.message_room import Hold
from ..security.connections.connection_guard import ConnectionGuard
from ..security.identity.principal import Principal
from .calls.call import Call, CallLimit, Context, code_of_cancellation, id_from_metadata, new_id
from .calls.current import current
from .failures.endings import delay_refusal, forget_frames, note
from .messages.fields import take_options

_UNCOUNTED = contextlib.nullcontext()

Enter = Callable[[Call], AbstractContextManager[Any]]
"""Identifies a call's caller and admits the call, or raises the error that refuses it. The context manager gives the
Hold of the call's messages."""


class Transport(Protocol):
    """What a transport does for a call, in the form of its protocol."""

    async def read(self, call: Call, hold: Hold) -> Any:
        """Reads the request, for which it reserves memory in ``hold``. Returns a message, a list of messages, or an
        async iterator over the messages of a stream."""

    async def answer(self, call: Call, request: Any) -> Any:
        """Gives the request to the service, and writes the response or returns it."""

    async def refuse(self, call: Call, error: Exception) -> None:
        """Writes the status of ``error``. InternalError: a message could not be sent, because the connection is lost.
        May raise."""


class CallWatcher(Protocol):
    """Receives the events of every call. Its methods must not raise.

    ``on_message`` is called when the request's id is known: when it is read, or the stream of its parts begins.
    """

    def begin(self, call: Call) -> None: ...

    def on_message(self, call: Call) -> None: ...

    def end(self, call: Call) -> None: ...


@dataclass(frozen=True, slots=True)
class CallWatchers:
    """``records``: called with each call that has ended, before ``watcher``. ``watcher``: of all events."""

    records: Sequence[Callable[[Call], None]] = ()
    watcher: CallWatcher | None = None

    def end(self, call: Call) -> None:
        for record in self.records:
            record(call)
        if self.watcher is not None:
            self.watcher.end(call)


class InFlight:
    """Counts the calls in progress, so that a stopping server can wait for their end."""

    def __init__(self) -> None:
        self._count = 0
        self._idle: asyncio.Event | None = None
        """Of those who wait for the end of all calls."""

    @property
    def count(self) -> int:
        return self._count

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *exc_info: object) -> None:
        self._count -= 1
        if self._count == 0 and self._idle is not None:
            self._idle.set()
            self._idle = None

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits for the end of all calls. Returns whether they ended within ``timeout_s`` seconds."""
        if self._count == 0:
            return True
        self._idle = self._idle or asyncio.Event()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


class CallLife:
    """The calls of one port. ``connections``: the guard of the port's connections. ``is_limited``: whether the server
    limits their duration."""

    def __init__(
        self,
        guard: Guard,
        connections: ConnectionGuard,
        in_flight: InFlight,
        watchers: CallWatchers,
        *,
        is_limited: bool = True,
    ) -> None:
        self.guard, self._connections = guard, connections
        self._in_flight, self.watchers = in_flight, watchers
        self._watcher = watchers.watcher
        self._longest_s = guard.limits.deadline_s if is_limited else None
        self._limit = CallLimit(self._longest_s)

    def begin(
        self, method: str, context: Context, *, is_visit: bool = False, **fields: Any
    ) -> Call:
        """The call that ``context`` has begun. ``fields``: further ones of Call."""
        metadata, peer = tuple(context.invocation_metadata() or ()), context.peer()
        return Call(
            method=method,
            peer=peer,
            context=context,
            metadata=metadata,
            request_id=id_from_metadata(metadata) or new_id(),
            longest_s=None if is_visit else self._longest_s,
            use=self._connections.use(peer),
            is_visit=is_visit,
            started_at=clock.now(),
            **fields,
        )

    def identify(self, call: Call) -> Principal:
        """Gives a call its principal. Raises NotAuthenticated."""
        call.principal = self.guard.principal(call.metadata, call.context)
        call.use.is_known = True
        return call.principal

    def admit(self, call: Call) -> AbstractContextManager[Hold]:
        """As Enter, for a call whose caller is identified."""
        return self.guard.admit(call.principal, call.method, call.peer)

    def enter(self, call: Call) -> AbstractContextManager[Hold]:
        """As Enter, for the methods of the model."""
        principal = self.identify(call)
        return self.guard.admit(principal, call.method, call.peer)

    async def run(self, call: Call, transport: Transport, enter: Enter) -> Any:
        """Leads a call from its beginning to its end, and returns what ``transport.answer`` returns. Raises
        CancelledError if the client has left, and what ``transport.refuse`` raises."""
        current.set(call)
        failed: Exception | None = None
        request: Any = None
        if self._watcher is not None and not call.is_visit:
            self._watcher.begin(call)
        with _UNCOUNTED if call.is_visit else self._in_flight, call.use:
            try:
                with enter(call) as hold:
                    request = await transport.read(call, hold)
                    if call.is_visit:
                        return await transport.answer(call, request)
                    self._receive(call, request)
                    return await self._limit.within(transport.answer(call, request))
            except asyncio.CancelledError:
                call.code = code_of_cancellation(call.context)
                raise  # Without this, grpc leaks memory.
            except grpc.aio.InternalError as error:
                call.code = grpc.StatusCode.CANCELLED
                forget_frames(error)
                await transport.refuse(call, error)
            except grpc.aio.AbortError:
                raise  # A service of health has ended its call.
            except Exception as error:  # This is the one place where errors become statuses.
                failed, request = error, None
                note(call, error)
                await delay_refusal(self.guard.refusals, call, error)
                await transport.refuse(call, error)
            finally:
                # gRPC keeps the exception that aborts a call in a reference cycle with its context, and so this frame.
                request = None
                if failed is not None or not call.is_visit:
                    self.watchers.end(call)
                call.release()
                if failed is not None:
                    forget_frames(failed)
                    failed = None

    def _receive(self, call: Call, request: Any) -> None:
        """Takes from a request its id and its priority. Raises InvalidRequest, ScopeMissing."""
        if isinstance(request, Message) or not isinstance(request, AsyncIterator):
            call.message = request
        take_options(call)
        if self.guard.has_budget(call.principal):
            call.reserve = self.guard.budgets.of(call.principal)
        if self._watcher is not None:
            self._watcher.on_message(call)
