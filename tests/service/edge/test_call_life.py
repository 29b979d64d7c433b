"""The life of a call has the same steps in the same order for all transports, and ends once however it ends."""

import asyncio

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineOverloaded
from kestrel_grpc.edge.call_life import CallLife, CallWatchers, InFlight
from kestrel_grpc.http.context import HttpContext
from kestrel_grpc.security.admission.guard import Guard
from kestrel_grpc.settings.security import SecurityConfig

QUERY = "/kestrel.v1.VisionService/Query"
IDS = (b"x-request-id", b"from-header")


class Line:
    """Transport and watcher of calls. Notes each step, and whether the call has been admitted."""

    def __init__(self, error=None, room=None):
        self.steps, self.error = [], error
        self.guard = Guard(SecurityConfig(), 1000, room or (lambda caller: None))
        self.in_flight = InFlight()
        self.life = CallLife(
            self.guard, self.guard.connections, self.in_flight, CallWatchers(watcher=self)
        )

    async def run(self, *, enter=None, **fields):
        context = HttpContext({"client": ("10.0.0.1", 1), "headers": [IDS]})
        self.call = self.life.begin(QUERY, context, **fields)
        return await self.life.run(self.call, self, enter or self.life.enter)

    def note(self, step):
        self.steps.append((step, self.guard.admission.calls))

    def begin(self, call):
        self.note("begin")

    def on_message(self, call):
        self.note(f"message {call.request_id}")

    def end(self, call):
        self.note(f"end {call.code.name}")

    async def read(self, call, hold):
        self.note("read")
        await hold.reserve(1000)
        hold.arrived(10)
        request = pb.QueryRequest()
        request.options.request_id = "from-message"
        return request

    async def answer(self, call, request):
        assert self.in_flight.count == (not call.is_visit) and self.guard.held_bytes
        self.note("answer")
        if self.error is not None:
            raise self.error
        return "answered"

    async def refuse(self, call, error):
        self.note(f"refuse {type(error).__name__}")

    def names(self):
        """All steps, after a look that nothing is held any more."""
        assert (self.in_flight.count, self.guard.held_bytes, self.guard.admission.calls) == (
            0,
            0,
            0,
        )
        assert self.call.message is None, "released"
        return [name for name, _ in self.steps]


BEFORE = ["begin", "read", "message from-message", "answer"]


async def test_an_answered_call():
    line = Line()
    assert await line.run() == "answered"
    assert line.names() == [*BEFORE, "end OK"]
    assert [calls for _, calls in line.steps] == [0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("error", "steps"),
    [
        (EngineOverloaded("full"), ["refuse EngineOverloaded", "end RESOURCE_EXHAUSTED"]),
        (ZeroDivisionError(), ["refuse ZeroDivisionError", "end INTERNAL"]),
        (grpc.aio.InternalError(), ["refuse InternalError", "end CANCELLED"]),
    ],
)
async def test_a_refused_call_holds_nothing_while_it_is_refused(error, steps):
    line = Line(error)
    assert await line.run() is None
    assert line.names() == [*BEFORE, *steps]
    assert line.steps[-2][1] == 0
    assert error.__traceback__ is None, "its frames hold the message"


async def test_a_call_whose_client_leaves():
    line = Line(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await line.run()
    assert line.names() == [*BEFORE, "end CANCELLED"]


async def test_a_call_that_the_engine_has_no_room_for_is_not_read():
    def full(caller):
        raise EngineOverloaded("full")

    line = Line(room=full)
    await line.run()
    assert line.names() == ["begin", "refuse EngineOverloaded", "end RESOURCE_EXHAUSTED"]


@pytest.mark.parametrize(
    ("error", "steps"),
    [
        (None, []),
        (grpc.aio.InternalError(), ["refuse InternalError"]),
        (ZeroDivisionError(), ["refuse ZeroDivisionError", "end INTERNAL"]),
    ],
)
async def test_a_visit_is_reported_only_if_it_is_refused(error, steps):
    line = Line(error)

    def enter(call):
        return line.guard.admit_visit(call.principal, call.peer, stream=False)

    await line.run(is_visit=True, enter=enter)
    assert line.names() == ["read", "answer", *steps]
    assert not line.guard.visits.num_calls
