"""GET /metrics on the HTTP port, for scrapers that read the port of the model.

The rule is that of the port of --metrics-listen: if callers need credentials, a scraper needs the scope metrics or
admin. If --open names metrics, it needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..security.admission.guard import Guard
from ..security.identity.principal import NotAuthenticated, ScopeMissing
from ..telemetry.opening import Telemetry
from .context import HttpContext

_ABSENT = "there are no metrics at this port; they need pip install ./clients/python '.[telemetry]'"


def metrics(guard: Guard, telemetry: Telemetry | None) -> Callable[[Request], Any]:
    """The handler of the path."""
    turn = asyncio.Lock()  # One thread at most collects for this port.

    async def send(request: Request) -> Response:
        try:
            context = HttpContext(request.scope)
            guard.check_scraper(context.invocation_metadata(), context)
        except NotAuthenticated as error:
            return _refused(401, str(error), {"www-authenticate": "Bearer"})
        except ScopeMissing as error:
            return _refused(403, str(error))
        if telemetry is None or not telemetry.is_scraped:
            return _refused(404, _ABSENT)
        accept = request.headers.get("accept", "")
        async with turn:
            text, content_type = await asyncio.to_thread(telemetry.exposition, accept)
        return Response(text, headers={"content-type": content_type})

    return send


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return Response(f"{why}\n", status, headers, "text/plain")
