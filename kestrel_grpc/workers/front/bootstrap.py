"""The configuration of the front: Envoy, which accepts the clients' connections and gives each call to a worker.

envoy.yaml and listener.yaml are the configuration; this module fills in what the settings decide. With workers it is
fixed from start to end: a worker that ends is found by its health, and comes back at the same address. A cluster's
servers are listed in a file, which Envoy reads again when it changes.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2

from ...edge.failures.status_message import DOMAIN, status_message
from ...security.identity.front_headers import NOT_BEGUN, PEER_HEADER
from ...settings.server import ServerConfig

CLUSTER = "workers"
SERVERS = "kestrel"
"""The name of a cluster's servers in the file that lists them."""
OWN, CLIENTS = "own", "clients"
"""The files, in the front's folder, that name its own certificate and the authorities of clients."""
_TYPE = "type.googleapis.com/envoy"
_KIB = 1024
_STREAM_WINDOW, _CONNECTION_WINDOW = 64 * _KIB, 512 * _KIB
"""Bytes that Envoy accepts of a call and of a connection before a worker reads them."""
_HANDSHAKE = "10.000s"
_HOSTILE_HEADERS = 4
"""Headers of this many times the limit end here. The worker refuses smaller ones with a status that names the limit."""
_LOST = "the worker that had the call has ended, or no worker answers; the call may be sent again"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPlan:
    """What the front needs. ``sockets``: host and port of each listening socket. ``workers``: a unix socket each.
    ``endpoints``: instead of workers, the file that lists servers and may change (cluster/directory.py)."""

    folder: Path
    sockets: Sequence[tuple[str, int]]
    workers: Sequence[str] = ()
    endpoints: Path | None = None
    server: ServerConfig

    def admin(self, index: int) -> Path:
        """The socket of the administration of one Envoy."""
        return self.folder / f"admin-{index}"


def bootstrap(plan: FrontPlan, index: int, count: int) -> str:
    """The whole configuration of Envoy number ``index`` of ``count``, which share the addresses, in YAML."""
    most = plan.server.security.connections.connections
    pipes = [{"endpoint": {"address": {"pipe": {"path": path}}}} for path in plan.workers]
    assignment = {"cluster_name": CLUSTER, "endpoints": [{"lb_endpoints": pipes}]}
    return _filled(
        "envoy",
        listeners="".join(_listener(plan, *socket) for socket in plan.sockets),
        admin=str(plan.admin(index)),
        overload=None if most is None else _overload(math.ceil(most / count)),
        cluster_type="STATIC" if plan.endpoints is None else "EDS",
        assignment=assignment if plan.endpoints is None else None,
        eds=None if plan.endpoints is None else _endpoints(plan.endpoints),
        connection_window=_CONNECTION_WINDOW,
        stream_window=_STREAM_WINDOW,
        worker_window=16 * _CONNECTION_WINDOW,
    )


def secrets(certificate: str, private_key: str, client_ca: str | None) -> dict[str, Any]:
    """The contents of the files that name certificates, by the file's name. Envoy reads the certificates again when a
    name changes."""
    own = {"certificate_chain": {"filename": certificate}, "private_key": {"filename": private_key}}
    found = {OWN: _secret(OWN, tls_certificate=own)}
    if client_ca is not None:
        clients = {"trusted_ca": {"filename": client_ca}}
        found[CLIENTS] = _secret(CLIENTS, validation_context=clients)
    return found


def _secret(name: str, **fields: Any) -> dict[str, Any]:
    kind = f"{_TYPE}.extensions.transport_sockets.tls.v3.Secret"
    return {"resources": [{"@type": kind, "name": name, **fields}]}


def _listener(plan: FrontPlan, host: str, port: int) -> str:
    security = plan.server.security
    limits, asks = security.connections, security.client_ca is not None
    keepalive = None
    if limits.keepalive_s is not None:
        keepalive = {
            "interval": _seconds(limits.keepalive_s),
            "timeout": _seconds(limits.keepalive_timeout_s),
        }
    most_kib = math.ceil(_HOSTILE_HEADERS * limits.metadata_bytes / _KIB)
    return _filled(
        "listener",
        name=f"{host}:{port}",
        host=host,
        port=port,
        ipv4_compat=host == "::",
        connection_window=_CONNECTION_WINDOW,
        stream_window=_STREAM_WINDOW,
        tls=None if security.tls is None else _tls(plan),
        handshake_timeout=None if security.tls is None else _HANDSHAKE,
        most_headers_kib=max(most_kib, 60),
        streams=limits.streams,
        keepalive=keepalive,
        age=None if limits.age_s is None else _seconds(limits.age_s),
        certificate_header="SANITIZE_SET" if asks else "SANITIZE",
        certificate_parts={"chain": True} if asks else None,
        lost=_LOST,
        lost_details=_lost_details(),
        peer_header=PEER_HEADER,
        not_begun=NOT_BEGUN,
    )


def _endpoints(file: Path) -> dict[str, Any]:
    source = {"path": str(file), "watched_directory": {"path": str(file.parent)}}
    config = {"path_config_source": source, "resource_api_version": "V3"}
    return {"service_name": SERVERS, "eds_config": config}


def _tls(plan: FrontPlan) -> dict[str, Any]:
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificate_sds_secret_configs": [_source(plan, OWN)],
    }
    context: dict[str, Any] = {"common_tls_context": common}
    if plan.server.security.client_ca is not None:
        common["validation_context_sds_secret_config"] = _source(plan, CLIENTS)
        context["require_client_certificate"] = True
    return _typed(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        **context,
    )


def _source(plan: FrontPlan, name: str) -> dict[str, Any]:
    path = {"path_config_source": {"path": str(plan.folder / name)}, "resource_api_version": "V3"}
    return {"name": name, "sds_config": path}


def _overload(most_connections: int) -> dict[str, Any]:
    monitor = _typed(
        "envoy.resource_monitors.global_downstream_max_connections",
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=most_connections,
    )
    return {"resource_monitors": [monitor]}


def _lost_details() -> str:
    """The details of the server's UNAVAILABLE."""
    info = error_details_pb2.ErrorInfo(reason="WORKER_UNAVAILABLE", domain=DOMAIN)
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1))
    status = status_message(code_pb2.UNAVAILABLE, _LOST, (info, retry))
    return base64.b64encode(status.SerializeToString()).decode().rstrip("=")


def _filled(file: str, *, listeners: str = "", **values: Any) -> str:
    """The text of a file, with ``values`` as JSON. ``listeners`` is YAML already."""
    text = Path(__file__).with_name(f"{file}.yaml").read_text("utf-8")
    shown = {key: json.dumps(value) for key, value in values.items()}
    return Template(text).substitute(shown, listeners=listeners)


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPE}.{kind}", **fields}}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"
