"""The page at GET /, and its files. They are read once. A content security policy lets the page load only them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kestrel_client.commands.samples import Ask, samples

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".jpg": "image/jpeg",
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
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
    """Routes for the page, its files, the sample pictures and what to ask about these."""
    pictures = [
        Route(f"/page/{sample.file.name}", _sender(sample.file), methods=["GET"])
        for sample in samples()
    ]
    return [Route("/page/samples.json", _send_samples, methods=["GET"]), *pictures, *_file_routes()]


async def _send_samples(request: Request) -> Response:
    """The page's form has no place for the point that a question is about: such questions are left out."""

    def listed(ask: Ask) -> dict[str, str]:
        return {"skill": ask.skill, "text": ask.text}

    found = [
        {"name": s.name, "file": s.file.name, "asks": [listed(ask) for ask in s.asks if not ask.at]}
        for s in samples()
    ]
    return JSONResponse(found, headers=_HEADERS)


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
