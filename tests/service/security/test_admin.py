"""AdminService over the wire: the required scopes, and the effects on a running server."""

import asyncio
import logging

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_client._pb.kestrel.v1 import common_pb2, vision_service_pb2
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.conftest import ENDLESS, LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure
from tests.waiting import until

KEY = "the-key-of-an-administrator"
METADATA = (("authorization", f"Bearer {KEY}"),)
CONFIG = {"security": SecurityConfig(api_key=KEY)}


def query(image=None, max_tokens=2, **options):
    return vision_service_pb2.QueryRequest(
        images=[] if image is None else [image],
        query=vision_service_pb2.QueryTask(
            question="what?", max_tokens=max_tokens, sampling=common_pb2.Sampling(temperature=0)
        ),
        options=common_pb2.RequestOptions(**options),
    )


class Admin:
    """Calls with the key."""

    def __init__(self, served, metadata=METADATA):
        self._stub, self._metadata = AdminServiceStub(served.channel), metadata

    def __getattr__(self, method):
        request = getattr(pb, f"{method}Request")

        def call(**fields):
            called = getattr(self._stub, method)(request(**fields), metadata=self._metadata)
            return called.read() if method == "LoadModel" else called  # It has a stream.

        return call


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["AdminService"].methods]


async def test_who_may(serve, tmp_path):
    tokens = {scope: new_token() for scope in Scope}
    path = tmp_path / "tokens"
    path.write_text("\n".join(line_of(s.value, [s], token) for s, token in tokens.items()))
    served = await serve(server_config={"security": SecurityConfig(auth_tokens=str(path))})
    for name in METHODS:
        told = await failure(getattr(Admin(served, ()), name)())
        assert told.code is grpc.StatusCode.UNAUTHENTICATED
        for scope in Scope:
            if scope is Scope.ADMIN or (scope is Scope.METRICS and name == "GetStatistics"):
                continue
            admin = Admin(served, (("authorization", f"Bearer {tokens[scope]}"),))
            told = await failure(getattr(admin, name)())
            assert told.code is grpc.StatusCode.PERMISSION_DENIED
            assert told.reason == "SCOPE_MISSING"
    for scope in (Scope.ADMIN, Scope.METRICS):
        admin = Admin(served, (("authorization", f"Bearer {tokens[scope]}"),))
        assert (await admin.GetStatistics()).calls == 1


async def test_nobody_is_an_administrator_where_nobody_is_asked(serve):
    """docs/run/service.md: the service is listed all the same, and GetStatistics answers."""
    served = await serve()
    for name in METHODS:
        if name == "GetStatistics":
            continue
        told = await failure(getattr(Admin(served, ()), name)())
        assert (told.code, told.reason) == (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING")
        assert told.message == "callers without credentials lack the scope admin"
    assert (await Admin(served, ()).GetStatistics()).pages == LIMITS.num_pages
    health = health_pb2_grpc.HealthStub(served.channel)
    asked = health_pb2.HealthCheckRequest(service="kestrel.v1.AdminService")
    assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING


async def test_drain_lets_running_requests_end_and_takes_no_more(serve):
    served = await serve(EndlessRuntime(), server_config=CONFIG)
    admin = Admin(served)
    running = asyncio.ensure_future(served.vision.Query(query(max_tokens=60), metadata=METADATA))
    await until(lambda: served.engine.num_requests)
    assert (await admin.Drain()).remaining_requests == 1
    told = await failure(served.vision.Query(query(), metadata=METADATA))
    assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    check = served.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    assert (await check(b"")).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await running).usage.output_tokens == 60
    assert (await admin.Drain()).remaining_requests == 0


async def test_cancel_ends_requests_by_their_id_with_what_there_is(serve):
    served = await serve(EndlessRuntime(), server_config=CONFIG)
    admin = Admin(served)
    calls = [
        asyncio.ensure_future(
            served.vision.Query(query(max_tokens=NO_END, request_id=name), metadata=METADATA)
        )
        for name in ("one", "two", "two")
    ]
    await until(lambda: served.engine.stats.running >= 3)
    steps = len(served.runtime.plans)
    await until(lambda: len(served.runtime.plans) >= steps + 5)
    assert (await admin.CancelRequest(request_id="two")).cancelled_requests == 2
    for call in calls[1:]:
        result = await call
        assert result.answers[0].finish_reason == common_pb2.FINISH_REASON_CANCELLED
        assert 0 < result.usage.output_tokens < NO_END
    assert not calls[0].done()
    assert (await admin.CancelRequest(request_id="two")).cancelled_requests == 0
    assert (await admin.CancelRequest(request_id="one")).cancelled_requests == 1
    await calls[0]
    told = await failure(admin.CancelRequest(request_id="ä"))
    assert told.fields == ["request_id"]


async def test_flush_forgets_prefixes_and_on_demand_images(serve):
    served = await serve(server_config=CONFIG)
    admin = Admin(served)

    async def ask(image=None):
        return await served.vision.Query(query(image or raw_image()), metadata=METADATA)

    first = await ask()
    again = await ask()
    assert again.usage.cached_tokens > 80
    assert (await admin.GetStatistics()).cached_pages > 0
    assert (await admin.FlushCaches()).deleted_images == 0
    encoded = sum(len(plan.encode) for plan in served.runtime.plans)
    flushed = await ask(common_pb2.Image(image_id=first.info.images[0].image_id))
    assert flushed.usage.cached_tokens == 0
    assert sum(len(plan.encode) for plan in served.runtime.plans) > encoded
    assert flushed.answers[0].text == first.answers[0].text
    assert (await admin.FlushCaches(stored_images=True)).deleted_images == 1
    assert (await admin.GetStatistics()).stored_images == 0
    served.server.images.check()
    told = await failure(ask(common_pb2.Image(image_id=first.info.images[0].image_id)))
    assert told.reason == "IMAGE_NOT_FOUND"


async def test_a_flush_leaves_running_requests_alone(serve):
    served = await serve(EndlessRuntime(), server_config=CONFIG)
    request = query(raw_image(), max_tokens=60)
    running = asyncio.ensure_future(served.vision.Query(request, metadata=METADATA))
    await until(lambda: len(served.runtime.plans) >= 10)
    await Admin(served).FlushCaches()
    assert (await running).usage.output_tokens == 60


async def test_the_log_level_of_one_module_changes_alone(serve):
    served = await serve(server_config=CONFIG)
    admin, module = Admin(served), logging.getLogger("kestrel_engine.steps.loop")
    before = logging.getLogger().level
    try:
        response = await admin.SetLogLevel(level=pb.LOG_LEVEL_DEBUG, module=module.name)
        assert response.previous_level == pb.LOG_LEVEL_UNSPECIFIED
        assert (module.level, logging.getLogger().level) == (logging.DEBUG, before)
        response = await admin.SetLogLevel(level=pb.LOG_LEVEL_ERROR, module=module.name)
        assert response.previous_level == pb.LOG_LEVEL_DEBUG
        # A package has no logger of its own until it is given a level.
        await admin.SetLogLevel(level=pb.LOG_LEVEL_WARNING, module="kestrel_engine")
        below = logging.getLogger("kestrel_engine.building.factory")
        assert below.getEffectiveLevel() == logging.WARNING
        known = len(logging.root.manager.loggerDict)
        for name in ("kestrel_engine.nothing", "..", "x" * 1000):
            told = await failure(admin.SetLogLevel(level=pb.LOG_LEVEL_DEBUG, module=name))
            assert told.fields == ["module"]
        assert len(logging.root.manager.loggerDict) == known
        for level in (0, 9):
            assert (await failure(admin.SetLogLevel(level=level))).fields == ["level"]
    finally:
        module.setLevel(logging.NOTSET)
        logging.getLogger("kestrel_engine").setLevel(logging.NOTSET)


async def test_statistics_follow_what_happens(serve):
    served = await serve(EndlessRuntime(), server_config=CONFIG)
    admin = Admin(served)
    before = await admin.GetStatistics()
    assert before.uptime_ms > 0
    assert (before.running_requests, before.prompt_positions) == (0, 0)
    calls = [
        asyncio.ensure_future(
            served.vision.Query(query(raw_image(), max_tokens=NO_END), metadata=METADATA)
        )
        for _ in range(LIMITS.max_batch_size)
    ]
    await until(lambda: len(served.runtime.plans) >= 20)
    during = await admin.GetStatistics()
    assert during.running_requests + during.waiting_requests == LIMITS.max_batch_size
    assert during.calls == LIMITS.max_batch_size + 1
    assert during.held_bytes > LIMITS.max_batch_size * 60 * 40 * 3
    assert during.free_pages < during.pages == ENDLESS.num_pages
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: not served.server.guard.admission.calls)
    after = await admin.GetStatistics()
    assert (after.calls, after.held_bytes) == (1, 0)
    [query_calls] = after.methods
    assert (query_calls.method, query_calls.cancelled_calls) == ("Query", LIMITS.max_batch_size)
    assert (query_calls.ok_calls, query_calls.total_ms) == (0, 0)


async def test_statistics_count_calls_by_their_end(serve):
    served = await serve(EndlessRuntime(), server_config=CONFIG)
    served.runtime.fail_next = RuntimeError("x")
    await failure(served.vision.Query(query(), metadata=METADATA))
    for _ in range(2):
        await served.vision.Query(query(raw_image(), max_tokens=4), metadata=METADATA)
    await failure(served.vision.Query(vision_service_pb2.QueryRequest(), metadata=METADATA))
    for timeout in (0.1, 1, 10):
        late = query(max_tokens=NO_END)
        await failure(served.vision.Query(late, metadata=METADATA, timeout=timeout))
        await until(lambda: not served.server.guard.admission.calls)
        [told] = (await Admin(served).GetStatistics()).methods
        if told.failed_calls == 2:  # A busy machine may let a deadline pass before.
            break
    await failure(served.vision.Query(query()))
    await until(lambda: not served.server.guard.admission.calls)
    [told] = (await Admin(served).GetStatistics()).methods
    ends = told.ok_calls, told.failed_calls, told.cancelled_calls, told.refused_calls
    assert ends == (2, 2, 0, 2)
    assert told.output_tokens == 8 and told.input_tokens > told.cached_tokens > 0
    parts = (told.preprocess_ms, told.queue_ms, told.prefill_ms, told.decode_ms)
    assert all(part > 0 for part in parts) and sum(parts) <= told.total_ms


async def test_a_worker_says_why_it_loads_no_models(serve):
    """`serve` gives this fixture's server, and workers, nothing that loads further models."""
    served = await serve(server_config=CONFIG)
    told = await failure(Admin(served).LoadModel(source="kestrel-small"))
    assert told.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "start a server without --workers for kestrel-small" in told.message
