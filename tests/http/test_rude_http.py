"""Rude HTTP clients: silent ones, endless heads and bodies, readers who don't read. Each costs a bounded amount."""

import asyncio
import contextlib
import gc
import gzip
import json
import select
import socket

import pytest

from kestrel_engine import EngineOverloaded
from kestrel_grpc.http.edge import ServiceCall
from kestrel_grpc.http.port import listener
from kestrel_grpc.security.connections import connection_guard
from kestrel_grpc.services.vision import VisionService
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.security import CallLimits, ConnectionLimits, SecurityConfig
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime
from tests.waiting import until

JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


ROUTES = ("/v1/query", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/generate")


async def connect(served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = served.server.http_addresses[0].rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def closed(reader: asyncio.StreamReader, within_s: float = 60) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(within_s):
            while piece := await reader.read(65536):
                data += piece
    return data


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(listener, "_HEAD_S", 0.3)


async def test_silent_connections_are_closed(http, short):
    served, client = await http()
    for begin in (b"", HEAD):
        reader, writer = await connect(served)
        writer.write(begin)
        assert await closed(reader) == b""
        writer.close()
    # Also one that has had an answer.
    reader, writer = await connect(served)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b'"}')
    writer.write(b"GET /heal")
    assert await closed(reader) == b""
    writer.close()
    assert (await client.get("/healthz")).status_code == 200


async def test_an_endless_body_of_a_stranger_is_not_read(http):
    security = SecurityConfig(api_key="k" * 40)
    served, _ = await http(server_config={"security": security})
    _reader, writer = await connect(served)
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536
    assert sent < 64 * 1024 * 1024
    writer.close()
    assert served.server.guard.held_bytes == 0


async def test_a_refusal_reaches_a_client_that_goes_on_sending(http):
    """A server that closes at once resets the connection, and many clients then report a broken pipe."""
    served, _ = await http(server_config={"security": SecurityConfig(api_key="k" * 40)})
    reader, writer = await connect(served)
    writer.write(HEAD + b"content-length: 600000\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
    for _ in range(6):
        writer.write(b" " * 100_000)
        await writer.drain()
    assert b"credentials_missing" in await reader.read()
    writer.close()
    await writer.wait_closed()
    assert served.server.guard.held_bytes == 0


async def test_a_connection_reads_little_at_once(http, monkeypatch, tmp_path):
    """A unix socket passes more than 200 KiB at once to who asks for it."""
    sizes, receive = [], listener._Connection.data_received

    def received(self, data):
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(listener._Connection, "data_received", received)
    config = HttpConfig(http_listen=(f"unix:{tmp_path}/s",))
    await http(server_config={"http": config})
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{tmp_path}/s")
        client.setblocking(False)
        sent = client.send(HEAD + b"content-length: 400000\r\n\r\n" + b" " * 400_000)
        await until(lambda: sum(sizes) >= min(sent, 100_000))
    assert max(sizes) == listener._READ_BYTES < sent


async def test_an_endless_body_is_cut_at_the_limit(http):
    served, _ = await http(server_config={"max_message_bytes": 1_000_000})
    _reader, writer = await connect(served)
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
    writer.close()
    await until(lambda: served.server.guard.held_bytes == 0)


async def test_a_body_that_stalls_is_given_up(http):
    security = SecurityConfig(calls=CallLimits(read_s=0.3))
    served, _ = await http(server_config={"security": security})
    reader, writer = await connect(served)
    writer.write(HEAD + b"content-length: 100\r\n\r\n{")
    answer = await closed(reader)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.3 s" in answer
    assert served.server.guard.held_bytes == 0
    writer.close()


async def test_the_limit_holds_for_all_addresses_together(http):
    listen = ("127.0.0.1:0", "127.0.0.1:0")
    security = SecurityConfig(connections=ConnectionLimits(connections=2))
    http_config = HttpConfig(http_listen=listen)
    served, _ = await http(server_config={"http": http_config, "security": security})
    host, port = served.server.http_addresses[1].split(":")
    held = [await connect(served), await asyncio.open_connection(host, int(port))]
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await closed(reader) == b""
    for _, other in (*held, (reader, writer)):
        other.close()


async def test_one_address_has_half_of_the_connections_unless_it_is_known(http, monkeypatch):
    monkeypatch.setattr(connection_guard, "PATIENCE_S", 0.3)
    limits = ConnectionLimits(connections=8)
    security = SecurityConfig(api_key="k" * 40, connections=limits)
    served, client = await http(server_config={"security": security})
    client.headers["authorization"] = f"Bearer {'k' * 40}"
    known = await client.get("/v1/models")
    assert known.status_code == 200
    held = [await connect(served) for _ in range(6)]
    for _, writer in held:
        writer.write(HEAD)
    for reader, _ in held[4:]:
        assert await closed(reader) == b""
    assert served.server.ended_connections()["address_limit"] == 2
    assert not any(reader.at_eof() for reader, _ in held[:4])
    for _, writer in held:
        writer.close()
    again = await client.get("/v1/models")
    assert again.status_code == 200
    first, second = (
        each.extensions["network_stream"].get_extra_info("client_addr") for each in (known, again)
    )
    assert first == second, "the same connection"


async def test_idle_connections_end_if_few_are_left(http, monkeypatch):
    monkeypatch.setattr(connection_guard, "IDLE_S", 0.3)
    limits = ConnectionLimits(connections=8, address_connections=0)
    security = SecurityConfig(connections=limits)
    served, client = await http(runtime=EndlessRuntime(), server_config={"security": security})
    asked = {"question": "Why?", "stream": True, "settings": {"max_tokens": NO_END}}
    async with client.stream("POST", "/v1/query", json=asked) as response:
        lines = response.aiter_lines()
        await anext(lines)
        held = [await connect(served) for _ in range(7)]
        assert await closed(held[0][0]) == b"", "the oldest of the idle ones"
        assert served.server.ended_connections()["idle"] == 1
        await anext(lines)
    for _, writer in held:
        writer.close()


async def test_a_body_that_no_handler_reads_ends_its_connection(http):
    served, _ = await http()
    for path in (b"/", b"/healthz", b"/metrics", b"/nothing"):
        reader, writer = await connect(served)
        writer.write(
            b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\nx"
        )
        assert (await closed(reader)).startswith(b"HTTP/1.1 ")
        writer.close()


async def test_bodies_of_many_small_values_are_refused_before_they_are_parsed(http):
    _, client = await http()
    body = b'{"question": [' + b"[]," * 1_000_000 + b"0]}"
    for path in ROUTES:
        response = await client.post(path, content=body, headers=JSON)
        assert response.status_code == 400 and "more than 20000 values" in response.text


async def test_tiny_chunks_and_many_headers_end_their_connection(http):
    served, client = await http()
    chunks = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50_000
    headers = HEAD + b"a:b\r\n" * 10_000 + b"\r\n"
    for data in (chunks, headers):
        reader, writer = await connect(served)
        writer.write(data)
        assert not (await closed(reader)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert served.engine.num_requests == 0
    body = b'{"question": "Why?", "settings": {"max_tokens": 2}}'

    async def pieces():
        for at in range(0, len(body), 10):
            yield body[at : at + 10]

    assert (await client.post("/v1/query", content=pieces(), headers=JSON)).status_code == 200


async def test_compressed_bodies_are_refused(http):
    _, client = await http()
    body = gzip.compress(b'{"question": "' + b"a" * 3_000_000 + b'"}')
    for path in ROUTES:
        response = await client.post(
            path, content=body, headers={**JSON, "content-encoding": "gzip"}
        )
        assert response.status_code == 400 and "the body is compressed" in response.text


@pytest.mark.parametrize(
    "path, asked",
    [
        (b"/v1/query", {"question": "Why?", "settings": {"max_tokens": 250}}),
        pytest.param(
            b"/v1/responses", {"input": "Why?", "max_output_tokens": 250}, marks=pytest.mark.slow
        ),
        pytest.param(
            b"/v1/messages",
            {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 250},
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_reader_who_reads_nothing_is_cut_off(http, tmp_path, path, asked):
    """A unix socket keeps 200 KiB for a reader, and TCP 4 MiB, for which a busy machine takes a minute."""
    security = SecurityConfig(calls=CallLimits(write_s=0.5))
    config = {"security": security, "http": HttpConfig(http_listen=(f"unix:{tmp_path}/s",))}
    runtime = FakeRuntime(LIMITS, never_ends, cost=lambda plan: 0.0001)
    served, _ = await http(runtime=runtime, server_config=config)
    # Pipelined requests, whose answers fill every buffer between.
    body = json.dumps({**asked, "stream": True}).encode()
    head = HEAD.replace(b"/v1/query", path)
    request = head + f"content-length: {len(body)}\r\n\r\n".encode() + body
    reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(request * 400)
    end = select.poll()
    # The end of the connection is always told.
    end.register(writer.get_extra_info("socket").fileno(), 0)
    await until(lambda: end.poll(0))
    await until(lambda: served.engine.num_requests == 0 and (not served.server.in_flight.count))
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    with contextlib.suppress(ConnectionError):
        assert 0 < (await closed(reader)).count(b"HTTP/1.1 200 OK") < 400
    writer.close()


async def test_ids_of_callers_are_checked_before_they_are_sent_back(http):
    _, client = await http()
    body = {"question": "Why?", "settings": {"max_tokens": 2}}
    kept = await client.post("/v1/query", json=body, headers={"x-request-id": "mine-7"})
    assert kept.headers["x-request-id"] == "mine-7" == kept.json()["request_id"]
    odd = await client.post("/v1/query", json=body, headers={"x-request-id": "a" * 500})
    assert odd.headers["x-request-id"] != "a" * 500


async def test_a_body_of_unknown_length_is_read_where_messages_get_little_memory(http):
    """What is reserved for the largest body is more than calls of kestrel.v1 may hold together."""
    security = SecurityConfig(calls=CallLimits(held_bytes=4 * 2**20))
    _, client = await http(server_config={"security": security, "max_message_bytes": 2**20})

    async def parts():
        yield b'{"question": '
        yield b'"why?"}'

    response = await client.post("/v1/query", content=parts(), headers=JSON)
    assert response.status_code == 200, response.text


async def test_a_call_whose_refusal_is_delayed_holds_no_request(http, monkeypatch):
    served, client = await http()
    kept = []

    async def full(self, request, kind, sender=None):
        raise EngineOverloaded("full")

    async def delay(who, left_s):
        # An earlier test's request may still be there.
        calls = [each for each in gc.get_objects() if type(each) is ServiceCall]
        requests = [each for each in calls if "refused late" in str(each.message)]
        kept.append((len(requests), served.server.guard.held_bytes))

    monkeypatch.setattr(VisionService, "_answer", full)
    monkeypatch.setattr(served.server.guard.refusals, "delay", delay)
    asked = {"question": "refused late?"}
    response = await client.post("/v1/query", json=asked, headers=JSON)
    assert (response.status_code, kept) == (429, [(0, 0)])
