"""Calls that do not simply succeed: errors, limits, cancellation, retries, credentials."""

import asyncio
import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2

from kestrel_client import (
    AsyncKestrelClient,
    DeadlineExceededError,
    FieldViolation,
    IncompleteStreamError,
    InvalidArgumentError,
    InvalidRequestError,
    KestrelClient,
    KestrelError,
    NotFoundError,
    OverloadedError,
    QuotaViolation,
    RequestCancelledError,
    RequestTooLargeError,
    RpcError,
    ServerError,
    Tls,
    UnavailableError,
)
from kestrel_client.connection import Connection, is_local
from kestrel_client.errors import from_status
from tests.waiting import until

IMAGE = b"picture"
VIOLATIONS = (
    FieldViolation("query.sampling.top_p", "1.5 is not in (0, 1]"),
    FieldViolation("query.question", "must not be empty"),
)


def check_refusal(error: InvalidArgumentError) -> None:
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "two fields are wrong"
    assert error.field_violations == VIOLATIONS
    assert "query.sampling.top_p: 1.5 is not in (0, 1]" in str(error)


async def test_field_violations(either: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await either.query(None, "bad")
    check_refusal(caught.value)
    async with either.stream_query(None, "bad") as stream:
        for _ in range(2):  # a failed stream stays failed
            with pytest.raises(InvalidArgumentError) as caught:
                await anext(stream)
            check_refusal(caught.value)
        with pytest.raises(InvalidArgumentError):
            await stream.result()


def test_unreadable_details_are_passed_over() -> None:
    trailers: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", b"\xff\xff"),
        ("other", "x"),
    ]
    error = from_status(grpc.StatusCode.INTERNAL, "broken", trailers)
    assert type(error) is ServerError and error.field_violations == ()
    status = status_pb2.Status(
        details=[{"type_url": "t/google.rpc.BadRequest", "value": b"\xff"}]
    ).SerializeToString()
    error = from_status(grpc.StatusCode.NOT_FOUND, "", [("grpc-status-details-bin", status)])
    assert type(error) is NotFoundError and error.field_violations == ()


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_every_code_has_an_error(code: grpc.StatusCode) -> None:
    error = from_status(code, "words", ())
    assert isinstance(error, RpcError) and error.code is code and "words" in str(error)


async def test_stream_without_a_result(either: Any) -> None:
    async with either.stream_query(None, "cut") as stream:
        with pytest.raises(IncompleteStreamError):
            await stream.result()


# Retries.


async def test_busy_server_is_asked_again_as_it_says(either: Any, peer: Any) -> None:
    large = b"x" * 1_000_000  # more than gRPC's own retry buffer
    assert (await either.query(large, "busy 2")).answer
    assert peer.vision.attempts == 3
    peer.vision.attempts = 0
    assert (await either.stream_query(None, "busy 3").result()).answer
    assert peer.vision.attempts == 4


def test_four_attempts_are_enough(client: KestrelClient, peer: Any) -> None:
    with pytest.raises(OverloadedError) as caught:
        client.query(None, "busy 9")
    assert peer.vision.attempts == 4
    assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after_s == 1.5
    (violation,) = caught.value.quota_violations
    assert violation == QuotaViolation("camera", "9 places in the queue, the share is 8")


def test_negative_pushback_forbids_a_retry(client: KestrelClient, peer: Any) -> None:
    with pytest.raises(OverloadedError):
        client.query(None, "never")
    assert peer.vision.attempts == 1


# Limits.


async def test_too_large_is_refused_before_sending(peer: Any, tmp_path: Path) -> None:
    file = tmp_path / "large.png"
    file.write_bytes(b"x" * 5000)
    limited = KestrelClient(peer.target, max_message_bytes=4096)
    with limited:
        for image in (b"x" * 5000, file, str(file)):
            with pytest.raises(RequestTooLargeError, match="max_message_bytes=4096") as caught:
                limited.caption(image)
            assert caught.value.size >= 5000 and caught.value.limit == 4096
        with pytest.raises(RequestTooLargeError):
            limited.stream_query(b"x" * 4090, "q")
        assert limited.stream_query(b"x" * 3900, "q").result().answer
    async with AsyncKestrelClient(peer.target, max_message_bytes=4096) as limited_async:
        with pytest.raises(RequestTooLargeError):
            await limited_async.caption(b"x" * 5000)
        with pytest.raises(RequestTooLargeError):
            await limited_async.stream_caption(b"x" * 5000).result()
    assert len(peer.vision.requests) == 1


def test_large_messages_pass_by_default(client: KestrelClient, peer: Any) -> None:
    client.caption(b"x" * 5_000_000)  # gRPC's own limit is 4 MiB.
    assert len(peer.vision.requests[0].image.encoded) == 5_000_000


def test_timeout(client: KestrelClient, peer: Any) -> None:
    for timeout in (0.2, 2, 20):
        with pytest.raises(DeadlineExceededError) as caught:
            client.query(None, "slow", timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
        if peer.vision.attempts:  # A busy machine may let a deadline pass before.
            break
    assert peer.vision.cancelled.wait(60)


# Cancellation: the server must see it.


async def test_leaving_a_stream_cancels_it(either: Any, peer: Any) -> None:
    async with either.stream_query(None, "endless") as stream:
        assert (await anext(stream)).text
        assert not peer.vision.cancelled.is_set()
    assert await asyncio.to_thread(peer.vision.cancelled.wait, 60)
    assert [event async for event in stream] == []
    with pytest.raises(RequestCancelledError):
        await stream.result()
    async with stream:  # Closed once more.
        pass


def test_dropping_a_stream_cancels_it(client: KestrelClient, peer: Any) -> None:
    stream = client.stream_query(None, "endless")
    next(stream)
    del stream
    gc.collect()
    assert peer.vision.cancelled.wait(60)


async def test_dropping_an_async_stream_cancels_it(
    async_client: AsyncKestrelClient, peer: Any
) -> None:
    stream = async_client.stream_query(None, "endless")
    await anext(stream)
    del stream
    gc.collect()
    assert await asyncio.to_thread(peer.vision.cancelled.wait, 60)


@pytest.mark.parametrize("words", ["slow", "endless"])
async def test_cancelling_the_task_cancels_the_call(
    async_client: AsyncKestrelClient, peer: Any, words: str
) -> None:
    async def work() -> None:
        if words == "slow":
            await async_client.query(None, words)
        await async_client.stream_query(None, words).result()

    task = asyncio.create_task(work())
    await until(lambda: peer.vision.attempts)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(peer.vision.cancelled.wait, 60)


async def test_another_task_may_close_a_stream(async_client: AsyncKestrelClient, peer: Any) -> None:
    stream = async_client.stream_query(None, "endless")

    async def read() -> int:
        return len([event async for event in stream])

    reader = asyncio.create_task(read())
    await until(lambda: stream.request_id is not None)
    await stream.aclose()
    assert await asyncio.wait_for(reader, 60) >= 0
    assert await asyncio.to_thread(peer.vision.cancelled.wait, 60)


def test_a_closed_client_refuses(peer: Any) -> None:
    client = KestrelClient(peer.target)
    client.close()
    client.close()
    with pytest.raises((KestrelError, ValueError)):
        client.query(None, "q")


# Readiness.


async def test_wait_ready(either: Any, peer: Any) -> None:
    await either.wait_ready(60)
    peer.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with pytest.raises(DeadlineExceededError, match=r"not ready within 0\.3 s"):
        await either.wait_ready(0.3)
    waiting = asyncio.create_task(either.wait_ready(60))
    await asyncio.sleep(0)
    assert not waiting.done()
    peer.health.set("", health_pb2.HealthCheckResponse.SERVING)
    await waiting


def test_wait_ready_for_nobody() -> None:
    with KestrelClient("127.0.0.1:1") as client, pytest.raises(DeadlineExceededError):
        client.wait_ready(0.3)


# Metadata, token, TLS.


def test_metadata_and_token_arrive(peer: Any) -> None:
    with KestrelClient(peer.target, token="s3cret", metadata={"X-Team": "a"}) as client:
        client.query(None, "q", metadata=[("x-one", "1"), ("x-raw-bin", b"\0\xff")])
        with client.stream_query(None, "q") as stream:
            stream.result()
    first, second = peer.vision.metadata
    assert first["authorization"] == second["authorization"] == "Bearer s3cret"
    assert (first["x-team"], first["x-one"], first["x-raw-bin"]) == ("a", "1", b"\0\xff")
    assert second["x-team"] == "a" and "x-one" not in second
    assert str(first["user-agent"]).startswith("kestrel-client/0.1.0 ")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture
def tls_peer(
    certificate: tuple[Path, Path], start_peer: Callable[..., Any]
) -> Iterator[tuple[Any, Path, Path]]:
    cert, key = certificate
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], cert.read_bytes(), require_client_auth=True
    )
    running = start_peer(credentials)
    yield running, cert, key
    running.stop()


async def test_mutual_tls_and_token(tls_peer: tuple[Any, Path, Path]) -> None:
    peer, cert, key = tls_peer
    tls = Tls(
        root_certificates=cert,
        certificate=cert.read_bytes(),
        private_key=key,
        server_name="localhost",
    )
    with KestrelClient(peer.target, tls=tls, token="s3cret", timeout=60) as client:
        client.query(None, "q")
    async with AsyncKestrelClient(peer.target, tls=tls, token="s3cret", timeout=60) as async_client:
        await async_client.query(None, "q")
    assert [m["authorization"] for m in peer.vision.metadata] == ["Bearer s3cret"] * 2


def test_tls_needs_a_trusted_server(tls_peer: tuple[Any, Path, Path]) -> None:
    peer, _, _ = tls_peer
    with KestrelClient(peer.target, tls=True, timeout=60) as client:
        with pytest.raises(UnavailableError):
            client.query(None, "q")


def test_token_never_leaves_in_the_clear() -> None:
    for target in ("example.org:50051", "10.0.0.1:1", "dns:///kestrel:50051", "[2001:db8::1]:1"):
        with pytest.raises(InvalidRequestError, match="unencrypted"):
            KestrelClient(target, token="s3cret")
    assert "s3cret" not in repr(Connection(token="s3cret"))


def test_is_local() -> None:
    for target in (
        *("localhost:50051", "127.0.0.1:1", "127.8.9.1", "[::1]:50051", "::1", "ipv6:[::1]:1"),
        *("unix:/tmp/socket", "unix-abstract:name", "ipv4:127.0.0.1:1,127.0.0.1:2"),
        *("dns:///localhost:1", "dns://8.8.8.8/localhost:1"),
    ):
        assert is_local(target) is True, target
    mixed = "ipv4:127.0.0.1:1,10.0.0.1:2"
    for target in (mixed, "localhost.example.org:1", "192.168.1.2:50051", "kestrel"):
        assert is_local(target) is False, target


@pytest.mark.parametrize(
    "settings",
    [
        {"target": ""},
        {"timeout": 0},
        {"timeout": -1.0},
        {"max_message_bytes": 0},
        {"token": "two\nlines"},
        {"tls": Tls(root_certificates="/nowhere/ca.pem")},
        {"tls": Tls(root_certificates=__file__)},
        {"metadata": {"two words": "x"}},
        {"metadata": [("x-team", "two\nlines")]},
        {"metadata": {"x-team": b"bytes"}},
    ],
    ids=str,
)
def test_impossible_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        KestrelClient(**settings)
    with pytest.raises(InvalidRequestError):
        AsyncKestrelClient(**settings)


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_a_limit_beyond_all_clocks_is_none(peer: Any, timeout: float) -> None:
    with KestrelClient(peer.target, timeout=timeout) as client:
        client.query(None, "q")
    with KestrelClient(peer.target, timeout=1.0) as client:
        client.query(None, "q", timeout=timeout)
        with pytest.raises(InvalidRequestError, match="above 0"):
            client.query(None, "q", timeout=0)


def test_certificate_and_key_need_each_other() -> None:
    with pytest.raises(InvalidRequestError):
        Tls(certificate=b"x")


# Arguments that can't be sent.


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda c: c.caption(IMAGE, "huge"), "length: 'huge' is not one of short, normal, long"),
        (lambda c: c.segment(IMAGE, "x", mask="bmp"), "mask: 'bmp'"),
        (lambda c: c.query(None, "q", priority="urgent"), "priority: 'urgent'"),
        (
            lambda c: c.query(None, "q", max_tokens=2**31),
            "max_tokens: 2147483648 is not a whole number from 0 to 2147483647",
        ),
        (
            lambda c: c.query(None, "q", seed=2**63),
            "seed: .* is not a whole number from 0 to 9223372036854775807",
        ),
        (lambda c: c.query(None, "q", temperature="hot"), "temperature: "),
        (lambda c: c.query(None, 7), "question: "),
        (lambda c: c.query(None, "\ud800"), "question: "),
        (lambda c: c.point(IMAGE, "x", max_objects=2**32), "max_objects: "),
        (lambda c: c.query(IMAGE, "q", spatial_refs=[(1, 2, 3)]), r"spatial_refs\[0\]: has 3"),
        (lambda c: c.query(IMAGE, "q", spatial_refs=[("a", "b")]), r"spatial_refs\[0\]: "),
    ],
)
def test_malformed_arguments_are_named(client: KestrelClient, call: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        call(client)
