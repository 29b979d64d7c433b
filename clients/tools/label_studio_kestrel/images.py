"""TaskImages: the image of a task, from where the operator allows.

The address of an image comes from users who may import tasks, so it can name what only this machine reaches. Hosts that
are allowed must have public addresses; the address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpcore2

from kestrel_client.images.base64_images import decoded_image, is_data_url

from .labelling import RequestRefused

MAX_BYTES = 32 * 1024 * 1024
FETCH_S = 30.0
_MOST_REDIRECTS = 3
_VISIBLE = re.compile(r"[!-~]{1,8192}")
_OWN_PATHS = ("/data/", "/storage-data/", "/tasks/")
"""Where Label Studio keeps images. Other paths, such as those of its interface, are not for its token."""


def origin(url: str) -> str:
    """The origin of Label Studio's address. Raises ArgumentTypeError."""
    parts = urlsplit(url.strip().lower())
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ArgumentTypeError(f"{url}: must be an address like http://localhost:8080")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ArgumentTypeError(f"{url}: must have no path")
    return f"{parts.scheme}://{parts.netloc}"


_TO_IPV4 = [ipaddress.ip_network(each) for each in ("64:ff9b::/96", "2001::/32", "2002::/16")]
"""IPv6 addresses that lead to an address of IPv4, which may be any."""


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return address.is_global and not any(address in each for each in _TO_IPV4)


class _PublicHosts(httpcore2.AnyIOBackend):
    """Connects to public addresses only, and to ``trusted``, which is a host."""

    def __init__(self, trusted: str | None) -> None:
        super().__init__()
        self._trusted = trusted

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if host != self._trusted:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [str(entry[4][0]) for entry in found]
            if not all(map(_is_public, addresses)):
                raise httpcore2.ConnectError(f"{host} has an address that is not public")
            host = addresses[0]
        return await super().connect_tcp(host, port, *args, **kwargs)


class TaskImages:
    """A context manager. ``hosts``: from which addresses are fetched. ``label_studio``: the origin of Label Studio, for
    images that were uploaded to it; None for none. ``token``: Label Studio's, which only it gets. ``allow_data``:
    whether data URLs are taken."""

    def __init__(
        self, hosts: Sequence[str], label_studio: str | None, token: str | None, allow_data: bool
    ) -> None:
        self._hosts, self._origin = {host.lower() for host in hosts}, label_studio
        self._headers = [("authorization", f"Token {token}")] if token else []
        self._allow_data = allow_data
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
        if is_data_url(value):
            return self._decoded(value, name)
        if self._origin is not None and value.startswith(self._origin + "/"):
            value = value.removeprefix(self._origin)
        if value.startswith("/"):
            value = self._of_label_studio(value, name)
        elif not value.lower().startswith(("http://", "https://")):
            raise RequestRefused(
                f"{name}: {value[:80]!r} is neither an address (https://…) nor a path of Label Studio (/data/…); "
                "let the storage give addresses (pre-signed URLs)"
            )
        try:
            async with asyncio.timeout(FETCH_S):
                return await self._fetched(value, name)
        except TimeoutError:
            raise RequestRefused(f"{name}: no image came within {FETCH_S:g} s") from None
        except (OSError, ValueError, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise RequestRefused(f"{name}: cannot be fetched: {error}") from None

    def _of_label_studio(self, path: str, name: str) -> str:
        if self._origin is None:
            raise RequestRefused(
                f"{name}: {path[:80]!r} is a path of Label Studio; start the bridge with --label-studio URL"
            )
        # Only the path counts: without what follows it, and before a server decodes a second ? into it.
        plain = unquote(unquote(re.split("[?#]", path, maxsplit=1)[0]))
        if not plain.startswith(_OWN_PATHS) or "\\" in plain or ".." in plain.split("/"):
            raise RequestRefused(
                f"{name}: {path[:80]!r} is no image of Label Studio; its paths begin with {', '.join(_OWN_PATHS)}"
            )
        return self._origin + path

    async def _fetched(self, url: str, name: str) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            headers = self._headers_for(url, name)
            async with self._pool.stream("GET", url, headers=headers) as response:
                location = dict(response.headers).get(b"location")
                if 300 <= response.status < 400 and location is not None:
                    following = urljoin(url, location.decode())
                    if url.startswith("https:") and not following.startswith("https:"):
                        raise RequestRefused(f"{name}: leads from https to another scheme")
                    url = following
                    continue
                if response.status != 200:
                    raise RequestRefused(f"{name}: the host answered with {response.status}")
                data = bytearray()
                async for piece in response.aiter_stream():
                    data += piece
                    if len(data) > MAX_BYTES:
                        raise RequestRefused(
                            f"{name}: has more bytes than the limit of {MAX_BYTES}"
                        )
                return bytes(data)
        raise RequestRefused(f"{name}: leads on more than {_MOST_REDIRECTS} times")

    def _headers_for(self, url: str, name: str) -> list[tuple[str, str]]:
        """The headers of a request, if the address may be asked. Raises RequestRefused."""
        parts = urlsplit(url)
        if not _VISIBLE.fullmatch(url) or parts.scheme not in ("http", "https"):
            raise RequestRefused(f"{name}: must be an address like https://HOST/PATH, in ASCII")
        if "@" in parts.netloc:
            raise RequestRefused(f"{name}: must be an address without a user name")
        if self._origin is not None and url.startswith(self._origin + "/"):
            return self._headers
        if not {parts.netloc.lower(), (parts.hostname or "")} & self._hosts:
            raise RequestRefused(
                f"{name}: the host {parts.netloc[:80]!r} is not allowed; the bridge's operator may allow it "
                "(--fetch-allow)"
            )
        return []

    def _decoded(self, url: str, name: str) -> bytes:
        if not self._allow_data:
            raise RequestRefused(
                f"{name}: is a data URL; start the bridge with --allow-data-urls to take them"
            )
        try:
            return decoded_image(url)
        except ValueError as error:
            raise RequestRefused(f"{name}: {error}") from None
