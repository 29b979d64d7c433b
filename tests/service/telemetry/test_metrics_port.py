"""The port of --metrics-listen: its readers, its TLS, and strangers who try to block it."""

import asyncio
import resource
import socket
import ssl
import threading
import urllib.error
import urllib.request

import pytest

from kestrel_engine import clock
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.security.metrics_door import MetricsDoor
from kestrel_grpc.settings.addresses import AddressError
from kestrel_grpc.settings.security import SecurityConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig
from kestrel_grpc.telemetry import metrics_port
from tests.service.certificates import make_authority

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
        with urllib.request.urlopen(request, timeout=60, context=context) as response:
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
    for security in ({}, {"auth_tokens": tokens, "open_services": ("metrics",)}):
        status, _, _ = await asyncio.to_thread(get, f"http://{await served(**security)}/metrics")
        assert status == 200


async def test_a_page_of_another_site_cannot_take_its_name_to_loopback(served, tokens):
    def status(url, host, **headers):
        request = urllib.request.Request(url, headers={"Host": host, **headers})
        try:
            return urllib.request.urlopen(request, timeout=60).status
        except urllib.error.HTTPError as error:
            return error.code

    url = f"http://{await served()}/metrics"
    for host, wanted in (("evil.example", 421), ("localhost:9464", 200), ("127.0.0.1", 200)):
        assert await asyncio.to_thread(status, url, host) == wanted
    url = f"http://{await served(auth_tokens=tokens)}/metrics"
    known = {"Authorization": f"Bearer {TOKENS[Scope.METRICS]}"}
    assert await asyncio.to_thread(status, url, "any.example", **known) == 200


async def test_without_a_free_descriptor_the_port_waits_before_it_tries_again(served):
    address = await served()
    host, port = address.split(":")
    paused, goes_on = threading.Event(), threading.Event()

    def sleep(seconds):
        paused.set()
        assert goes_on.wait(60)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with clock.installed(sleep=sleep), socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            client.connect((host, int(port)))
            assert paused.wait(60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            goes_on.set()
    status, _, _ = await asyncio.to_thread(get, f"http://{address}/metrics")
    assert status == 200


def ask(url, method):
    """(status, body, Allow)"""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read(), response.headers.get("Allow", "")
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers.get("Allow", "")


async def test_it_answers_its_path_and_two_methods_only(served, tokens):
    base = f"http://{await served()}"
    for path in ("", "/", "/favicon.ico", "/metrics/", "/metrics/x", "/Metrics", "/.%2e/metrics"):
        status, body, _ = await asyncio.to_thread(ask, base + path, "GET")
        assert (status, body) == (404, b"not found; metrics are at /metrics\n"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"):
        status, body, allow = await asyncio.to_thread(ask, f"{base}/metrics", method)
        assert (status, allow) == (405, "GET, HEAD"), method
    assert await asyncio.to_thread(ask, f"{base}/metrics", "HEAD") == (200, b"", "")
    status, body, _ = await asyncio.to_thread(ask, f"{base}/metrics?debug=1", "GET")
    assert status == 200 and b"kestrel_ready 1.0" in body
    closed = f"http://{await served(auth_tokens=tokens)}"
    for path, method in (("/", "GET"), ("/metrics", "POST"), ("/metrics", "HEAD")):
        status, _, _ = await asyncio.to_thread(ask, closed + path, method)
        assert status == 401, "strangers learn no more"


async def test_tls_with_the_servers_certificate_and_its_renewal(served, tmp_path):
    authority = make_authority(tmp_path)
    pair, renewed = authority.issue("localhost"), authority.issue("localhost")
    files = pair.tls()
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
    plainly = await served(tls=files, metrics_tls="off")
    status, _, _ = await asyncio.to_thread(get, f"http://{plainly}/metrics")
    assert status == 200


def mutual(authority, pair, **fields):
    return {"tls": pair.tls(**fields), "metrics_tls": str(authority.ca.cert)}


def as_client(authority, pair=None):
    trust = ssl.create_default_context(cafile=str(authority.ca.cert))
    if pair is not None:
        trust.load_cert_chain(pair.cert, pair.key)
    return trust


async def test_a_scrapers_certificate_says_who_it_is(served, tmp_path):
    ours, theirs = make_authority(tmp_path), make_authority(folder(tmp_path, "theirs"))
    files = tmp_path / "tokens"
    lines = [
        line_of("prometheus", [Scope.METRICS], "t" * 20).rpartition(" ")[0] + " cert:prometheus",
        line_of("spiffe", [Scope.METRICS], "t" * 20).rpartition(" ")[0] + " cert:spiffe://a/prom",
        line_of("camera", [Scope.INFER], TOKENS[Scope.INFER]).rpartition(" ")[0] + " cert:camera",
        line_of("both", [Scope.METRICS], TOKENS[Scope.METRICS]),
    ]
    files.write_text("\n".join(lines))
    security = mutual(ours, ours.issue("localhost"))
    url = f"https://{await served(**security, auth_tokens=str(files))}/metrics"

    async def ask(name, authority=ours, token=None, names="DNS:a.b"):
        pair = None if name is None else authority.issue(name, names=names)
        context = as_client(ours, pair)
        status, text, _ = await asyncio.to_thread(get, url, token, context)
        return status, text

    assert (await ask("prometheus"))[0] == 200
    assert (await ask("anything", names="DNS:a.b,URI:spiffe://a/prom"))[0] == 200
    status, text = await ask("anything", names="URI:spiffe://a/prom,URI:spiffe://a/b")
    assert status == 401 and "the certificate 'anything' is not in the file of tokens" in text
    assert (await ask("camera"))[0] == 403
    assert (await ask("camera", token=TOKENS[Scope.METRICS]))[0] == 200, "the token counts"
    for nobody in (ask(None), ask("prometheus", theirs)):
        with pytest.raises((OSError, urllib.error.URLError)):
            await nobody


async def test_where_nobody_has_a_token_a_certificate_is_enough(served, tmp_path):
    authority = make_authority(tmp_path)
    security = mutual(authority, authority.issue("localhost"))
    for more in ({}, {"auth_tokens": str(tmp_path / "tokens"), "open_services": ("metrics",)}):
        (tmp_path / "tokens").write_text("")
        url = f"https://{await served(**security, **more)}/metrics"
        context = as_client(authority, authority.issue("any"))
        assert (await asyncio.to_thread(get, url, None, context))[0] == 200


async def test_scrapers_authorities_are_taken_anew(served, tmp_path):
    old, new = make_authority(folder(tmp_path, "old")), make_authority(folder(tmp_path, "new"))
    ca = tmp_path / "scrapers.pem"
    ca.write_bytes(old.ca.cert.read_bytes())
    security = {**mutual(old, old.issue("localhost")), "metrics_tls": str(ca)}
    url = f"https://{await served(**security)}/metrics"

    async def ask(authority):
        context = as_client(old, authority.issue("prometheus"))
        return (await asyncio.to_thread(get, url, None, context))[0]

    assert await ask(old) == 200
    with pytest.raises((OSError, urllib.error.URLError)):
        await ask(new)
    ca.write_text("half of")
    assert await ask(old) == 200
    ca.write_bytes(new.ca.cert.read_bytes())
    assert await ask(new) == 200
    with pytest.raises((OSError, urllib.error.URLError)):
        await ask(old)


def folder(tmp_path, name):
    made = tmp_path / name
    made.mkdir()
    return made


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_connections_that_say_nothing_hold_nobody_up(served, tmp_path, monkeypatch, scheme):
    monkeypatch.setattr(metrics_port, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(metrics_port.Handler, "timeout", 0.5)
    pair = make_authority(tmp_path).issue("localhost")
    files = pair.tls()
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
    tls = pair.tls()
    for security in (
        SecurityConfig(),
        SecurityConfig(tls=tls),
        SecurityConfig(auth_tokens=tokens),
        SecurityConfig(tls=tls, auth_tokens=tokens, open_services=("metrics",)),
        SecurityConfig(tls=tls, auth_tokens=tokens, metrics_tls="off"),
    ):
        with pytest.raises(AddressError, match="--insecure-listen allows it"):
            MetricsDoor(address, security)
    assert MetricsDoor(address, SecurityConfig(tls=tls, auth_tokens=tokens)).talks_tls
    scrapers = str(pair.cert)
    for more in ({}, {"auth_tokens": tokens, "open_services": ("metrics",)}):
        door = MetricsDoor(address, SecurityConfig(tls=tls, metrics_tls=scrapers, **more))
        assert door.talks_tls
    assert MetricsDoor(address, SecurityConfig(insecure_listen=True)).refusal(None) is None
