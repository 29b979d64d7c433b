"""The event loop of a server process: uvloop's, or asyncio's own where uvloop is not installed.

An HTTP port with TLS needs asyncio's own. uvloop reads from a connection that ``connection_made`` has paused, and the
first bytes of a handshake would be lost before TLS begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..settings.server import ServerConfig

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], config: ServerConfig) -> T:
    """As asyncio.run, for a server with ``config``."""
    has_https = bool(config.http.http_listen) and config.security.tls is not None
    with asyncio.Runner(loop_factory=None if has_https else _loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # There are no wheels for some systems.
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
