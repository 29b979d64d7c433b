"""Downloads images from http(s) addresses. The client does this, because a server never fetches anything."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http.client import HTTPException

from ..errors import InvalidImageError
from ..version import __version__

TIMEOUT_S = 30.0
"""Timeout of the whole download."""
_CHUNK_BYTES = 256 * 1024


def is_url(image: object) -> bool:
    """Whether this is a string with an http or https address."""
    return isinstance(image, str) and image.lower().startswith(("http://", "https://"))


def fetch(url: str, limit: int, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns the bytes at ``url``. Follows redirects to http and https only.

    Raises InvalidImageError if the download fails, takes over ``timeout_s`` seconds, exceeds ``limit`` bytes, or is a
    web page.
    """
    deadline = time.monotonic() + timeout_s
    request = urllib.request.Request(url, headers={"User-Agent": f"kestrel-client/{__version__}"})
    try:
        with _opener().open(request, timeout=timeout_s) as reply:
            kind = reply.headers.get_content_type()
            if kind in ("text/html", "application/xhtml+xml"):
                raise InvalidImageError(f"{url} is a web page, not an image")
            data = bytearray()
            while piece := reply.read1(_CHUNK_BYTES):
                data += piece
                if len(data) > limit:
                    raise InvalidImageError(f"{url} has more than the limit of {limit} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError
    except urllib.error.HTTPError as error:
        with error:
            raise InvalidImageError(f"can't fetch {url}: {error.code} {error.reason}") from error
    except (TimeoutError, urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            reason = f"it took more than {timeout_s:g} s"
        if isinstance(error, InvalidImageError):
            raise
        raise InvalidImageError(f"can't fetch {url}: {reason}") from error
    if not data:
        raise InvalidImageError(f"{url} is empty")
    return bytes(data)


def _opener() -> urllib.request.OpenerDirector:
    """urllib's opener without the handlers for files, FTP and data."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
