"""HttpContext: the parts of gRPC's context that services use, for a request by HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kestrel_engine import clock

from ..edge.calls.call import OwnContext
from ..security.identity.callers import AuthContext

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
"""As ASGI has them."""

CERTIFICATE = "kestrel.certificate"
"""The key in a scope's state of the names in the client's certificate, as ``shown_by`` returns them."""

_KEY_HEADERS = (b"x-moondream-auth", b"x-api-key")
"""Headers in which clients send a key, in addition to ``authorization``."""


class HttpContext(OwnContext):
    """``scope``: the request's, of ASGI. ``write`` receives each message of a streaming method. None: the request is no
    method's. ``timeout_s``: the seconds that the client waits for the response; None if it does not say."""

    def __init__(
        self,
        scope: Mapping[str, Any],
        write: Callable[[Any], Awaitable[None]] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._peer, self._headers = peer_of(scope.get("client")), scope["headers"]
        self._certificate: AuthContext = scope.get("state", {}).get(CERTIFICATE, {})
        self._write = write
        self._ends_at = None if timeout_s is None else clock.now() + timeout_s

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers in gRPC's form. A key in one of _KEY_HEADERS becomes a bearer token."""
        return _metadata_of(self._headers)

    def auth_context(self) -> AuthContext:
        return self._certificate

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - clock.now())

    async def write(self, message: Any) -> None:
        assert self._write is not None, "only methods write"
        await self._write(message)


def peer_of(client: tuple[str, int] | None) -> str:
    """Returns the client's address in gRPC's form; "unix:" for a unix socket."""
    if not client or not client[0]:
        return "unix:"
    host, port = client
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _metadata_of(headers: Sequence[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    has_token = any(key == b"authorization" for key, _ in headers)
    metadata = []
    for key, value in headers:
        if key in _KEY_HEADERS:
            if not has_token:
                has_token = True
                metadata.append(("authorization", f"Bearer {value.decode('latin-1')}"))
            continue
        metadata.append((key.decode("latin-1"), value.decode("latin-1")))
    return tuple(metadata)
