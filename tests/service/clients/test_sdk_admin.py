"""KestrelAdmin and AsyncKestrelAdmin against the real server: every method, both kinds, and what they raise."""

import asyncio
import inspect
import logging

import grpc
import pytest

from kestrel_client import (
    AsyncKestrelAdmin,
    AsyncKestrelClient,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidRequestError,
    KestrelAdmin,
    PermissionDeniedError,
    Profile,
    ServerStatistics,
    Tls,
    UnauthenticatedError,
    UnavailableError,
)
from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_client.values.administration import Captures, MethodStatistics
from kestrel_grpc.settings.debug import DebugConfig
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.certificates import make_authority
from tests.service.conftest import NO_END, EndlessRuntime, raw_image
from tests.service.security.test_admin import CONFIG, KEY, METADATA, query
from tests.service.statuses import failure
from tests.threaded import Threaded
from tests.waiting import until


def threaded(*args, **options):
    return Threaded(KestrelAdmin(*args, **options))


@pytest.fixture(params=[threaded, AsyncKestrelAdmin], ids=["sync", "async"])
def kind(request):
    return request.param


def open_admin(kind, served, **options):
    return kind(served.server.addresses[0], **{"token": KEY, "timeout": 60, **options})


def public(cls):
    return {
        name: inspect.signature(method).parameters
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name not in ("close", "aclose")
    }


def test_both_kinds_have_the_same_methods_one_for_each_of_the_service():
    assert public(KestrelAdmin) == public(AsyncKestrelAdmin)
    service = pb.DESCRIPTOR.services_by_name["AdminService"]
    assert len(public(KestrelAdmin)) == len(service.methods)
    told = {field.name for field in pb.GetStatisticsResponse.DESCRIPTOR.fields}
    assert set(ServerStatistics.__dataclass_fields__) == told
    told = {field.name for field in pb.MethodStatistics.DESCRIPTOR.fields}
    assert set(MethodStatistics.__dataclass_fields__) == told


async def test_statistics_cancel_and_drain(serve, kind):
    served = await serve(EndlessRuntime(), server_config=CONFIG)
    async with open_admin(kind, served) as admin:
        running = [
            asyncio.ensure_future(
                served.vision.Query(query(max_tokens=NO_END, request_id=name), metadata=METADATA)
            )
            for name in ("one", "two")
        ]
        await until(lambda: served.engine.stats.running >= 2)
        found = await admin.statistics()
        assert (found.running_requests, found.calls) == (2, 3)
        assert found.pages > 0 and found.to_dict()["uptime_ms"] > 0
        assert found.methods == ()
        assert await admin.cancel("two") == 1
        await running[1]
        assert await admin.cancel("two") == 0
        assert await admin.drain() == 1
        told = await failure(served.vision.Query(query(), metadata=METADATA))
        assert told.code is grpc.StatusCode.UNAVAILABLE
        assert await admin.cancel("one") == 1
        await asyncio.gather(*running)
        [told] = (await admin.statistics()).to_dict()["methods"]
        assert (told["method"], told["ok_calls"], told["refused_calls"]) == ("Query", 2, 0)
        with pytest.raises(InvalidArgumentError) as caught:
            await admin.cancel("")
        assert [v.field for v in caught.value.field_violations] == ["request_id"]


async def test_flush(serve, kind):
    served = await serve(server_config=CONFIG)
    async with open_admin(kind, served) as admin:
        await served.vision.Query(query(raw_image()), metadata=METADATA)
        assert (await admin.statistics()).stored_images == 1
        assert await admin.flush_caches() == 0
        assert (await admin.statistics()).cached_pages == 0
        assert await admin.flush_caches(stored_images=True) == 1


async def test_log_levels(serve, kind):
    root, loop = logging.getLogger(), logging.getLogger("kestrel_engine.steps.loop")
    before = root.level, loop.level
    served = await serve(server_config=CONFIG)
    try:
        async with open_admin(kind, served) as admin:
            await admin.set_log_level("error")
            assert await admin.set_log_level("info") == "error"
            assert await admin.set_log_level("debug", "kestrel_engine.steps.loop") is None
            assert await admin.set_log_level("warning", "kestrel_engine.steps.loop") == "debug"
            assert (root.level, loop.level) == (logging.INFO, logging.WARNING)
            with pytest.raises(InvalidRequestError, match="level='loud': must be one of debug"):
                await admin.set_log_level("loud")
            with pytest.raises(InvalidArgumentError):
                await admin.set_log_level("info", "no.such.module")
    finally:
        root.setLevel(before[0])
        loop.setLevel(before[1])


@pytest.mark.slow
async def test_profiles(serve, kind, tmp_path):
    config = {**CONFIG, "debug": DebugConfig(profile_dir=str(tmp_path))}
    served = await serve(EndlessRuntime(), server_config=config)
    async with open_admin(kind, served) as admin:
        file = await admin.start_profile(seconds=60, steps=20, python_functions=True)
        with pytest.raises(FailedPreconditionError, match="a profile is being recorded already"):
            await admin.start_profile()
        await served.vision.Query(query(max_tokens=60), metadata=METADATA)
        profile = await admin.stop_profile()
        assert isinstance(profile, Profile) and (profile.file, profile.steps) == (file, 20)
        assert (tmp_path / file).stat().st_size == profile.size_bytes
        assert profile.to_dict()["duration_ms"] > 0
        with pytest.raises(InvalidArgumentError):
            await admin.start_profile(seconds=61)
        with pytest.raises(InvalidRequestError, match="steps=-1"):
            await admin.start_profile(steps=-1)


async def test_captures(serve, kind, tmp_path):
    config = {**CONFIG, "debug": DebugConfig(capture_dir=str(tmp_path))}
    served = await serve(server_config=config)
    async with open_admin(kind, served) as admin:
        assert await admin.start_capture() == 10
        assert await admin.start_capture(requests=3) == 3
        served.runtime.fail_next = RuntimeError("x")
        await failure(served.vision.Query(query(), metadata=METADATA))
        captures = await admin.stop_capture()
        assert captures == Captures(files=tuple(p.name for p in tmp_path.iterdir()), lost=0)
        assert captures.to_dict() == {"files": list(captures.files), "lost": 0}
        with pytest.raises(FailedPreconditionError, match="--capture-images"):
            await admin.start_capture(images=True)


async def test_who_may_and_what_is_not_there(serve, kind, tmp_path):
    served = await serve(server_config=CONFIG)
    async with open_admin(kind, served, token="x" * 20) as admin:
        with pytest.raises(UnauthenticatedError):
            await admin.drain()
    nobody_asked = await serve()
    async with open_admin(kind, nobody_asked, token=None) as admin:
        with pytest.raises(PermissionDeniedError):
            await admin.drain()
        assert (await admin.statistics()).calls == 1
    async with kind(f"unix:{tmp_path}/nobody", timeout=60) as admin:
        with pytest.raises(UnavailableError):
            await admin.statistics()
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        kind("example.org:1", token="x" * 20)


async def test_over_tls(serve, kind, tmp_path):
    authority = make_authority(tmp_path)
    security = SecurityConfig(api_key=KEY, tls=authority.issue("localhost").tls())
    config = {"security": security}
    served = await serve(server_config=config, listen="127.0.0.1:0")
    trusts = Tls(root_certificates=authority.ca.cert)
    async with open_admin(kind, served, tls=trusts) as admin:
        assert (await admin.statistics()).calls == 1


def test_a_client_closes_with_its_block():
    with KestrelAdmin("127.0.0.1:1") as admin:
        pass
    with pytest.raises(ValueError):
        admin.statistics()
    asyncio.run(_unused())


async def _unused():
    """Never opened, closed all the same; and twice."""
    client = AsyncKestrelAdmin()
    await client.aclose()
    async with AsyncKestrelClient(), AsyncKestrelAdmin() as admin:
        await admin.aclose()
