"""How a request of a batch is answered: as a call of its own (edge/call_life.py), at low priority."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import EngineClosed, EngineOverloaded

from ..edge.call_life import CallLife
from ..edge.calls.call import Call, Context, OwnContext
from ..edge.failures.errors import ModelNotReady
from ..security.admission.admission import MessageTooLarge
from ..security.admission.message_room import Hold
from .tables import Waiting

_INLINE_BYTES = 256 * 1024
_NULL = b"null"


class Answer(NamedTuple):
    """``succeeded``: None if the server is busy or starts, and the request waits on. The others are JSON."""

    succeeded: bool | None
    response: bytes = _NULL
    error: bytes = _NULL


class Work(NamedTuple):
    """A request that was read: a message of kestrel.v1, or a list of them, and what answers it with JSON."""

    message: Any
    respond: Callable[[Context], Awaitable[bytes]]
    form: Any = None
    """For the form only."""


class Form(Protocol):
    """The form of the requests to one endpoint."""

    copies: int
    """How often a request's bytes are in memory."""
    caps_max_tokens: bool
    """As of Call."""

    def method(self, body: bytes) -> str: ...

    def read(self, body: bytes) -> Work:
        """Raises InvalidRequest. A thread may call it."""

    def answered(self, body: bytes, call: Call) -> Answer: ...

    def refused(self, error: Exception, call: Call, work: Work | None) -> Answer: ...


async def answer(request: Waiting, form: Form, life: CallLife) -> Answer:
    """Makes a call of a request."""
    owner, context = request.owner, cast(Context, _Context())
    call = life.begin(form.method(request.body), context, caps_max_tokens=form.caps_max_tokens)

    @contextlib.contextmanager
    def enter(call: Call) -> Iterator[Hold]:
        call.principal = owner
        with contextlib.closing(life.guard.hold(owner, call.peer)) as hold:
            yield hold

    exchange = _Exchange(form, request.body)
    await life.run(call, exchange, enter)
    return exchange.given


class _Context(OwnContext):
    """A request has as long as its batch."""

    def peer(self) -> str:
        return "batch:"


class _Exchange:
    """One request of a batch: the transport of its call."""

    def __init__(self, form: Form, body: bytes) -> None:
        self._form, self._body = form, body
        self._work: Work | None = None
        self.given = Answer(None)

    async def read(self, call: Call, hold: Hold) -> Any:
        body, read = self._body, self._form.read
        await hold.reserve(self._form.copies * len(body))
        hold.arrived(len(body))
        is_small = len(body) <= _INLINE_BYTES
        self._work = work = read(body) if is_small else await asyncio.to_thread(read, body)
        message = work.message
        for each in message if isinstance(message, list) else [message]:
            each.options.priority = common_pb2.PRIORITY_LOW
        return message

    async def answer(self, call: Call, request: Any) -> None:
        assert self._work is not None, "read() comes first"
        self.given = self._form.answered(await self._work.respond(call.context), call)

    async def refuse(self, call: Call, error: Exception) -> None:
        is_busy = isinstance(error, (EngineOverloaded, EngineClosed, ModelNotReady))
        if not is_busy or isinstance(error, MessageTooLarge):
            self.given = self._form.refused(error, call, self._work)
