"""HttpContext: the parts of gRPC's context that services use, for a request by HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any


class HttpContext:
    """``write`` receives each message of a streaming method."""

    def __init__(self, peer: str, write: Callable[[Any], Awaitable[None]]) -> None:
        self._peer, self._write = peer, write

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Mapping[str, list[bytes]]:
        """Empty, because certificates do not identify callers of HTTP."""
        return {}

    def time_remaining(self) -> float | None:
        """None, because HTTP has no deadline. The server's own limit applies."""
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        """The response's headers carry the ids."""

    async def write(self, message: Any) -> None:
        await self._write(message)


def peer_of(client: tuple[str, int] | None) -> str:
    """Returns the client's address in gRPC's form; "unix:" for a unix socket."""
    if not client or not client[0]:
        return "unix:"
    host, port = client
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
