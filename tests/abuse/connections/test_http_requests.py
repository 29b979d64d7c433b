"""HTTP requests that two programs could read in two ways, and requests that cost more than they should."""

import pytest

from kestrel_grpc.http.port.listener import _READ_BYTES
from kestrel_grpc.process import server
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.security import CallLimits, SecurityConfig
from tests.http.conftest import http, serve
from tests.http.test_rude_http import HEAD, closed, connect
from tests.waiting import until

__all__ = ["http", "serve"]
HIDDEN = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
MOST_BYTES = 8 << 20
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"
ANSWERS = [
    (CHUNKED + b"content-length: 10\r\n\r\n0\r\n\r\n", b"400"),
    (HEAD + b"content-length: 2\r\ncontent-length: 44\r\n\r\n{}", b"400"),
    (HEAD + b"transfer-encoding: xchunked\r\ncontent-length: 44\r\n\r\n", b"400"),
    (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n0\r\n\r\n", b"400"),
    (CHUNKED + b"\r\n0\r\n\r\n0\r\n\r\n", b"400"),
    (HIDDEN.replace(b"\r\n", b"\n"), b"400"),
    (b"GET /healthz HTTP/1.1\nhost: localhost\n" + b"a:b\n" * 15_900 + b"\n", b"400"),
    (HIDDEN[:-2] + b"a:b\r\n" * 15_900 + b"\r\n", b"431"),
    (HIDDEN.replace(b"HTTP/1.1", b"HTTP/9.9"), b"505"),
    (HIDDEN.replace(b"localhost", b"evil.example"), b"421"),
    (HIDDEN.replace(b"GET /healthz", b"CONNECT localhost:80"), b"400"),
]
"""A request, and the status of its response."""


@pytest.mark.parametrize("request_, status", ANSWERS)
async def test_a_request_that_is_not_exact_ends_its_connection(http, request_, status):
    served, client = await http()
    reader, writer = await connect(served)
    writer.write(request_ + HIDDEN)
    answer = await closed(reader, 60)
    if answer or len(request_) < _READ_BYTES // 2:
        # What arrives after the refusal may reset the connection before the client has read it.
        assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"200 OK" not in answer, "what is hidden behind it is not a request"
    writer.close()
    assert served.engine.num_requests == served.server.guard.held_bytes == 0
    assert (await client.get("/healthz")).status_code == 200


async def test_bodies_that_wait_for_memory_are_not_read(http, monkeypatch):
    """One body holds all memory and never ends. Of the others the server holds what it has read before it knew."""
    security = SecurityConfig(calls=CallLimits(held_bytes=MOST_BYTES))
    served, _ = await http(server_config={"security": security, "max_message_bytes": 600_000})
    writers = [(await connect(served))[1] for _ in range(16)]
    for writer in writers:
        writer.write(CHUNKED + b"\r\n" + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 30)
    connections = served.server._opened.http._servers[0][0].server_state.connections

    def all_paused():
        found = [each for each in connections if each.cycle and each.flow.read_paused]
        return found if len(found) >= len(writers) - 1 else None

    paused = await until(all_paused)
    held = [len(each.cycle.body) + len(each._framing._waiting) for each in paused]
    assert _READ_BYTES <= max(held) <= 2 * _READ_BYTES
    assert served.server.guard.held_bytes <= MOST_BYTES
    for writer in writers:
        writer.transport.abort()
    monkeypatch.setattr(server, "LAST_WORDS_S", 0)


async def test_a_stranger_is_not_told_to_continue(http):
    served, _ = await http(server_config={"security": SecurityConfig(api_key="k" * 40)})
    reader, writer = await connect(served)
    writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 10\r\n\r\n")
    assert (await closed(reader, 60)).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(http):
    served, _ = await http()
    reader, writer = await connect(served)
    body = b'{"question": "?", "settings": {"max_tokens": 1}}'
    asked = HEAD + b"content-length: %d\r\nx-request-id: id-%d\r\n\r\n%b"
    writer.write(b"".join(asked % (len(body), number, body) + HIDDEN for number in range(20)))
    for number in range(20):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and b"x-request-id: id-%d\r\n" % number in head
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        assert served.server.in_flight.count <= 1
        assert b"200 OK" in await reader.readuntil(b'"}')
    writer.close()


WAYS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", None]
"""Content types that a page of any site sends without asking the server."""


@pytest.mark.parametrize(
    "path",
    [
        "/v1/query",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/generate",
        "/v2/models/moondream/infer",
        "/kestrel.v1.VisionService/Query",
    ],
)
async def test_what_a_page_of_another_site_may_send_computes_nothing(http, path):
    served, client = await http()
    for kind in WAYS:
        headers = {"origin": "https://evil.example"} | ({"content-type": kind} if kind else {})
        response = await client.post(path, content=b'{"question": "?"}', headers=headers)
        assert response.status_code == 415, kind
        assert b"content-type: application/" in response.content
    assert served.engine.stats.prompt_positions == 0


LOCAL = [
    "localhost", "LOCALHOST:1", "127.0.0.1:2020", "127.8.8.8", "[::1]:2020", "a.localhost", "localhost.",
]  # fmt: skip
STRANGE = [
    "evil.example", "127.0.0.1.evil.example", "192.168.1.5", "0.0.0.0", "", "a b", "localhost@evil.example",
    "[::1", "kestrel",
]  # fmt: skip


async def test_a_page_of_another_site_cannot_take_its_name_to_loopback(http):
    _, client = await http()
    for host in LOCAL:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200, host
    for host in STRANGE:
        response = await client.get("/v1/models", headers={"host": host})
        assert (
            response.status_code == 421
            and response.json()["error"]["code"] == "misdirected_request"
        )
    config = HttpConfig(http_listen=("127.0.0.1:0",), http_hosts=("kestrel.example.org",))
    _, client = await http(server_config={"http": config})
    for host, status in (("Kestrel.example.org:80", 200), ("localhost", 200), ("example.org", 421)):
        assert (await client.get("/v1/models", headers={"host": host})).status_code == status


async def test_beyond_loopback_a_port_answers_to_names_that_no_stranger_owns(http):
    config = HttpConfig(http_listen=("0.0.0.0:0",))
    security = SecurityConfig(insecure_listen=True)
    _, client = await http(server_config={"http": config, "security": security})
    for host, status in (("192.168.1.5:2020", 200), ("kestrel:2020", 200), ("evil.example", 421)):
        assert (await client.get("/v1/models", headers={"host": host})).status_code == status, host
    security = SecurityConfig(insecure_listen=True, api_key="k" * 40)
    _, client = await http(server_config={"http": config, "security": security})
    response = await client.get("/healthz", headers={"host": "any.example"})
    assert response.status_code == 200, "a page of another site has no token"
