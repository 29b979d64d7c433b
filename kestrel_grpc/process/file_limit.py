"""The limit on open files at the start of the server: raised as far as the system allows, and compared with the
connections that the settings allow."""

from __future__ import annotations

import contextlib
import math
import resource

from ..settings.server import ServerConfig
from ..telemetry.open_files import file_limit
from .file_watch import CROWDED

_OTHERS = 128
"""Files of a server without connections: sockets, pipes of decoders, the log, files of the model while it loads."""
_MOST = 10_240
"""The highest limit on macOS, whose hard limit may be infinite."""


def raise_limit() -> None:
    """Raises the soft limit to the hard one. Child processes inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, _MOST):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def complaint(config: ServerConfig) -> str | None:
    """Says what to do if the connections of ``config`` do not fit the limit."""
    most = config.security.connections.connections
    ports = bool(config.listen) + bool(config.http.http_listen)
    needed = math.ceil(((most or 0) * ports + _OTHERS) / CROWDED)
    limit = file_limit()
    if limit is None or needed <= limit:
        return None
    cause = f"--max-connections {most}" if most and ports else "the server"
    both = ", for gRPC and for HTTP," if most and ports == 2 else ""
    return (
        f"{cause}{both} may need {needed} open files, and this process may open {limit}: raise the hard "
        f"limit (ulimit -Hn {needed}, systemd's LimitNOFILE={needed}) or lower the number"
    )
