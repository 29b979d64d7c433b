"""The application that Label Studio calls: an ML backend with the routes /health, /setup, /predict and
/versions."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kestrel_client import DeadlineExceededError, KestrelError, OverloadedError, UnavailableError
from kestrel_client.commands.connection import failure_text

from .labelling import RequestRefused, read_controls
from .predictions import Predictor

MAX_BODY_BYTES = 32 * 1024 * 1024
BODY_S = 60.0
"""Seconds in which a request's body must arrive."""
_MOST_READ = 8
"""Requests whose bodies are in memory. Others wait before they are read."""

Answer = Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]


class Backend:
    """``token``: the password that callers must give; None lets all in. ``server``: the address of the server, and
    ``timeout_s`` the limit on its answers, for messages."""

    def __init__(
        self, predictor: Predictor, token: str | None, server: str, timeout_s: float
    ) -> None:
        self._predictor, self._server, self._timeout_s = predictor, server, timeout_s
        self._token = None if token is None else token.encode()
        self._places = asyncio.Semaphore(_MOST_READ)

    def application(self) -> Starlette:
        # A page of another site has no token, so any name may lead to a bridge that needs one.
        names = ["*"] if self._token is not None else ["127.0.0.1", "localhost"]
        return Starlette(
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names)],
            routes=[
                Route("/", _health, methods=["GET"]),
                Route("/health", _health, methods=["GET"]),
                Route("/setup", self._answered(self._setup), methods=["POST"]),
                Route("/predict", self._answered(self._predict), methods=["POST"]),
                Route("/versions", self._answered(self._versions), methods=["GET", "POST"]),
            ],
        )

    async def _setup(self, body: dict[str, Any]) -> dict[str, Any]:
        """The project is connected. Its address and token in the request are not used: they may be anyone's."""
        read_controls(body.get("schema"))
        return {"model_version": await self._predictor.version()}

    async def _predict(self, body: dict[str, Any]) -> dict[str, Any]:
        controls = read_controls(body.get("label_config"))
        return {"results": await self._predictor.predict(controls, body.get("tasks"))}

    async def _versions(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"versions": [await self._predictor.version()]}

    def _answered(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not self._knows(request.headers.get("authorization", "")):
                challenge = {"www-authenticate": 'Basic realm="kestrel"'}
                return JSONResponse({"error": "the password is missing or wrong"}, 401, challenge)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                # A browser sends other types to another origin without asking the server.
                return _failed(415, "the request needs the header content-type: application/json")
            try:
                async with self._places:
                    body = await _read(request)
                    return JSONResponse(await _while_connected(request, answer(body)))
            except ClientDisconnect:
                return _failed(400, "the connection has ended")
            except RequestRefused as error:
                return _failed(400, str(error))
            except (UnavailableError, OverloadedError) as error:
                return _failed(503, self._text(error))
            except KestrelError as error:
                is_late = isinstance(error, DeadlineExceededError)
                return _failed(504 if is_late else 400, self._text(error))

        return endpoint

    def _text(self, error: KestrelError) -> str:
        return failure_text(error, self._server, self._timeout_s)

    def _knows(self, header: str) -> bool:
        if self._token is None:
            return True
        scheme, _, given = header.partition(" ")
        try:
            secret = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return False
        return scheme.lower() == "basic" and hmac.compare_digest(secret, self._token)


async def _read(request: Request) -> dict[str, Any]:
    """The object in a request's body. Raises RequestRefused, ClientDisconnect."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise RequestRefused(
                        f"the request has more bytes than the limit of {MAX_BODY_BYTES}; send fewer tasks"
                    )
        body = json.loads(data or b"{}")  # GET has no body.
    except TimeoutError:
        raise RequestRefused(f"the request did not arrive within {BODY_S:g} s") from None
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefused("the request must be a JSON object")
    return body


async def _while_connected(
    request: Request, answer: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any]:
    """Computes an answer until the caller goes away: Label Studio does after its own limit of time, and what it asked
    would hold up what it asks next. Raises ClientDisconnect."""
    answering, leaving = asyncio.create_task(answer), asyncio.create_task(request.receive())
    leaving.add_done_callback(lambda _: answering.cancel())
    try:
        return await answering
    except asyncio.CancelledError:
        raise ClientDisconnect from None
    finally:
        leaving.cancel()


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "UP", "model_class": "Kestrel"})


def _failed(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)
