"""Call: one call while it is handled, as the access log, the metrics and the services know it. Owns its ids."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import numpy as np

from kestrel_engine import EngineResult

from ..security.identity.principal import ANONYMOUS, Principal
from .request_ids import valid_request_id

REQUEST_ID_KEY = "x-request-id"
TRACE_ID_KEY = "x-trace-id"
UNKNOWN_METHOD = "_OTHER"
"""What a method is called that no service has: callers could make up any number of names."""
_FOREVER_S = 10 * 365 * 86_400.0
"""A deadline beyond this is how grpc says that there is none."""

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(slots=True)
class Call:
    """One call as the access log tells of it."""

    method: str
    peer: str
    context: Context
    metadata: Metadata = ()
    """What came with it."""
    request_id: str = ""
    owner: str = ""
    """To whom stored pictures belong: the principal's name."""
    principal: Principal = ANONYMOUS
    """Who calls."""
    longest_s: float | None = None
    """Seconds that the server lets it take."""
    started_at: float = field(default_factory=time.monotonic)
    asked: str = ""
    """The beginning of the method's name, where it is UNKNOWN_METHOD."""
    code: grpc.StatusCode = grpc.StatusCode.OK
    reason: str = ""
    """Why it failed, as its ErrorInfo says; "" where it did not, or where its caller ended it."""
    message: Any = None
    """Its request, once that is read. Of an upload that failed what came of it; else None where it is a stream."""
    stored: bytes | np.ndarray | None = None
    """The picture that its request names by id, once that is found."""
    result: EngineResult | None = None
    error: Exception | None = None
    """What ended it, where that is the server's fault."""
    trace_id: str = ""
    trace: object = None
    """The watcher's own."""
    _greeted: bool = False

    def release(self) -> None:
        """Lets go of what is large, once the call has ended: a cancelled timer keeps its task's context, and so this
        object, until the time that it was set for."""
        self.context = cast(Context, None)
        self.message = self.stored = self.result = self.error = self.trace = None

    async def accept(self) -> None:
        """Tells the caller the request's id; the call can't be retried transparently from here on."""
        if not self._greeted:
            self._greeted = True
            await self.context.send_initial_metadata(self.ids)

    @property
    def ids(self) -> tuple[tuple[str, str], ...]:
        """The call's ids as metadata."""
        request = (REQUEST_ID_KEY, self.request_id)
        return (request, (TRACE_ID_KEY, self.trace_id)) if self.trace_id else (request,)

    @property
    def timeout_s(self) -> float | None:
        """Seconds until the caller's deadline or the server's, whichever comes first; None without any."""
        left: float | None = self.context.time_remaining()
        own = None if left is None or left > _FOREVER_S else left
        if self.longest_s is None:
            return own
        most = max(0.0, self.longest_s - (time.monotonic() - self.started_at))
        return most if own is None else min(own, most)

    @property
    def duration_ms(self) -> float:
        return 1e3 * (time.monotonic() - self.started_at)


def new_id() -> str:
    """Of a request that nobody named. Random bytes are fetched for many at once: each time is a system call."""
    if not _random:
        data = os.urandom(16 * 256)
        _random.extend(data[i : i + 16] for i in range(0, len(data), 16))
    return _random.pop().hex()


_random: list[bytes] = []
os.register_at_fork(after_in_child=_random.clear)


def id_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """An unusable id is passed over: proxies set this header, not the caller."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and valid_request_id(value):
            return value
    return None
