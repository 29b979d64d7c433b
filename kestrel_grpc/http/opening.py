"""Opens the HTTP port if the settings name one. Imports the packages for HTTP only then."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..edge.calls.call import Call
from ..edge.calls.call_watcher import CallWatcher
from ..edge.calls.in_flight import InFlight
from ..kserve.service import InferenceService
from ..security.admission.guard import Guard
from ..security.identity.tls import server_context
from ..security.listening import check_exposure
from ..served_model import ServedModel
from ..services.model import ModelService
from ..services.vision import VisionService
from ..settings.addresses import AddressError
from ..settings.http import HttpConfig
from ..settings.security import SecurityConfig

if TYPE_CHECKING:
    from .listener import HttpListener

_PACKAGES = "orjson, starlette and uvicorn"


def open_http(
    config: HttpConfig,
    security: SecurityConfig,
    vision: VisionService,
    models: ModelService,
    inference: InferenceService,
    served: ServedModel,
    in_flight: InFlight,
    guard: Guard,
    end_call: Callable[[Call], None],
    watcher: CallWatcher | None,
) -> HttpListener:
    """Returns the listener, not yet started. Raises AddressError, TlsError."""
    check_exposure(config.http_listen, security)
    if security.client_ca is not None and not security.has_tokens:
        raise AddressError(
            f"refusing to listen on {config.http_listen[0]} for HTTP, where certificates do not identify callers; "
            "give callers tokens (--auth-tokens)"
        )
    try:
        from .app import application
        from .edge import HttpEdge
        from .listener import HttpListener
    except ModuleNotFoundError as error:
        raise AddressError(
            f"cannot listen for HTTP: the package {error.name} is not installed; --http-listen needs {_PACKAGES}, "
            "pip install '.[http]'"
        ) from None
    context: ssl.SSLContext | None = None if security.tls is None else server_context(security.tls)
    edge = HttpEdge(in_flight, guard, end_call, watcher)
    return HttpListener(application(edge, vision, models, inference, served), config, context)
