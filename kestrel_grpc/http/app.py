"""The application of the HTTP port: its routes and their handlers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..batches.running import BatchRunner
from ..edge.calls.call import REQUEST_ID_KEY, TRACE_ID_KEY
from ..security.admission.guard import Guard
from ..served_model import ServedModels, State
from ..telemetry.opening import Telemetry
from .body import content_type
from .context import Receive, Scope, Send
from .dialects import (
    batches,
    completions,
    connect,
    grpc_web,
    kserve,
    messages,
    moondream,
    ollama,
    openai,
    responses,
)
from .edge import Endpoint, Endpoints, HttpEdge
from .files import page_routes
from .metrics import metrics
from .openapi import document_of
from .refusals import error_body
from .services import HttpServices

_EXPOSED = [REQUEST_ID_KEY, TRACE_ID_KEY, "retry-after", "retry-after-ms"]
"""The headers of responses that programs of other origins may read. gRPC-Web has its status in the body."""
_PREFLIGHT_S = 3600
"""Seconds for which a browser may remember what it may send."""


class _Answered:
    """The endpoints of one path as an ASGI application. Those of one verb differ in the type of the body."""

    def __init__(self, edge: HttpEdge, endpoints: Sequence[tuple[str, Endpoint]]) -> None:
        self._edge = edge
        self._endpoints: dict[str, list[Endpoint]] = defaultdict(list)
        for verb, endpoint in endpoints:
            self._endpoints[verb].append(endpoint)

    @property
    def verbs(self) -> list[str]:
        return list(self._endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = "GET" if scope["method"] == "HEAD" else scope["method"]  # Without the body.
        first, *others = endpoints = self._endpoints[verb]
        endpoint = first if not others else _for_type(endpoints, content_type(scope["headers"]))
        await self._edge.handle(endpoint, scope, receive, send)


def _for_type(endpoints: Sequence[Endpoint], kind: bytes) -> Endpoint:
    """The endpoint that takes a type; if there is none, one that refuses it and names all types."""
    for endpoint in endpoints:
        if kind in endpoint.types:
            return endpoint
    return replace(endpoints[-1], types=[kind for each in endpoints for kind in each.types])


def application(
    edge: HttpEdge,
    services: HttpServices,
    guard: Guard,
    telemetry: Telemetry | None,
    origins: Sequence[str] = (),
    runner: BatchRunner | None = None,
) -> Any:
    """The ASGI application. ``origins``: of the pages whose programs may read the responses; "*" stands for all.
    ``runner``: None if the server takes no batches."""
    served, largest = services.served, guard.messages.largest
    dialects: list[Endpoints] = [
        moondream.endpoints(services),
        openai.endpoints(services),
        completions.endpoints(services),
        responses.endpoints(services),
        messages.endpoints(services),
        ollama.endpoints(services),
        kserve.endpoints(services),
        grpc_web.endpoints(services, largest),
        *connect.endpoints(services, largest),
    ]
    if runner is not None:
        known = {key: each for dialect in dialects for key, each in dialect.items()}
        runner.forms |= batches.forms_of(known)
        dialects.append(batches.endpoints(runner))
    paths: dict[str, list[tuple[str, Endpoint]]] = defaultdict(list)
    for dialect in dialects:
        for (verb, path), endpoint in dialect.items():
            paths[path].append((verb, endpoint))
    answered = {path: _Answered(edge, endpoints) for path, endpoints in paths.items()}
    routes = [Route(path, each, methods=each.verbs) for path, each in answered.items()]
    routes += [
        Route("/api/version", _ollama_version, methods=["GET"]),
        Route("/healthz", _health(served), methods=["GET"]),
        Route("/health", _health(served), methods=["GET"]),
        Route("/metrics", metrics(guard, telemetry), methods=["GET"]),
        Route("/openapi.json", document_of(paths), methods=["GET"]),
        *page_routes(),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _wrong_method})
    single: Any = _SingleSlashes(app)
    if not origins:
        return single
    return CORSMiddleware(
        single,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=_PREFLIGHT_S,
    )


_PLAIN_ERRORS = ("/api/", "/v2/")
"""Paths of Ollama's and Triton's clients, whose errors are a text."""
_SHOWN_CHARS = 100


class _SingleSlashes:
    """Takes ``/v1//query`` for ``/v1/query``: clients append their paths to an address that may end with a slash."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "//" in scope.get("path", ""):
            scope = {**scope, "path": re.sub("/+", "/", scope["path"])}
        await self._app(scope, cast(Any, receive), cast(Any, send))


def _health(served: ServedModels) -> Callable[[Request], Any]:
    async def health(request: Request) -> Response:
        """Answers 200 while the model is ready, and 503 before and while the server drains."""
        status = 200 if served.state is State.READY else 503
        return _json(status, {"status": served.state.value})

    return health


async def _ollama_version(request: Request) -> Response:
    return _json(200, ollama.version())


async def _not_found(request: Request, error: Exception) -> Response:
    path = request.url.path
    why = openai.UNSUPPORTED_PATHS.get(path)
    shown = path[:_SHOWN_CHARS]
    return _refused(404, path, f"there is no path {shown!r}{f': {why}' if why else ''}")


async def _wrong_method(request: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None) or {}
    path = request.url.path
    response = _refused(
        405, path, f"{path[:_SHOWN_CHARS]} takes {headers.get('Allow', 'another method')}"
    )
    response.headers.update(headers)
    return response


def _refused(status: int, path: str, message: str) -> Response:
    """In the form of the clients that use such paths."""
    code = "path_not_found" if status == 404 else "method_not_allowed"
    body = error_body(message, "invalid_request_error", code)
    response = _json(status, {"error": message} if path.startswith(_PLAIN_ERRORS) else body)
    response.headers["connection"] = "close"  # A body may follow, which the server does not read.
    return response


def _json(status: int, body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
