"""ImageFetcher: fetches the images that requests name by address, from the hosts of --http-fetch-allow only.

Addresses in requests can make a server attack its own network (server-side request forgery). So each address, of a
request or of a redirect, is checked in full: its host is on the list, all IP addresses of the host are public, and the
connection is made to an address that was checked, so that a second answer of the name server changes nothing. Bytes,
seconds and redirects are limited, and the answer must begin like an image.

It uses h11 without an HTTP client: httpcore2 reads informational answers without a bound, and a backend that bounds
them takes more lines than it saves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias
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


class FetchedImage(str):
    """The address of an image that was fetched. It takes the address's place in a request."""

    image: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a request that holds the address of an image. ``path``: its own, for errors."""

    holder: Any
    """The object or list."""
    key: str | int
    path: FieldPath

    @property
    def url(self) -> str:
        return str(self.holder[self.key])


def is_address(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


def places(values: dict[str, Any]) -> list[Place]:
    """The places of a JSON object where images are expected and addresses stand: ``image_url``, ``image_url.url`` and
    the items of ``images``. Raises InvalidRequest if there are too many."""
    found = []
    for place in _places(values):
        found.append(place)
        if len(found) > MOST_ADDRESSES:
            raise InvalidRequest(
                place.path, f"is one address too many, the limit is {MOST_ADDRESSES}"
            )
    return found


def _places(values: dict[str, Any]) -> Iterator[Place]:
    left: list[tuple[Any, _Path, bool]] = [(values, None, False)]
    while left:  # Without recursion, because JSON may be nested as deeply as Python's calls may be.
        value, path, is_image = left.pop()
        items: list[tuple[str | int, Any, _Path, bool]]
        if not isinstance(value, dict):
            items = [(i, each, (path, i), is_image) for i, each in enumerate(value)]
        elif is_image:
            items = [("url", value.get("url"), path, True)]
        else:
            items = [
                (key, each, (path, key), key in ("image_url", "images"))
                for key, each in value.items()
            ]
        for key, each, name, is_place in items:
            if is_place and isinstance(each, str) and is_address(each):
                yield Place(value, key, _named(name))
        left += [
            (each, name, is_place)
            for _, each, name, is_place in reversed(items)
            if isinstance(each, (dict, list))
        ]


_Path: TypeAlias = "tuple[_Path, str | int] | None"
"""The path of a value: that of its holder, and its part in it."""


def _named(path: _Path) -> FieldPath:
    parts = list[str | int]()
    while path is not None:
        path, part = path
        parts.append(part)
    return tuple(reversed(parts))


_REMEDY = "send the image as a data URL, or ask the operator for the host (--http-fetch-allow)"


@dataclass(frozen=True, slots=True)
class TrustedOrigin:
    """A server that the operator names in full. It may have a private address.

    ``origin``: like http://localhost:8080, in lower case. ``headers``: of requests to it, and to it only.
    """

    origin: str
    headers: tuple[tuple[str, str], ...] = ()


class ImageFetcher:
    """``allowed``: HOST or HOST:PORT, in lower case. ``max_bytes``: limit on all images of a request together.
    ``remedy``: what to do about an address whose host is not allowed.

    ``resolve`` and ``connect`` are the system's, unless a test gives others.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        max_bytes: int,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        *,
        trusted: TrustedOrigin | None = None,
        remedy: str = _REMEDY,
    ) -> None:
        self._trusted, self._remedy = trusted, remedy
        self._allowed, self._max_bytes = frozenset(allowed), max_bytes
        self._resolve = _Resolver() if resolve is None else resolve
        self._connect = _connect if connect is None else connect
        self._trust = ssl.create_default_context()

    async def fill(self, wanted: Sequence[Place]) -> int:
        """Fetches the images, and puts each in its place. Returns their bytes. Raises InvalidRequest,
        UnsupportedImageError."""
        total = 0
        path: FieldPath = ()
        try:
            async with asyncio.timeout(FETCH_S):
                for place in wanted:
                    path = place.path
                    image = await self._fetch(place.url, path, self._max_bytes - total)
                    total += len(image)
                    fetched = FetchedImage(place.url)
                    fetched.image = image
                    place.holder[place.key] = fetched
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
        if self._is_trusted(parts):
            return parts
        if not (is_usual and host in self._allowed) and f"{host}:{port}" not in self._allowed:
            named = host if is_usual else f"{host}:{port}"
            raise UnsupportedImageError(
                field,
                f"is at {named!r}, from which this server fetches no images; {self._remedy}",
            )
        return parts

    def _is_trusted(self, parts: SplitResult) -> bool:
        return self._trusted is not None and origin_of(parts) == self._trusted.origin

    async def _get(
        self, parts: SplitResult, field: FieldPath, max_bytes: int
    ) -> tuple[str | None, bytes]:
        """The address of a redirect, or None and the image. Raises OSError, h11.ProtocolError, InvalidRequest,
        UnsupportedImageError."""
        host = str(parts.hostname)
        port = parts.port or _PORTS[parts.scheme]
        found = await self._resolve(host, port)
        trusted = self._trusted if self._is_trusted(parts) else None
        if not found or (trusted is None and not all(map(is_public, found))):
            raise InvalidRequest(field, f"is at {host}, which has an address that is not public")
        reader, writer = await self._connected(found, port, parts)
        try:
            extra = () if trusted is None else trusted.headers
            return await _Exchange(reader, writer, field, max_bytes).get(parts, extra)
        finally:
            writer.transport.abort()

    async def _connected(self, found: Sequence[str], port: int, parts: SplitResult) -> Connection:
        trust = self._trust if parts.scheme == "https" else None
        failed = OSError()
        for address in found[:_MOST_TRIED]:
            try:
                return await self._connect(address, port, trust, str(parts.hostname))
            except OSError as error:
                failed = error
        raise failed


class _Exchange:
    """One request and its answer."""

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

    async def get(
        self, parts: SplitResult, extra: Sequence[tuple[str, str]]
    ) -> tuple[str | None, bytes]:
        """The address of a redirect, or None and the image. Raises as ``ImageFetcher._get``."""
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {
            "host": parts.netloc,
            "user-agent": "kestrel-grpc",
            "accept": "image/*, */*;q=0.5",  # Django's REST framework answers 406 to the first alone.
            "accept-encoding": "identity",
            "connection": "close",
        }
        request = h11.Request(method="GET", target=target, headers=[*headers.items(), *extra])
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


async def _connect(address: str, port: int, trust: ssl.SSLContext | None, host: str) -> Connection:
    named = {} if trust is None else {"ssl": trust, "server_hostname": host}
    return await asyncio.open_connection(address, port, **named)  # type: ignore[arg-type]


def origin_of(parts: SplitResult) -> str:
    """Scheme, host and port, in lower case; the port is left out where it is the scheme's own."""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    is_usual = parts.port in (None, _PORTS.get(parts.scheme))
    return f"{parts.scheme}://{host}" + ("" if is_usual else f":{parts.port}")


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
