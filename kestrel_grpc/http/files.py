"""The page at GET /, and its files. They are read once. A content security policy lets the page load only them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kestrel_client.commands import DEMO_IMAGE

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".jpg": "image/jpeg",
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for the page, one for each of its files, and one for the sample picture."""
    return [Route("/page/sample.jpg", _sender(DEMO_IMAGE), methods=["GET"]), *_file_routes()]


def _file_routes() -> list[Route]:
    return [
        Route(
            "/" if path.name == "index.html" else f"/page/{path.name}",
            _sender(path),
            methods=["GET"],
        )
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES
    ]


def _sender(path: Path) -> Any:
    content, media_type = path.read_bytes(), _TYPES[path.suffix]

    async def send(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return send
