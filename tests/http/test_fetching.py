"""Images by address: fetched from listed hosts with public addresses only, within limits, in every interface.

A stand-in for the name server and for the network leads all connections to a server of this test.
"""

import asyncio
import base64
import contextlib
import gzip
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kestrel_engine import InvalidRequest, settings_of
from kestrel_grpc.http import fetching
from kestrel_grpc.http.fetching import Addresses, ImageFetcher, is_address, is_public
from kestrel_grpc.settings.flags import parser_of
from kestrel_grpc.settings.http import HttpConfig
from tests.http.conftest import data_url
from tests.service.certificates import Authority, authority

__all__ = ["authority"]

HOST, OTHER, PUBLIC = "images.example.org", "cdn.example.net:8443", "93.184.216.34"
URL = data_url()
JPEG = base64.b64decode(URL.partition(",")[2])


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    size = f"content-length: {len(body) if length is None else length}"
    return "\r\n".join([f"HTTP/1.1 {status}", size, *headers, "", ""]).encode() + body


@dataclass
class Network:
    """``names``: the answers of the name server, one after the other, the last again and again."""

    names: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    """By host and path."""
    connected: list[tuple[str, int, str]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    port: int = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        answers = self.names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect(self, address: str, port: int, trust: Any, host: str) -> Any:
        self.connected.append((address, port, host))
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            lines = head.decode().split("\r\n")
            host = next(line[6:] for line in lines if line.startswith("host: "))
            path = lines[0].split(" ")[1]
            writer.write(self.answers[host.lower() + path])
            await writer.drain()
            if path.startswith("/slow"):
                for _ in range(1000):
                    writer.write(b"x")
                    await asyncio.sleep(0.05)
            while path.startswith("/endless"):
                writer.write(b"x" * 65536)
                await writer.drain()
        writer.close()


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    network = Network()
    network.answers[f"{HOST}/a.jpg"] = answer(JPEG)
    server = await asyncio.start_server(network.serve, "127.0.0.1", 0)
    network.port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(fetching, "_Resolver", lambda: network.resolve)
    monkeypatch.setattr(fetching, "connect_to", network.connect)
    yield network
    server.close()


@pytest.fixture
async def client(http: Any, network: Network) -> Any:
    config = HttpConfig(http_listen=("127.0.0.1:0",), http_fetch_allow=(HOST, OTHER))
    _, client = await http(server_config={"http": config, "max_message_bytes": 1_000_000})
    return client


def requests(url: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Of each interface, a request and its field with the address."""
    part = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "What?"}
    chat = {"messages": [{"role": "user", "content": [part, text]}], "max_tokens": 8}
    seen = {"type": "input_image", "image_url": url}
    source = {"type": "url", "url": url} if is_address(url) else {"type": "base64", "data": url}
    block = {"type": "image", "source": source}
    short = {"options": {"num_predict": 8, "temperature": 0}, "stream": False}
    content = {"role": "user", "content": "What?", "images": [url]}
    settings = {"temperature": 0, "max_tokens": 8}
    return {
        "/v1/caption": ({"image_url": url, "settings": settings}, "image_url"),
        "/v1/chat/completions": ({**chat, "temperature": 0}, "messages[0].content[0].image_url"),
        "/v1/responses": (
            {"input": [{"role": "user", "content": [seen]}], "max_output_tokens": 8},
            "input[0].content[0].image_url",
        ),
        "/v1/messages": (
            {"messages": [{"role": "user", "content": [block]}], "max_tokens": 8, "top_p": 0},
            "messages[0].content[0].source",
        ),
        "/api/generate": ({"prompt": "What?", "images": [url], **short}, "images[0]"),
        "/api/chat": ({"messages": [content], **short}, "messages[0].images[0]"),
    }


def text_of(body: dict[str, Any]) -> str:
    for key in ("caption", "response", "content"):
        if key in body:
            return str(body[key])
    if "output" in body:
        return str(body["output"][0]["content"])
    message = body["message"] if "message" in body else body["choices"][0]["message"]
    return str(message["content"])


async def test_every_interface_fetches_what_it_answers_about(client, network: Network):
    fetched, sent = requests(f"https://{HOST}/a.jpg"), requests(URL)
    for path, (body, _) in fetched.items():
        if path.startswith("/api"):
            sent[path] = requests(URL.partition(",")[2])[path]
        here = await client.post(path, json=body)
        there = await client.post(path, json=sent[path][0])
        assert here.status_code == there.status_code == 200, (path, here.text, there.text)
        assert text_of(here.json()) == text_of(there.json())
    assert network.connected == [(PUBLIC, 443, HOST)] * 6
    assert b"accept-encoding: identity" in network.heads[0]
    assert b"accept: image/*, */*;q=0.5" in network.heads[0]
    assert b"authorization" not in network.heads[0].lower()


async def test_without_the_setting_addresses_are_refused(http, network: Network):
    _, client = await http()
    for path, (body, name) in requests(f"https://{HOST}/a.jpg").items():
        response = await client.post(path, json=body)
        assert response.status_code == 400 and "this server fetches none" in response.text, path
        assert name in response.text
    assert network.connected == []


async def refused(client: Any, url: str) -> str:
    for path in ("/v1/caption", "/v1/chat/completions"):
        body, name = requests(url)[path]
        response = await client.post(path, json=body)
        assert response.status_code == 400, (url, response.text)
        error = response.json()["error"]
        assert error["param"] == name, error
    return str(error["message"])


ELSEWHERE = (
    "http://evil.example/a.jpg", f"http://{HOST}.evil.example/a.jpg", f"http://evil.example/{HOST}/a.jpg",
    f"http://evil.example/?{HOST}", f"http://{HOST}:8443/a.jpg", f"http://{HOST}:0/a.jpg",
    f"http://{HOST}:99999/a.jpg", f"http://{HOST}@evil.example/a.jpg", f"http://user:word@{HOST}/a.jpg",
    f"http://{HOST}\\@evil.example/a.jpg", f"http://evil.example\\.{HOST}/a.jpg",
    f"http://{HOST}%2eevil.example/a.jpg", f"http://{HOST}./a.jpg", f"http://{HOST}\t/a.jpg",
    f"http://{HOST}/a b.jpg", f"http://{HOST}/a.jpg\r\nx-injected: 1",
    "http://imag\u00e9s.example.org/a.jpg", "http://2130706433/a.jpg", "http://0x7f000001/a.jpg",
    "http://0177.0.0.1/a.jpg", "http://127.1/a.jpg", "http://[::ffff:127.0.0.1]/a.jpg", "http://[::1/a.jpg",
    "http:///a.jpg", f"http://{HOST}/" + "a" * 5000, "https://cdn.example.net/a.jpg", "file:///etc/passwd",
)  # fmt: skip


async def test_addresses_of_other_hosts_make_no_connection(client, network: Network):
    for url in ELSEWHERE:
        await refused(client, url)
        assert network.connected == [], url


PRIVATE: tuple[list[str], ...] = (
    ["127.0.0.1"], ["10.1.2.3"], ["192.168.0.1"], ["169.254.169.254"], ["100.100.100.200"],
    ["168.63.129.16"], ["0.0.0.0"], ["224.0.0.1"], ["::1"], ["fe80::1"], ["fd00::1"], ["::ffff:10.0.0.1"],
    ["::10.0.0.1"], ["64:ff9b::a00:1"], ["2002:a00:1::1"], ["2001:0:a00:1::1"], ["not an address"],
    [PUBLIC, "10.0.0.1"], [],
)  # fmt: skip


async def test_a_listed_host_with_a_private_address_is_refused(client, network: Network):
    for found in PRIVATE:
        network.names[HOST] = [found]
        message = await refused(client, f"http://{HOST}/a.jpg")
        assert "an address that is not public" in message, found
        assert network.connected == []


async def test_the_connection_goes_to_the_address_that_was_checked(client, network: Network):
    network.names[HOST] = [[PUBLIC], ["127.0.0.1"]]
    body, _ = requests(f"http://{HOST}/a.jpg")["/v1/caption"]
    assert (await client.post("/v1/caption", json=body)).status_code == 200
    assert network.connected == [(PUBLIC, 80, HOST)]
    message = await refused(client, f"http://{HOST}/a.jpg")
    assert "not public" in message and len(network.connected) == 1


def redirect(location: str) -> bytes:
    return answer(b"", f"location: {location}", status="302 Found")


async def test_redirects_within_the_list_are_followed(client, network: Network):
    network.answers[f"{HOST}/r"] = redirect(f"https://{OTHER}/b.jpg?x=1")
    network.answers[f"{OTHER}/b.jpg?x=1"] = redirect("/c.jpg")
    network.answers[f"{OTHER}/c.jpg"] = answer(JPEG)
    body, _ = requests(f"https://{HOST}/r")["/v1/caption"]
    response = await client.post("/v1/caption", json=body)
    assert response.status_code == 200, response.text
    other = (PUBLIC, 8443, "cdn.example.net")
    assert network.connected == [(PUBLIC, 443, HOST), other, other]


REDIRECTS = (
    ("http://evil.example/a.jpg", "fetches no images"),
    ("//evil.example/a.jpg", "fetches no images"),
    ("http://127.0.0.1:50051/", "fetches no images"),
    ("http://169.254.169.254/latest/meta-data/", "fetches no images"),
    (f"http://user@{HOST}/a.jpg", "without a user name"),
    ("file:///etc/passwd", "must be an address"),
    ("gopher://evil.example/", "must be an address"),
    ("/r", "is redirected more than 3 times"),
    ("/\u00e4", "not valid"),
)


async def test_redirects_elsewhere_are_refused(client, network: Network):
    for location, part in REDIRECTS:
        network.answers[f"{HOST}/r"] = redirect(location)
        assert part in await refused(client, f"http://{HOST}/r"), location
    assert {host for _, _, host in network.connected} == {HOST}


async def test_a_redirect_to_a_private_address_or_out_of_tls_is_refused(client, network: Network):
    network.names["cdn.example.net"] = [["10.0.0.1"]]
    network.answers[f"{HOST}/r"] = redirect(f"https://{OTHER}/a.jpg")
    assert "not public" in await refused(client, f"https://{HOST}/r")
    network.answers[f"{HOST}/r"] = redirect(f"http://{HOST}/a.jpg")
    assert "from https to another scheme" in await refused(client, f"https://{HOST}/r")


CASES: dict[str, tuple[bytes, str]] = {
    "/missing": (answer(JPEG, status="404 Not Found"), "its host answers 404"),
    "/page": (answer(b"<html>" * 100, "content-type: image/jpeg"), "does not lead to an image"),
    "/short": (answer(b"\xff\xd8"), "does not lead to an image"),
    "/empty": (answer(b""), "does not lead to an image"),
    "/gzip": (answer(gzip.compress(JPEG), "content-encoding: gzip"), "is sent compressed"),
    "/large": (answer(JPEG, length=1_000_001), "leads to more than 1000000 bytes"),
    "/endless": (
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + JPEG,
        "leads to more than 1000000 bytes",
    ),
    "/endless-chunks": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"3\r\n\xff\xd8\xff\r\n" + b"1\r\nx\r\n" * 100_000,
        "is sent in more than 10000 pieces",
    ),
    "/head": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000, "RemoteProtocolError"),
    "/continue": (b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, "more than 10000 pieces"),
    "/cut": (answer(JPEG, length=len(JPEG) + 1), "RemoteProtocolError"),
    "/nothing": (b"", "RemoteProtocolError"),
    "/nonsense": (b"\0" * 100, "RemoteProtocolError"),
    "/slow": (answer(JPEG, length=500_000), "could not be fetched within 0.5 s"),
    "/slow-head": (b"HTTP/1.1 200 OK\r\nx: ", "could not be fetched within 0.5 s"),
}  # fmt: skip


async def test_what_hosts_may_answer_is_bounded(client, network: Network, monkeypatch):
    for path, (data, part) in CASES.items():
        monkeypatch.setattr(fetching, "FETCH_S", 0.5 if path.startswith("/slow") else 10.0)
        network.answers[HOST + path] = data
        assert part in await refused(client, f"http://{HOST}{path}"), path


async def test_tls_checks_the_name(authority: Authority):
    """With the real connection function, to a server of this test."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(JPEG))
        writer.close()

    pair = authority.issue(HOST, names=f"DNS:{HOST}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return [PUBLIC]

    async def connect(address: str, port_asked: int, trust: Any, host: str) -> Any:
        return await fetching.connect_to("127.0.0.1", port, trust, host)

    fetcher = ImageFetcher([HOST, "cdn.example.net"], 10**6, resolve, connect)

    async def fetch(host: str) -> bytes:
        addresses = Addresses()
        assert addresses.image(f"https://{host}/a.jpg", ("image_url",)) == b""
        assert await fetcher.fetch(addresses) == len(JPEG)
        return addresses.image(f"https://{host}/a.jpg", ("image_url",))

    with pytest.raises(InvalidRequest, match="certificate"):
        await fetch(HOST)
    fetcher.trust.load_verify_locations(authority.ca.cert)
    assert await fetch(HOST) == JPEG
    with pytest.raises(InvalidRequest, match="Hostname mismatch"):
        await fetch("cdn.example.net")
    server.close()


async def test_one_request_has_few_addresses_within_one_limit(client, network: Network):
    many = [f"http://{HOST}/a.jpg"] * 17
    response = await client.post("/api/generate", json={"prompt": "What?", "images": many})
    assert response.status_code == 400 and "images[16]" in response.text
    assert network.connected == []
    network.answers[f"{HOST}/b.jpg"] = answer(JPEG + b"x" * 600_000)
    two = [f"http://{HOST}/b.jpg"] * 2
    response = await client.post("/api/generate", json={"prompt": "What?", "images": two})
    assert response.status_code == 400 and "images[1]: leads to more than" in response.text


async def test_only_what_is_read_as_an_image_is_fetched(client, network: Network):
    url = f"http://{HOST}/a.jpg"
    body, _ = requests(URL.partition(",")[2])["/api/chat"]
    body["messages"][0]["content"] = url
    ignored = {"images": [url], "image_url": {"url": url}}
    body["context"] = body["messages"][0]["thinking"] = ignored
    response = await client.post("/api/chat", json=body)
    assert response.status_code == 200, response.text
    assert network.connected == []


async def test_a_request_is_checked_before_its_images_are_fetched(client, network: Network):
    for path, (body, _) in requests(f"http://{HOST}/a.jpg").items():
        response = await client.post(path, json={**body, "model": 3})
        assert response.status_code == 400 and "model" in response.text, path
    assert network.connected == []


def test_public_addresses():
    for public in ("93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(public), public


def test_hosts_of_the_setting():
    fetched_hosts = parser_of(settings_of(HttpConfig)["http_fetch_allow"])
    assert fetched_hosts("Images.example.org, cdn.example.net:8443") == [HOST, OTHER]
    for bad in ("localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]", "*.example.org", ""):
        with pytest.raises(ValueError, match="must be HOST or HOST:PORT"):
            fetched_hosts(bad)
    for bad in ("https://example.org", "example.org/", "a..b", "example.org:", "a.b:0"):
        with pytest.raises(ValueError, match="must be HOST or HOST:PORT"):
            fetched_hosts(bad)
