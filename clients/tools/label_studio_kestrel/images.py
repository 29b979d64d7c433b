"""TaskImages: the image of a task, from where the operator allows.

The address of an image comes from users who may import tasks, so it can name what only this machine reaches. Hosts that
are allowed must have public addresses; the address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpcore2

from kestrel_client.images.base64_images import decoded_image, is_data_url

from .labelling import RequestRefused

MAX_BYTES = 32 * 1024 * 1024
FETCH_S = 30.0
_MOST_REDIRECTS = 3
_ADDRESS = re.compile("https?://[!-~]{1,8192}", re.IGNORECASE)
_OWN_PATHS = ("/data/", "/storage-data/", "/tasks/")
"""Where Label Studio keeps images. Other paths, such as those of its interface, are not for its token."""
_TO_IPV4 = [ipaddress.ip_network(each) for each in ("64:ff9b::/96", "2001::/32", "2002::/16")]
"""IPv6 addresses that lead to an address of IPv4, which may be any."""


def origin(url: str) -> str:
    """The origin of Label Studio's address. Raises ValueError."""
    parts = urlsplit(url.strip().lower())
    if not _ADDRESS.fullmatch(url.strip()) or "@" in url or parts.path.strip("/") or parts.query:
        raise ValueError("must be an address like http://localhost:8080, without a path")
    return f"{parts.scheme}://{parts.netloc}"


class _PublicHosts(httpcore2.AnyIOBackend):
    """Connects to public addresses only, and to ``trusted``, which is a host."""

    def __init__(self, trusted: str | None) -> None:
        super().__init__()
        self._trusted = trusted

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if host != self._trusted:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
            for each in addresses:
                if not each.is_global or any(each in network for network in _TO_IPV4):
                    raise httpcore2.ConnectError(f"{host} has an address that is not public")
            host = str(addresses[0])
        return await super().connect_tcp(host, port, *args, **kwargs)


class TaskImages:
    """A context manager. ``hosts``: from which addresses are fetched. ``label_studio``: the origin of Label Studio, for
    images that were uploaded to it; None for none. ``token``: Label Studio's, which only it gets."""

    def __init__(self, hosts: Sequence[str], label_studio: str | None, token: str | None) -> None:
        self._hosts, self._origin = {host.lower() for host in hosts}, label_studio
        self._headers = [("authorization", f"Token {token}")] if token else []
        trusted = urlsplit(label_studio).hostname if label_studio else None
        self._pool = httpcore2.AsyncConnectionPool(network_backend=_PublicHosts(trusted))

    async def __aenter__(self) -> TaskImages:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()

    async def read(self, value: object, name: str) -> bytes:
        """Returns the image's bytes. ``name``: of its field, for errors. Raises RequestRefused."""
        if not isinstance(value, str) or not value:
            raise RequestRefused(f"{name}: must be the address of an image")
        if value.startswith("/") and self._origin is not None:
            value = self._origin + value
        try:
            if is_data_url(value):
                return decoded_image(value)
            async with asyncio.timeout(FETCH_S):
                return await self._fetched(value)
        except TimeoutError:
            raise RequestRefused(f"{name}: no image came within {FETCH_S:g} s") from None
        except (OSError, ValueError, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise RequestRefused(f"{name}: {error}") from None

    async def _fetched(self, url: str) -> bytes:
        """Raises ValueError."""
        for _ in range(_MOST_REDIRECTS + 1):
            async with self._pool.stream("GET", url, headers=self._headers_for(url)) as response:
                location = {name.lower(): text for name, text in response.headers}.get(b"location")
                if 300 <= response.status < 400 and location is not None:
                    following = urljoin(url, location.decode())
                    if url.startswith("https:") and not following.startswith("https:"):
                        raise ValueError("it leads from https to another scheme")
                    url = following
                    continue
                if response.status != 200:
                    raise ValueError(f"the host answered with {response.status}")
                data = bytearray()
                async for piece in response.aiter_stream():
                    data += piece
                    if len(data) > MAX_BYTES:
                        raise ValueError(f"it has more bytes than the limit of {MAX_BYTES}")
                return bytes(data)
        raise ValueError(f"it leads on more than {_MOST_REDIRECTS} times")

    def _headers_for(self, url: str) -> list[tuple[str, str]]:
        """The headers of a request, if the address may be asked. Raises ValueError."""
        parts = urlsplit(url)
        if self._origin is not None and url.startswith(self._origin + "/"):
            # Only the path counts: without what follows it, and before a server decodes a second ? into it.
            plain = unquote(unquote(parts.path))
            if plain.startswith(_OWN_PATHS) and "\\" not in plain and ".." not in plain.split("/"):
                return self._headers
            raise ValueError(f"Label Studio's images have paths like {', '.join(_OWN_PATHS)}")
        if url.startswith("/"):
            raise ValueError(
                "it is a path of Label Studio; start the bridge with --label-studio URL"
            )
        if not _ADDRESS.fullmatch(url) or "@" in parts.netloc:
            raise ValueError(
                "it is not an address like https://HOST/PATH; let the storage pre-sign URLs"
            )
        if not {parts.netloc.lower(), parts.hostname or ""} & self._hosts:
            raise ValueError(
                f"the bridge's operator must allow the host (--fetch-allow {parts.netloc[:80]})"
            )
        return []
