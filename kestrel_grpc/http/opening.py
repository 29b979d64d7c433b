"""Opens the HTTP port if the settings name one. Imports the packages for HTTP only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..batches.running import BatchRunner
from ..edge.call_life import CallLife, CallWatchers, InFlight
from ..security.admission.guard import Guard
from ..security.connections.connection_guard import ConnectionGuard
from ..security.identity.tls import RenewedContext
from ..security.listening import check_exposure
from ..settings.addresses import AddressError
from ..settings.http import HttpConfig
from ..settings.security import SecurityConfig
from ..telemetry.opening import Telemetry
from .services import HttpServices

if TYPE_CHECKING:
    from .port.listener import HttpListener

_PACKAGES = "orjson, starlette and uvicorn"


def open_http(
    config: HttpConfig,
    security: SecurityConfig,
    services: HttpServices,
    in_flight: InFlight,
    guard: Guard,
    watchers: CallWatchers,
    telemetry: Telemetry | None,
    runner: BatchRunner | None = None,
) -> HttpListener:
    """Returns the listener, not yet started. Raises AddressError, TlsError."""
    check_exposure(config.http_listen, security)
    try:
        from .app import application
        from .edge import HttpEdge
        from .fetching import ImageFetcher
        from .port.connections import HttpConnections
        from .port.listener import HttpListener
    except ModuleNotFoundError as error:
        raise AddressError(
            f"cannot listen for HTTP: the package {error.name} is not installed; --http-listen needs {_PACKAGES}, "
            "pip install ./clients/python '.[http]'"
        ) from None
    connections = HttpConnections(security.connections.connections)
    connection_guard = ConnectionGuard(security.connections, 0, connections)
    allowed = config.http_fetch_allow
    fetcher = ImageFetcher(allowed, guard.messages.largest) if allowed else None
    edge = HttpEdge(CallLife(guard, connection_guard, in_flight, watchers), fetcher)
    app = application(edge, services, guard, telemetry, config.http_allow_origins, runner)
    tls = None if security.tls is None else RenewedContext(security.tls, "HTTP port")
    return HttpListener(app, config, security, tls, connections, connection_guard)
