"""Health, reflection and methods that don't exist: which callers are admitted, what is counted, and the limits of a
caller."""

import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kestrel_grpc.security.admission.admission import TooManyCalls, Visits
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.statuses import failure
from tests.waiting import until

KEY = "the-key-of-an-administrator"
TOKEN = (("authorization", f"Bearer {KEY}"),)
CLOSED = {
    "security": SecurityConfig(api_key=KEY, open_services=()),
    "access_log": "text",
}


async def logged(caplog, *texts):
    """A call's line is written just after its status is sent."""
    await until(lambda: all(text in caplog.text for text in texts), lambda: caplog.text)


def test_one_caller_holds_so_many_and_all_together_so_many_streams():
    visits = Visits(most_of_one=2, most_streams=3)
    with visits.admit("a", stream=True), visits.admit("a", stream=True):
        with pytest.raises(TooManyCalls, match="2 such calls are in progress; the limit is 2"):
            with visits.admit("a", stream=True):
                pass
        with visits.admit("b", stream=True):
            with pytest.raises(TooManyCalls, match="3 such streams are open; the limit is 3"):
                with visits.admit("c", stream=True):
                    pass
            with visits.admit("c", stream=False), visits.admit("a", stream=False):
                pass
    assert (visits.streams, dict(visits._calls)) == (0, {})


@pytest.mark.parametrize(
    "method", ["/kestrel.v1.VisionService/Nope", "/no.such.Service/Method", "/nonsense"]
)
async def test_a_method_that_does_not_exist_is_one_to_the_log(serve, caplog, method):
    caplog.set_level(logging.INFO, "kestrel_grpc")
    served = await serve(server_config=CLOSED)
    told = await failure(served.channel.unary_unary(method)(b"", metadata=TOKEN))
    assert (told.code, told.reason) == (grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_FOUND")
    assert "there is no method" in told.message
    await logged(caplog, "method=_OTHER", f"asked={method}")
    told = await failure(served.channel.unary_unary(method)(b""))
    assert (told.code, told.reason) == (grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_MISSING")
    assert served.server.records.statistics.methods == {}


async def test_a_long_name_is_logged_in_part(serve, caplog):
    caplog.set_level(logging.INFO, "kestrel_grpc")
    served = await serve(server_config=CLOSED)
    await failure(served.channel.unary_unary("/" + "x" * 5000)(b""))
    await logged(caplog, "x" * 99)
    assert "x" * 100 not in caplog.text


async def test_refused_callers_are_in_the_log_with_reason_and_principal(serve, caplog, tmp_path):
    caplog.set_level(logging.INFO, "kestrel_grpc")
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of("watcher", [Scope.METRICS], KEY) + "\n")
    config = {"security": SecurityConfig(auth_tokens=str(tokens)), "access_log": "text"}
    served = await serve(server_config=config)
    query = served.channel.unary_unary("/kestrel.v1.VisionService/Query")
    assert (await failure(query(b"", metadata=TOKEN))).reason == "SCOPE_MISSING"
    await logged(caplog, "reason=SCOPE_MISSING", "principal=watcher")
    await failure(query(b""))
    await logged(caplog, "reason=CREDENTIALS_MISSING")


async def test_refused_health_is_in_the_log(serve, caplog):
    caplog.set_level(logging.INFO, "kestrel_grpc")
    served = await serve(server_config=CLOSED)
    health = health_pb2_grpc.HealthStub(served.channel)
    told = await failure(health.Check(health_pb2.HealthCheckRequest()))
    assert told.reason == "CREDENTIALS_MISSING"
    await logged(caplog, "method=grpc.health.v1.Health/Check code=UNAUTHENTICATED")
    answer = await health.Check(health_pb2.HealthCheckRequest(), metadata=TOKEN)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert caplog.text.count("Health/Check") == 1, "an answered probe has no line"


async def test_watched_streams_are_bounded(serve):
    served = await serve()
    served.server.guard.visits.most_of_one = 3
    health = health_pb2_grpc.HealthStub(served.channel)
    streams = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    for stream in streams:
        assert (await anext(aiter(stream))).status == health_pb2.HealthCheckResponse.SERVING
    told = await failure(health.Watch(health_pb2.HealthCheckRequest()))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, "probes go on"
    streams[0].cancel()
    await until(lambda: served.server.guard.visits.streams != 3)
    assert await anext(aiter(health.Watch(health_pb2.HealthCheckRequest())))


async def test_a_reflection_stream_that_is_idle_ends_and_holds_nothing(serve, monkeypatch):
    monkeypatch.setattr("kestrel_grpc.edge.methods._READ_S", 0.3)
    served = await serve()
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    stream = stub.ServerReflectionInfo()
    await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert (await stream.read()).list_services_response.service
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    assert served.server.guard.held_bytes == 0
