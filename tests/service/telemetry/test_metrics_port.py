"""The port of --metrics-listen: who may read it, over what, and that strangers can't hold it up."""

import asyncio
import socket
import ssl
import urllib.error
import urllib.request

import pytest

from kestrel_grpc.addresses import AddressError
from kestrel_grpc.security.config import SecurityConfig, TlsFiles
from kestrel_grpc.security.metrics_door import MetricsDoor
from kestrel_grpc.security.principal import Scope
from kestrel_grpc.security.tokens import line_of, new_token
from kestrel_grpc.telemetry import metrics_port
from kestrel_grpc.telemetry.config import TelemetryConfig
from tests.service.security.conftest import make_authority

TOKENS = {scope: new_token() for scope in Scope}


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("\n".join(line_of(s.value, [s], token) for s, token in TOKENS.items()))
    return str(path)


@pytest.fixture
def served(serve):
    async def start(**security):
        config = {
            "security": SecurityConfig(**security),
            "telemetry": TelemetryConfig(prometheus="127.0.0.1:0"),
        }
        return (await serve(server_config=config)).server.telemetry.metrics_address

    return start


def get(url, token=None, context=None):
    """(status, body, challenge)"""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=5, context=context) as response:
            return response.status, response.read().decode(), ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers.get("WWW-Authenticate", "")


async def test_where_callers_have_tokens_scrapers_need_one(served, tokens):
    url = f"http://{await served(auth_tokens=tokens)}/metrics"
    status, text, challenge = await asyncio.to_thread(get, url)
    assert (status, challenge) == (401, "Bearer") and "needs a token" in text
    status, _, _ = await asyncio.to_thread(get, url, "wrong")
    assert status == 401
    for scope in Scope:
        status, text, _ = await asyncio.to_thread(get, url, TOKENS[scope])
        if scope in (Scope.METRICS, Scope.ADMIN):
            assert status == 200 and "kestrel_ready 1.0" in text
        else:
            assert status == 403 and "lacks the scope metrics or admin" in text


async def test_they_need_none_where_callers_have_none_or_they_may_do_without(served, tokens):
    for security in ({}, {"auth_tokens": tokens, "open_metrics": True}):
        status, _, _ = await asyncio.to_thread(get, f"http://{await served(**security)}/metrics")
        assert status == 200


async def test_tls_with_the_servers_certificate_and_its_renewal(served, tmp_path):
    authority = make_authority(tmp_path)
    pair, renewed = authority.issue("localhost"), authority.issue("localhost")
    files = TlsFiles(certificate=str(pair.cert), private_key=str(pair.key))
    address = await served(tls=files)
    trust = ssl.create_default_context(cafile=str(authority.ca.cert))
    status, _, _ = await asyncio.to_thread(get, f"https://{address}/metrics", None, trust)
    assert status == 200

    def shown():
        host, port = address.split(":")
        with (
            socket.create_connection((host, int(port)), 5) as plain,
            trust.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            return secure.getpeercert()["serialNumber"]

    before = await asyncio.to_thread(shown)
    pair.cert.write_bytes(
        renewed.cert.read_bytes()
    )  # Half of a renewal: the old one keeps serving.
    assert await asyncio.to_thread(shown) == before
    pair.key.write_bytes(renewed.key.read_bytes())
    assert await asyncio.to_thread(shown) != before
    plainly = await served(tls=files, metrics_tls=False)
    status, _, _ = await asyncio.to_thread(get, f"http://{plainly}/metrics")
    assert status == 200


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_connections_that_say_nothing_hold_nobody_up(served, tmp_path, monkeypatch, scheme):
    monkeypatch.setattr(metrics_port, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(metrics_port._Handler, "timeout", 0.5)
    pair = make_authority(tmp_path).issue("localhost")
    files = TlsFiles(certificate=str(pair.cert), private_key=str(pair.key))
    address = await served(tls=files if scheme == "https" else None)
    host, port = address.split(":")
    mute = [socket.create_connection((host, int(port)), 5) for _ in range(30)]
    for connection in mute:  # Those beyond 16 are closed at once, the others soon.
        assert await asyncio.to_thread(connection.recv, 1) == b""
        connection.close()
    trust = ssl._create_unverified_context()
    status, _, _ = await asyncio.to_thread(get, f"{scheme}://{address}/metrics", None, trust)
    assert status == 200


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "example.org:1"])
def test_beyond_loopback_it_needs_both_or_an_explicit_word(address, tokens, tmp_path):
    pair = make_authority(tmp_path).issue("localhost")
    tls = TlsFiles(certificate=str(pair.cert), private_key=str(pair.key))
    for security in (
        SecurityConfig(),
        SecurityConfig(tls=tls),
        SecurityConfig(auth_tokens=tokens),
        SecurityConfig(tls=tls, auth_tokens=tokens, open_metrics=True),
        SecurityConfig(tls=tls, auth_tokens=tokens, metrics_tls=False),
    ):
        with pytest.raises(AddressError, match="--insecure-listen does it all the same"):
            MetricsDoor(address, security)
    assert MetricsDoor(address, SecurityConfig(tls=tls, auth_tokens=tokens)).talks_tls
    assert MetricsDoor(address, SecurityConfig(insecure_listen=True)).refusal(None) is None
