"""A real server on real sockets, for gRPC and HTTP, with the fake runtime behind the real engine."""

import asyncio
import base64
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from typing import Any

import httpx2
import pytest
from PIL import Image

from kestrel_grpc.settings.http import HttpConfig
from tests.service.conftest import Serve, Served, serve

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]

__all__ = ["Served", "serve"]

OF_SOCKETS = ("test_framing.py", "test_https.py", "test_rude_http.py")


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """What a connection does depends on the event loop: ``make test-slow`` tries the one of ``serve`` too."""
    loops: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in OF_SOCKETS and uvloop is not None:
        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest.hookimpl(tryfirst=True)  # As of tests/conftest.py.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "[uvloop" in item.name:
            item.add_marker("slow")


NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of http:// addresses: to load the authorities that others trust takes 30 ms for each client."""


def data_url(width: int = 60, height: int = 40, kind: str = "JPEG") -> str:
    """A grey image as a data URL."""
    file = BytesIO()
    Image.new("RGB", (width, height), (200, 200, 200)).save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


async def question_with_stop(ask: Callable[[str], Awaitable[str]]) -> tuple[str, str, str]:
    """A question, its answer and a stop string within the answer. ``ask`` gives the answer to a question.

    The fake runtime's answers are random bytes, so most have few whole characters."""
    for number in range(50):
        text = await ask(question := f"What {number}?")
        found = re.search("[^\ufffd]{2}", text[1:-2])
        if found is not None:
            return question, text, found[0]
    raise AssertionError("no answer has two whole characters")


@pytest.fixture
async def http(serve: Serve) -> AsyncIterator[Any]:
    """Starts a server with an HTTP port; gives it and a client of that port."""
    clients: list[httpx2.AsyncClient] = []

    async def start(*, server_config: dict[str, Any] | None = None, **options: Any) -> Any:
        config = {"http": HttpConfig(http_listen=("127.0.0.1:0",)), **(server_config or {})}
        served = await serve(server_config=config, **options)
        client = httpx2.AsyncClient(
            base_url=f"http://{served.server.http_addresses[0]}", timeout=60, verify=NO_AUTHORITIES
        )
        clients.append(client)
        return served, client

    yield start
    for client in clients:
        await client.aclose()
