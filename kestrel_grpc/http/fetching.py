"""ImageFetcher: fetches the images that requests name by address, from the hosts of --http-fetch-allow only.

Addresses in requests can make a server attack its own network (server-side request forgery). So each address, of a
request or of a redirect, is checked in full: its host is on the list, all IP addresses of the host are public, and the
connection is made to an address that was checked, so that a second answer of the name server changes nothing. Bytes,
seconds and redirects are limited, and the answer must begin like an image.

It uses h11 without an HTTP client, because httpcore2 reads informational answers without a bound.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from kestrel_engine import FieldPath, InvalidRequest, UnsupportedImageError

FETCH_S = 10.0
"""Seconds in which all images of a request must arrive."""
MOST_ADDRESSES = 16
"""Addresses in one request."""
_MOST_REDIRECTS = 3
_MOST_TRIED = 3
"""IP addresses of a host to try."""
_LONGEST_URL = 4096
_HEAD_BYTES = 16 * 1024
_MOST_PIECES = 10_000
"""Limit on the parts of an answer, such as chunks. Parsing one takes up to 50 microseconds of the event loop."""
_FRAMING_BYTES = 64 * 1024
"""Bytes that an answer may have in addition to its image: its head and the sizes of its chunks."""
_PORTS = {"http": 80, "https": 443}
_VISIBLE = re.compile(r"[!-\[\]-~]+")
"""ASCII without blanks, control characters and the backslash, which some programs read as a slash."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SIGNATURE_BYTES = 12
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
_HEIF_BRANDS = frozenset(
    {b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"}
)
_UNSAFE = frozenset({"168.63.129.16"})
"""Public addresses that a cloud answers inside its machines: Azure's."""
_WEB = ipaddress.ip_network("2000::/3")
"""The part of IPv6 whose addresses are public. Others, such as those of NAT64, may lead to addresses of IPv4."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host. Raises OSError."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int, ssl.SSLContext | None, str], Awaitable[Connection]]
"""Connects to an IP address and port, with TLS to the named host if there is a context. Raises OSError."""


def is_address(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


class Addresses:
    """The images that a request names by address. The request is read once to learn them, and again with the images.

    ``wanted``: the addresses by their paths in the request. ``images``: those that were fetched, by the same paths.
    """

    def __init__(self) -> None:
        self.wanted: dict[FieldPath, str] = {}
        self.images: dict[FieldPath, bytes] = {}

    def image(self, url: str, path: FieldPath) -> bytes:
        """The image, which is empty before it is fetched. Raises InvalidRequest if there are too many."""
        if path not in self.wanted and len(self.wanted) >= MOST_ADDRESSES:
            raise InvalidRequest(path, f"is one address too many, the limit is {MOST_ADDRESSES}")
        self.wanted[path] = url
        return self.images.get(path, b"")


_REMEDY = "send the image as a data URL, or ask the operator for the host (--http-fetch-allow)"


class ImageFetcher:
    """``allowed``: HOST or HOST:PORT, in lower case. ``max_bytes``: limit on all images of a request together.
    ``resolve`` and ``connect`` are the system's, unless a test gives others.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        max_bytes: int,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._allowed, self._max_bytes = frozenset(allowed), max_bytes
        self._resolve = _Resolver() if resolve is None else resolve
        self._connect = connect_to if connect is None else connect
        self.trust = ssl.create_default_context()

    async def fetch(self, addresses: Addresses) -> int:
        """Fetches the images. Returns their bytes. Raises InvalidRequest, UnsupportedImageError."""
        total = 0
        path: FieldPath = ()
        try:
            async with asyncio.timeout(FETCH_S):
                for path, url in addresses.wanted.items():
                    image = await self._fetch(url, path, self._max_bytes - total)
                    total += len(image)
                    addresses.images[path] = image
        except TimeoutError:
            raise InvalidRequest(path, f"could not be fetched within {FETCH_S:g} s") from None
        return total

    async def _fetch(self, url: str, field: FieldPath, max_bytes: int) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            parts = self._checked(url, field)
            try:
                location, image = await self._get(parts, field, max_bytes)
            except (OSError, h11.ProtocolError) as error:
                why = getattr(error, "verify_message", "") or error.__class__.__name__
                raise InvalidRequest(
                    field, f"could not be fetched from {parts.hostname}: {why}"
                ) from None
            if location is None:
                return image
            if not _VISIBLE.fullmatch(location):
                raise InvalidRequest(field, "is redirected to an address that is not valid")
            following = urljoin(url, location)
            if parts.scheme == "https" and not following.lower().startswith("https:"):
                raise InvalidRequest(field, "is redirected from https to another scheme")
            url = following
        raise InvalidRequest(field, f"is redirected more than {_MOST_REDIRECTS} times")

    def _checked(self, url: str, field: FieldPath) -> SplitResult:
        """The parts of an address that may be fetched. Raises InvalidRequest, UnsupportedImageError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise InvalidRequest(field, "is not a valid address") from None
        host = parts.hostname
        is_plain = len(url) <= _LONGEST_URL and _VISIBLE.fullmatch(url) and "@" not in parts.netloc
        if not is_plain or parts.scheme not in _PORTS or not host:
            raise InvalidRequest(
                field, "must be an address like https://HOST/PATH, in ASCII and without a user name"
            )
        is_usual = port in (None, _PORTS[parts.scheme])
        if not (is_usual and host in self._allowed) and f"{host}:{port}" not in self._allowed:
            named = host if is_usual else f"{host}:{port}"
            raise UnsupportedImageError(
                field, f"is at {named!r}, from which this server fetches no images; {_REMEDY}"
            )
        return parts

    async def _get(
        self, parts: SplitResult, field: FieldPath, max_bytes: int
    ) -> tuple[str | None, bytes]:
        """The address of a redirect, or None and the image. Raises OSError, h11.ProtocolError, InvalidRequest,
        UnsupportedImageError."""
        host = str(parts.hostname)
        port = parts.port or _PORTS[parts.scheme]
        found = await self._resolve(host, port)
        if not found or not all(map(is_public, found)):
            raise InvalidRequest(field, f"is at {host}, which has an address that is not public")
        reader, writer = await self._connected(found, port, parts)
        try:
            return await _Exchange(reader, writer, field, max_bytes).get(parts)
        finally:
            writer.transport.abort()

    async def _connected(self, found: Sequence[str], port: int, parts: SplitResult) -> Connection:
        trust = self.trust if parts.scheme == "https" else None
        failed = OSError()
        for address in found[:_MOST_TRIED]:
            try:
                return await self._connect(address, port, trust, str(parts.hostname))
            except OSError as error:
                failed = error
        raise failed


class _Exchange:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        field: FieldPath,
        max_bytes: int,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._field, self._max_bytes = field, max_bytes
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._left_bytes = max_bytes + _FRAMING_BYTES
        self._left_pieces = _MOST_PIECES

    async def get(self, parts: SplitResult) -> tuple[str | None, bytes]:
        """The address of a redirect, or None and the image. Raises as ``ImageFetcher._get``."""
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {
            "host": parts.netloc,
            "user-agent": "kestrel-grpc",
            "accept": "image/*, */*;q=0.5",  # Django's REST framework answers 406 to the first alone.
            "accept-encoding": "identity",
            "connection": "close",
        }
        request = h11.Request(method="GET", target=target, headers=[*headers.items()])
        self._writer.write((self._http.send(request) or b"") + (self._http.send(_END) or b""))
        image = bytearray()
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                location = self._location(event)
                if location is not None:
                    return location, b""
            elif isinstance(event, h11.Data):
                is_checked = len(image) >= _SIGNATURE_BYTES
                image += event.data
                if not is_checked and len(image) >= _SIGNATURE_BYTES:
                    self._check_signature(image)
                if len(image) > self._max_bytes:
                    raise self._too_large()
            elif isinstance(event, h11.EndOfMessage):
                self._check_signature(image)
                return None, bytes(image)

    async def _next(self) -> Any:
        self._left_pieces -= 1
        if not self._left_pieces:
            raise InvalidRequest(self._field, f"is sent in more than {_MOST_PIECES} pieces")
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(64 * 1024)
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                raise self._too_large()
            self._http.receive_data(data)
        if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError
        return event

    def _location(self, response: h11.Response) -> str | None:
        """The address of a redirect; None for an image. Raises InvalidRequest."""
        headers = dict(response.headers)
        status = response.status_code
        if status in _REDIRECTS and b"location" in headers:
            return headers[b"location"].decode("latin-1")
        if status != 200:
            raise InvalidRequest(self._field, f"could not be fetched: its host answers {status}")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise InvalidRequest(self._field, "is sent compressed, which was not asked for")
        if int(headers.get(b"content-length", b"0")) > self._max_bytes:
            raise self._too_large()
        return None

    def _check_signature(self, image: bytes | bytearray) -> None:
        if not has_image_signature(image):
            raise UnsupportedImageError(self._field, "does not lead to an image")

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(self._field, f"leads to more than {self._max_bytes} bytes")


_END = h11.EndOfMessage()


class _Resolver:
    """Asks the system for addresses, in a few threads of its own, because a name server may be slow."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4, "kestrel-resolve")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(each[4][0]) for each in found))


async def connect_to(
    address: str, port: int, trust: ssl.SSLContext | None, host: str
) -> Connection:
    named = {} if trust is None else {"ssl": trust, "server_hostname": host}
    return await asyncio.open_connection(address, port, **named)  # type: ignore[arg-type]


def is_public(text: str) -> bool:
    """Whether an IP address belongs to the internet, in every form that leads to an address of IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in _WEB or address.sixtofour or address.teredo:
            return False
    return address.is_global and not address.is_multicast and str(address) not in _UNSAFE


def has_image_signature(data: bytes | bytearray) -> bool:
    """Whether data begins like JPEG, PNG, WebP, GIF, TIFF, AVIF or HEIC."""
    if data[:4] == b"RIFF":
        return data[8:12] == b"WEBP"
    if data[4:8] == b"ftyp":
        return bytes(data[8:12]) in _HEIF_BRANDS
    return data.startswith(_SIGNATURES)
