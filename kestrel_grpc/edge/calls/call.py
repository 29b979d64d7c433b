"""Call: one call in progress, for the services, the access log and the metrics. Makes the ids of calls, and limits
their duration."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import numpy as np

from kestrel_engine import (
    DeadlineExceeded,
    EngineResult,
    FieldPath,
    Reservation,
    TokenEstimate,
    clock,
)

from ...security.connections.connection_guard import ConnectionUse
from ...security.identity.principal import ANONYMOUS, Principal

REQUEST_ID_KEY = "x-request-id"
TRACE_ID_KEY = "x-trace-id"
UNKNOWN_METHOD = "_OTHER"
"""The method's name in logs and metrics if no service has the method. It bounds the number of names."""
FRAME_OUTCOMES = ("answered", "repeated", "overview", "dropped", "failed")
"""What may become of a frame. "repeated": it has an equal one's results. "overview": only its overview was seen."""
_VALID_ID = re.compile(r"[!-~]{1,128}")
_FOREVER_S = 10 * 365 * 86_400.0
"""grpc reports a deadline beyond this if there is none."""
_DEADLINE_LAG_S = 0.05
"""How much earlier than the server's copy of a deadline the client may end its call."""

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]
_NO_CONTEXT = cast(Context, None)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """A request's options in the form that the engine expects."""

    model: str | None = None
    priority: str = "normal"
    cache_salt: str = ""
    adapter: str | None = None
    path: FieldPath = ("options",)
    """Of the options in the call's message."""


NO_OPTIONS = CallOptions()


class OwnContext:
    """What services ask of gRPC's context, for a call that gRPC has not begun: nothing is known of its caller."""

    def peer(self) -> str:
        return ""

    def invocation_metadata(self) -> Metadata:
        return ()

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        """The response carries the ids."""


@dataclass(slots=True)
class Call:
    """One call in progress."""

    method: str
    peer: str
    context: Context
    metadata: Metadata = ()
    """The metadata that the client sent."""
    request_id: str = ""
    principal: Principal = ANONYMOUS
    use: ConnectionUse = field(default_factory=ConnectionUse)
    """The use of the call's connection. Requests of one stream are no use of it, because the stream is."""
    is_visit: bool = False
    """Whether the call may last as long as its connection, so that the server neither limits nor counts it, and reports
    it only if it is refused."""
    longest_s: float | None = None
    """The server's limit on the duration of the call, in seconds."""
    started_at: float = field(default_factory=lambda: clock.now())
    asked: str = ""
    """The beginning of the requested method's name, if ``method`` is UNKNOWN_METHOD."""
    code: grpc.StatusCode = grpc.StatusCode.OK
    reason: str = ""
    """The reason in the ErrorInfo of a call that failed; "" if it succeeded or its caller ended it."""
    message: Any = None
    """The request message once it is read; for an upload that failed, its ReceivedParts; None for other streams."""
    options: CallOptions = NO_OPTIONS
    """Of the message."""
    opening: Any = None
    """The message that opened the call's stream, if several calls share it; otherwise None."""
    streams: bool = False
    """Whether the method answers with a stream. By HTTP and KServe's protocol, the request says it."""
    caps_max_tokens: bool = False
    """Whether a max_tokens above the room for tokens is lowered to it instead of refused."""
    stored: dict[str, bytes | np.ndarray] = field(default_factory=dict)
    """The stored images that the request names, by id, once they are found."""
    reserve: Callable[[TokenEstimate], Reservation] | None = None
    """Reserves tokens of the principal's budget for a request of the engine; None without a budget."""
    change: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    """What an administrative call has changed: the values before and after."""
    result: EngineResult | None = None
    error: Exception | None = None
    """The exception that ended the call, if it is the server's fault."""
    frame: str = ""
    """What became of a frame of StreamFrames, one of FRAME_OUTCOMES; "" for other calls."""
    trace_id: str = ""
    trace: object = None
    """For the CallWatcher only."""
    _greeting: asyncio.Task[None] | None = None

    def release(self) -> None:
        """Drops large objects at the end of the call. A cancelled timer keeps its task's context, and so this object,
        until its time."""
        self.context, self.metadata = _NO_CONTEXT, ()
        self.message = self.opening = self.result = self.error = self.trace = None
        self.stored, self._greeting = {}, None

    def accept(self) -> Awaitable[None]:
        """Sends the request's id to the caller. From then on, clients do not retry the call transparently."""
        if self._greeting is None:
            self.greet(self.ids)
        return self.greeted()

    def greet(self, metadata: Metadata) -> None:
        """Begins to send initial metadata, unless that has begun before. The end of the caller's time does not
        interrupt it: gRPC takes no status of a call whose initial metadata is half sent, and the call would never
        end."""
        if self._greeting is None:
            sending = self.context.send_initial_metadata(metadata)
            self._greeting = asyncio.get_running_loop().create_task(sending)
            self._greeting.add_done_callback(_heard)

    @property
    def is_greeting(self) -> bool:
        """Whether initial metadata is on its way to gRPC."""
        return self._greeting is not None and not self._greeting.done()

    async def greeted(self) -> None:
        """Waits until initial metadata is sent, if that has begun. Raises the error with which it failed."""
        greeting = self._greeting  # The call may be released in the meantime.
        if greeting is None:
            return
        if not greeting.done():  # A shield takes two more rounds of the event loop.
            await asyncio.shield(greeting)
        greeting.result()

    @property
    def owner(self) -> str:
        """The owner of stored images."""
        return self.principal.name

    @property
    def ids(self) -> tuple[tuple[str, str], ...]:
        request = (REQUEST_ID_KEY, self.request_id)
        return (request, (TRACE_ID_KEY, self.trace_id)) if self.trace_id else (request,)

    @property
    def timeout_s(self) -> float | None:
        """Seconds until ``deadline_at``; None without one."""
        ends_at = self.deadline_at
        return None if ends_at is None else max(0.0, ends_at - clock.now())

    @property
    def deadline_at(self) -> float | None:
        """The earlier one of the caller's deadline and the server's limit, by the clock; None without either."""
        left: float | None = self.context.time_remaining()
        own = None if left is None or left > _FOREVER_S else clock.now() + left
        if self.longest_s is None:
            return own
        most = self.started_at + self.longest_s
        return most if own is None else min(own, most)

    @property
    def duration_ms(self) -> float:
        return 1e3 * (clock.now() - self.started_at)


def _heard(greeting: asyncio.Task[None]) -> None:
    """A greeting fails if the client has gone. If nobody waits for it, asyncio would log its traceback."""
    if not greeting.cancelled():
        greeting.exception()


def _too_long(limit_s: float) -> Exception:
    return DeadlineExceeded(f"the call took {limit_s:g} s, the limit of this server")


class CallLimit:
    """Limits the duration of calls, or of a part of them, on one event loop. ``limit_s``: seconds, None for no limit.
    ``error``: makes the exception.

    All have the same limit, so the oldest one reaches it first, and one timer is enough. A timer for each call would
    cost more than all other work of the edge.
    """

    def __init__(
        self, limit_s: float | None, error: Callable[[float], Exception] = _too_long
    ) -> None:
        self._limit_s, self._error = limit_s, error
        self._running: dict[asyncio.Task[Any], float] = {}
        """The end of each task's time by the event loop's clock; the oldest task first."""
        self._expired: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, response: Awaitable[Any]) -> Any:
        """Awaits ``response``. A task can await only one at a time. Raises DeadlineExceeded, or the exception that
        ``error`` makes, if it takes longer than the limit."""
        if self._limit_s is None:
            return await response
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "handlers run in tasks"
        self._running[task] = ends_at = loop.time() + self._limit_s
        if self._timer is None:
            self._timer = loop.call_at(ends_at, self._check, loop, context=contextvars.Context())
        cancelling = task.cancelling()
        try:
            return await response
        except asyncio.CancelledError:
            if task not in self._expired or task.uncancel() > cancelling:
                raise
            raise self._error(self._limit_s) from None
        finally:
            if self._running.pop(task, None) is None:
                self._expired.discard(task)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels the tasks that have reached the limit. Checks again when the next task can reach it."""
        self._timer = None
        now = loop.time()
        while self._running:
            task, ends_at = next(iter(self._running.items()))
            if ends_at > now:
                self._timer = loop.call_at(
                    ends_at, self._check, loop, context=contextvars.Context()
                )
                return
            del self._running[task]
            self._expired.add(task)
            task.cancel()


def new_id() -> str:
    """A new request id. Random bytes are fetched for many ids at once, because each fetch is a system call."""
    if not _random:
        digits = os.urandom(16 * 256).hex()
        _random.extend(digits[i : i + 32] for i in range(0, len(digits), 32))
    return _random.pop()


_random: list[str] = []
os.register_at_fork(after_in_child=_random.clear)


def valid_request_id(text: str) -> bool:
    """Whether logs can hold an id that a caller has chosen."""
    return _VALID_ID.fullmatch(text) is not None


def id_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The request id in the metadata, or None. An invalid id is ignored, because a proxy may have set it."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and valid_request_id(value):
            return value
    return None


def code_of_cancellation(context: Context) -> grpc.StatusCode:
    """The status of a call that the client ended: DEADLINE_EXCEEDED if its deadline has passed, else CANCELLED.

    A client ends its call at its deadline. The server's copy of the deadline is a little later, because deadlines
    travel as durations.
    """
    left = context.time_remaining()
    expired = left is not None and left <= _DEADLINE_LAG_S
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
