"""Downloads from http(s) addresses."""

from __future__ import annotations

import time
import urllib.request

from .version import __version__

_CHUNK_BYTES = 256 * 1024


def is_url(text: object) -> bool:
    """Whether this is a string with an http or https address."""
    return isinstance(text, str) and text.lower().startswith(("http://", "https://"))


def download(url: str, most_bytes: int, timeout_s: float) -> tuple[str, bytes]:
    """Returns the content type of what is at ``url``, and its bytes; if they are more than ``most_bytes``, only a part
    that is longer than that.

    Follows redirects to http and https only. Raises OSError, ValueError or http.client's HTTPException, and
    TimeoutError after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    request = urllib.request.Request(url, headers={"User-Agent": f"kestrel-client/{__version__}"})
    with _opener().open(request, timeout=timeout_s) as reply:
        data = bytearray()
        while len(data) <= most_bytes and (piece := reply.read1(_CHUNK_BYTES)):
            data += piece
            if time.monotonic() > deadline:
                raise TimeoutError(f"it took more than {timeout_s:g} s")
        return reply.headers.get_content_type(), bytes(data)


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
