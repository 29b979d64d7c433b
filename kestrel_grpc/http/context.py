"""HttpContext: the parts of gRPC's context that services use, for a request by HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kestrel_engine import clock

from ..security.identity.callers import AuthContext

CERTIFICATE = "kestrel.certificate"
"""The key in a scope's state of the names in the client's certificate, as ``shown_by`` returns them."""


class HttpContext:
    """``scope``: the request's, of ASGI. ``write`` receives each message of a streaming method. None: the request is no
    method's. ``timeout_s``: the seconds that the client waits for the response; None if it does not say."""

    def __init__(
        self,
        scope: Mapping[str, Any],
        write: Callable[[Any], Awaitable[None]] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._peer = peer_of(scope.get("client"))
        self._certificate: AuthContext = scope.get("state", {}).get(CERTIFICATE, {})
        self._write = write
        self._ends_at = None if timeout_s is None else clock.now() + timeout_s

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> AuthContext:
        return self._certificate

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has none, and only the server's own limit applies."""
        return None if self._ends_at is None else max(0.0, self._ends_at - clock.now())

    async def send_initial_metadata(self, metadata: Any) -> None:
        """The response's headers carry the ids."""

    async def write(self, message: Any) -> None:
        assert self._write is not None, "only methods write"
        await self._write(message)


def peer_of(client: tuple[str, int] | None) -> str:
    """Returns the client's address in gRPC's form; "unix:" for a unix socket."""
    if not client or not client[0]:
        return "unix:"
    host, port = client
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
