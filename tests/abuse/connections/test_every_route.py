"""Attacks on every route of the HTTP port, which the port itself lists: a new route is attacked without being named."""

from __future__ import annotations

import gzip
import re
from typing import Any

import pytest

from kestrel_grpc.settings.batches import BatchesConfig
from kestrel_grpc.settings.security import SecurityConfig
from tests.http.conftest import http, serve
from tests.http.test_rude_http import closed, connect

__all__ = ["http", "serve"]

OPEN = {"/", "/healthz", "/health", "/api/version", "/openapi.json"}
"""What strangers may read, beside the files of the page."""
DEEP = b'{"a":' * 50_000
BOMB = gzip.compress(bytes(50_000_000))
BODIES = {
    "nothing": b"",
    "deep": DEEP,
    "many": b"[" + b"[]," * 30_000 + b"0]",
    "no text": b'{"model": "\xff\xfe\x00"}',
    "large numbers": b'{"max_tokens": 1e999, "temperature": -1e999, "n": ' + b"9" * 5000 + b"}",
    "names twice": b'{"model": "a", "model": ["b"], ' + b'"stream": 7, ' * 2000 + b'"n": []}',
    "wrong types": b'{"model": {}, "messages": 5, "input": [[]], "prompt": {}, "images": "", "stream": []}',
    "envelopes": b"\x02\xff\xff\xff\xff" * 100,
    "a bomb": BOMB,
    "a bomb in an envelope": b"\x01" + len(BOMB).to_bytes(4) + BOMB,
}
GZIP = b"content-encoding: gzip\r\nconnect-content-encoding: gzip\r\ngrpc-encoding: gzip\r\n"
HEADS = {
    "two lengths": b"transfer-encoding: chunked\r\ncontent-length: 2\r\n",
    "endless": b"content-length: 999999999999\r\n",
    "half": b"content-length: 100\r\n",
    "endless chunks": b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n",
}
"""What announces a body of which two bytes come."""


def routes(app: Any) -> list[tuple[bytes, str, bytes]]:
    """A verb, a path and a type of the body for each endpoint of the port."""
    while not hasattr(app, "routes"):
        app = app._app
    found = []
    for route in app.routes:
        known = getattr(route.app, "_endpoints", {})
        for verb in route.methods - {"HEAD"}:
            types = [kind for each in known.get(verb, ()) for kind in each.types]
            found += [(verb.encode(), route.path, kind) for kind in types or [b""]]
    return found


def requests(verb: bytes, path: str, kind: bytes) -> list[tuple[str, bytes]]:
    """The attacks on one route, by name."""
    odd = re.sub("{[^}]*}", "%00%ff..%2f", path).encode()

    def head(target: bytes, more: bytes = b"") -> bytes:
        typed = b"content-type: %b\r\n" % kind if kind else b""
        return b"%b %b HTTP/1.1\r\nhost: localhost\r\n%b%b" % (verb, target, typed, more)

    def whole(body: bytes, target: bytes = odd, more: bytes = b"") -> bytes:
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        return head(target, more) + length + body

    made = [(name, whole(body)) for name, body in BODIES.items()]
    made += [(f"{name}, gzip", whole(body, more=GZIP)) for name, body in BODIES.items()]
    made += [(name, head(odd, more) + b"\r\n{}") for name, more in HEADS.items()]
    separators = b'; a="' + b";" * 20_000 + b"\r\n"
    return [
        *made,
        ("long type", whole(b"").replace(b"\r\n", b"\r\ncontent-type: %b" % kind + separators, 1)),
        ("long name", whole(b"{}", odd.replace(b"%00", b"a" * 3000))),
        ("query", whole(b"", odd + b"?limit=000000001" + b"0" * 5000 + b"&after=%ff" * 200)),
        ("other verb", whole(b"{}").replace(verb, b"BREW", 1)),
    ]


async def answered(served: Any, request: bytes, *, ends: bool = False) -> bytes:
    """What the server says to a request until it closes the connection, without "100 Continue". ``ends``: whether the
    client ends its side after the request."""
    reader, writer = await connect(served)
    writer.write(request)
    if ends:
        writer.write_eof()
    said = await closed(reader)
    writer.close()
    return said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


PARTS = 16
SLOW = [pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS)]


@pytest.mark.parametrize("part", [0, *SLOW])
async def test_each_attack_on_each_route_ends_in_one_status(http, tmp_path, caplog, part):
    batches = BatchesConfig(path=str(tmp_path / "batches.db"))
    served, client = await http(server_config={"batches": batches})
    tried = routes(served.server._opened.http._app)
    assert len({path for _, path, _ in tried}) > 80
    for verb, path, kind in tried[part::PARTS]:
        for name, request in requests(verb, path, kind):
            said = await answered(served, request, ends=name in HEADS)
            place = (verb, path, kind, name, said[:300])
            # A client that ends the connection within a request may get no answer.
            assert said.count(b"HTTP/1.1 ") == 1 or (not said and name in HEADS), place
            assert said[9:12] in b"200 307 400 404 405 408 413 414 415 429 501 ", place
        assert served.server.guard.held_bytes == served.engine.num_requests == 0, path
    assert (await client.get("/healthz")).status_code == 200
    assert [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == []


async def test_a_stranger_gets_401_from_each_route(http, tmp_path):
    batches = BatchesConfig(path=str(tmp_path / "batches.db"))
    config = {"batches": batches, "security": SecurityConfig(api_key="k" * 40)}
    served, _ = await http(server_config=config)
    for verb, path, _ in routes(served.server._opened.http._app):
        if path not in OPEN and not path.startswith("/page/"):
            request = b"%b %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999\r\n\r\n{"
            said = await answered(served, request % (verb, re.sub("{[^}]*}", "x", path).encode()))
            assert said.count(b"HTTP/1.1 ") == 1, path
            assert said.startswith(b"HTTP/1.1 401 ") or b'"code":"unauthenticated"' in said, path
    assert served.server.guard.held_bytes == 0
