"""Fetches images from http(s) addresses, in the client: a server fetches only what its operator allows."""

from __future__ import annotations

import urllib.error
from http.client import HTTPException

from ..errors import InvalidImageError
from ..web import download
from ..web import is_url as is_url

TIMEOUT_S = 30.0
"""Timeout of the whole download."""


def fetch(url: str, limit: int, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns the bytes at ``url``. Follows redirects to http and https only.

    Raises InvalidImageError if the download fails, takes over ``timeout_s`` seconds, exceeds ``limit`` bytes, or is a
    web page.
    """
    try:
        kind, data = download(url, limit, timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            raise InvalidImageError(f"can't fetch {url}: {error.code} {error.reason}") from error
    except (HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            reason = f"it took more than {timeout_s:g} s"
        raise InvalidImageError(f"can't fetch {url}: {reason}") from error
    if kind in ("text/html", "application/xhtml+xml"):
        raise InvalidImageError(f"{url} is a web page, not an image")
    if len(data) > limit:
        raise InvalidImageError(f"{url} has more than the limit of {limit} bytes")
    if not data:
        raise InvalidImageError(f"{url} is empty")
    return data
