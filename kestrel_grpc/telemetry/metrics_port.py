"""MetricsPort: an HTTP server for scrapers, with its own threads. It limits connections and time; MetricsDoor checks
credentials.

prometheus_client's own server does the TLS handshake in the thread that accepts connections, so one silent connection
blocks all. This server does the handshake in the connection's thread with a timeout, and limits the connections.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kestrel_engine import clock

from ..security.identity.certificates import shown_by
from ..security.metrics_door import UNAUTHORIZED, MetricsDoor
from ..settings.addresses import opening

TIMEOUT_S = 10.0
"""Timeout of the handshake and of each read of a request."""
MOST_CONNECTIONS = 16
_PAUSE_S = 1.0
PATH = "/metrics"
_METHODS = "GET, HEAD"
_SHOWN = "kestrel.connection"

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsPort:
    """Serves ``app`` at PATH to the scrapers that ``door`` admits. ``address``: HOST:PORT or [IPV6]:PORT. Raises
    AddressError if it cannot listen."""

    def __init__(self, address: str, app: App, door: MetricsDoor) -> None:
        host, _, port = address.rpartition(":")
        with opening(address, "serve metrics"):
            self._server = _Server(host.strip("[]"), int(port), door)
        self._server.set_app(_behind(door, app))
        self.address = f"{host}:{self._server.server_port}"
        """The address, with the assigned port in place of port 0."""
        self.scheme = "https" if door.talks_tls else "http"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kestrel-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Closes the port. Blocks until it is free again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def get_environ(self) -> dict[str, Any]:
        secured = self.connection if isinstance(self.connection, ssl.SSLSocket) else None
        return {**super().get_environ(), _SHOWN: shown_by(secured)}

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing: a scrape is not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128
    """A burst exceeds socketserver's default of five. Clients repeat a connection that finds no room after 1 to 3 s."""

    def __init__(self, host: str, port: int, door: MetricsDoor) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._door = door
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        # HTTPServer's method looks up this host's name, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # No descriptor is free. socketserver would try again at once.
            clock.sleep(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(TIMEOUT_S)
            context = self._door.context()
            if context is not None:
                try:
                    request = context.wrap_socket(request, server_side=True)
                except (OSError, ssl.SSLError):  # The client does not use TLS, or is too slow.
                    request.close()
                    return
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: the scraper has closed the connection."""


def _behind(door: MetricsDoor, app: App) -> App:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def answer(status: str, why: str, *headers: tuple[str, str]) -> Iterable[bytes]:
            start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
            return [] if method == "HEAD" else [f"{why}\n".encode()]

        method = environ["REQUEST_METHOD"]
        host = environ.get("HTTP_HOST", "localhost")
        refusal = door.refusal(environ.get("HTTP_AUTHORIZATION"), environ[_SHOWN], host)
        if refusal is not None:
            status, why = refusal
            challenge = [("WWW-Authenticate", "Bearer")] if status == UNAUTHORIZED else []
            return answer(status, why, *challenge)
        if environ["PATH_INFO"] != PATH:
            return answer("404 Not Found", f"not found; metrics are at {PATH}")
        if method not in ("GET", "HEAD"):
            return answer("405 Method Not Allowed", f"use {_METHODS}", ("Allow", _METHODS))
        if method == "GET":
            return app(environ, start_response)
        list(app({**environ, "REQUEST_METHOD": "GET"}, start_response))
        return []

    return guarded
