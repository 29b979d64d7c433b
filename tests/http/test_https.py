"""TLS on the HTTP port: the server's certificate and its renewal, clients' certificates, and silent handshakes."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kestrel_grpc.http.port import listener
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.settings.security import ConnectionLimits, SecurityConfig
from tests.http.test_rude_http import HEAD, closed, connect
from tests.service.certificates import Authority, Pair, authority, make_authority, server_pair

__all__ = ["authority", "server_pair"]

ASKED = {"question": "Why?", "settings": {"max_tokens": 2}}
Ask = Callable[..., Any]


def trust(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca.cert))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


@pytest.fixture
async def ask(http: Any) -> AsyncIterator[Ask]:
    """Starts a server with ``security``; gives a function that asks it with a context of TLS, and the server."""

    async def start(security: SecurityConfig, **config: Any) -> Any:
        served, _ = await http(server_config={"security": security, **config})
        base = f"https://{served.server.http_addresses[0]}"

        async def ask(
            context: ssl.SSLContext, token: str | None = None, path: str = "/v1/query"
        ) -> httpx2.Response:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            async with httpx2.AsyncClient(base_url=base, verify=context) as client:
                if path == "/v1/query":
                    return await client.post(path, json=ASKED, headers=headers)
                return await client.get(path, headers=headers)

        return served, ask

    yield start


async def test_the_certificate_is_renewed_without_a_restart(ask, authority, tmp_path: Path):
    pair, renewed = authority.issue("localhost"), authority.issue("localhost")
    served, get = await ask(SecurityConfig(tls=pair.tls()))
    assert (await get(trust(authority))).status_code == 200

    async def serial() -> str:
        host, _, port = served.server.http_addresses[0].rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=trust(authority))
        shown = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return str(shown)

    before = await serial()
    pair.cert.write_bytes(renewed.cert.read_bytes())
    assert await serial() == before, "half of a renewal changes nothing"
    pair.key.write_bytes(renewed.key.read_bytes())
    assert await serial() != before


async def test_a_certificate_identifies_its_caller(ask, authority, server_pair, tmp_path: Path):
    token = new_token()
    lines = [
        line_of("camera", [Scope.INFER], "t" * 20).rpartition(" ")[0] + " cert:camera",
        line_of("prometheus", [Scope.METRICS], "t" * 20).rpartition(" ")[0] + " cert:prometheus",
        line_of("both", [Scope.INFER, Scope.METRICS], token),
    ]
    tokens = tmp_path / "tokens"
    tokens.write_text("\n".join(lines))
    tls = server_pair.tls(client_ca=authority.ca.cert)
    _, get = await ask(SecurityConfig(tls=tls, auth_tokens=str(tokens)))
    camera, prometheus, other = (
        trust(authority, authority.issue(name)) for name in ("camera", "prometheus", "other")
    )
    assert (await get(camera)).status_code == 200
    assert (await get(camera, path="/metrics")).status_code == 403
    assert (await get(prometheus)).status_code == 403
    assert (await get(prometheus, path="/metrics")).status_code == 200
    unknown = await get(other)
    assert unknown.status_code == 401 and "'other'" in unknown.json()["error"]["message"]
    assert (await get(other, token)).status_code == 200, "the token counts"
    stranger = make_authority(tmp_path)
    for context in (trust(authority), trust(authority, stranger.issue("camera"))):
        with pytest.raises(httpx2.TransportError):
            await get(context)


async def test_without_tokens_a_certificate_is_enough(ask, authority, server_pair):
    _, get = await ask(SecurityConfig(tls=server_pair.tls(client_ca=authority.ca.cert)))
    context = trust(authority, authority.issue("camera"))
    for path in ("/v1/query", "/metrics"):
        assert (await get(context, path=path)).status_code == 200
    with pytest.raises(httpx2.TransportError):
        await get(trust(authority))


async def test_connections_without_a_handshake_count_and_are_closed(
    ask, authority, server_pair, monkeypatch
):
    monkeypatch.setattr(listener, "_HEAD_S", 0.5)
    limits = ConnectionLimits(connections=3)
    served, get = await ask(SecurityConfig(tls=server_pair.tls(), connections=limits))
    silent = [await connect(served) for _ in range(3)]
    reader, writer = await connect(served)
    async with asyncio.timeout(60):
        assert await closed(reader) == b"", "beyond the limit"
    writer.close()
    for reader, writer in silent:
        assert await closed(reader) == b""
        writer.close()
    reader, writer = await connect(served)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await closed(reader)
    writer.close()
    assert (await get(trust(authority))).status_code == 200


async def test_a_handshake_in_pieces_whose_last_one_brings_the_request(ask, authority, server_pair):
    served, _ = await ask(SecurityConfig(tls=server_pair.tls()))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trust(authority).wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await connect(served)

    async def until_read(step: Callable[[], Any], piece: int = 1 << 20) -> Any:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                return step()
            data = outgoing.read()
            for place in range(0, len(data), piece):
                writer.write(data[place : place + piece])
                await writer.drain()
            received = await reader.read(65536)
            assert received, "the server has ended the connection"
            incoming.write(received)

    await until_read(tls.do_handshake, 100)
    body = json.dumps(ASKED).encode() + b" " * 300_000
    tls.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert (await until_read(lambda: tls.read(65536))).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_the_end_of_the_server_ends_handshakes(ask, authority, server_pair, caplog):
    served, get = await ask(SecurityConfig(tls=server_pair.tls()))
    reader, writer = await connect(served)
    assert (await get(trust(authority))).status_code == 200, "it is accepted after the silent one"
    await served.server.stop(grace_s=0)
    assert await closed(reader) == b""
    assert "graceful shutdown exceeded" not in caplog.text, "no time passes until they end"
    writer.close()
