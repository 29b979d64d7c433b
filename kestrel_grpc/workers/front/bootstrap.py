"""The configuration of the front: Envoy, which accepts the clients' connections and gives each call to a worker.

This module only builds the configuration, as plain values. Envoy reads it as JSON. With workers it is fixed from start
to end: a worker that ends is found by its health, and comes back at the same address. A cluster's servers are listed in
a file, which Envoy reads again when it changes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
_MANY = 1_000_000
"""Envoy's own limits on connections and calls to workers are off: the workers have limits."""
_BALANCE_PERCENT = 150
"""A worker gets at most this share of the mean number of calls in progress. Further calls go to the next worker."""
_STREAM_WINDOW, _CONNECTION_WINDOW = 64 * _KIB, 512 * _KIB
"""Bytes that Envoy accepts of a call and of a connection before a worker reads them."""
_CHECK_S, _CHECK_TIMEOUT_S = 0.25, 2.0
"""A worker that refuses connections, or says that it drains, is left after one check."""
_FAILURES = 3
"""A worker is left after this many failed connections in a row, until its next successful check."""
_HEADERS_S = 10.0
"""Seconds in which a handshake and the headers of a call must arrive."""
_HOSTILE_HEADERS = 4
"""Headers of this many times the limit end here. The worker refuses smaller ones with a status that names the limit."""
_IMAGE_HEADER = "x-kestrel-image"
"""kestrel_client.connection.IMAGE_HEADER. That module loads gRPC, which the supervisor must not."""
_NOBODY = {"address_prefix": "192.0.2.255", "prefix_len": 32}
"""An address that no client has (RFC 5737)."""
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


def bootstrap(plan: FrontPlan, index: int, count: int) -> dict[str, Any]:
    """The whole configuration of Envoy number ``index`` of ``count``, which share the addresses."""
    most = plan.server.security.connections.connections
    return {
        # Envoy demands a name of those that read certificates from files.
        "node": {"id": "front", "cluster": "kestrel"},
        "admin": {"address": {"pipe": {"path": str(plan.admin(index))}}},
        "static_resources": {
            "listeners": [_listener(plan, *socket) for socket in plan.sockets],
            "clusters": [_workers(plan)],
        },
        **_overload(None if most is None else math.ceil(most / count)),
    }


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


def _listener(plan: FrontPlan, host: str, port: int) -> dict[str, Any]:
    chain: dict[str, Any] = {"filters": [_calls(plan)]}
    if plan.server.security.tls is not None:
        chain["transport_socket"] = _tls(plan)
        chain["transport_socket_connect_timeout"] = _seconds(_HEADERS_S)
    address: dict[str, Any] = {"address": host, "port_value": port}
    if host == "::":
        address["ipv4_compat"] = True
    return {
        "name": f"{host}:{port}",
        "address": {"socket_address": address},
        "per_connection_buffer_limit_bytes": _CONNECTION_WINDOW,
        "filter_chains": [chain],
    }


def _calls(plan: FrontPlan) -> dict[str, Any]:
    security = plan.server.security
    limits = security.connections
    most_kib = math.ceil(_HOSTILE_HEADERS * limits.metadata_bytes / _KIB)
    http2: dict[str, Any] = {
        "max_concurrent_streams": limits.streams,
        "initial_stream_window_size": _STREAM_WINDOW,
        "initial_connection_window_size": _CONNECTION_WINDOW,
    }
    if limits.keepalive_s is not None:
        http2["connection_keepalive"] = {
            "interval": _seconds(limits.keepalive_s),
            "timeout": _seconds(limits.keepalive_timeout_s),
        }
    http: dict[str, Any] = {"max_headers_count": 1000}
    if limits.age_s is not None:
        http["max_connection_duration"] = _seconds(limits.age_s)
    asks_certificate = security.client_ca is not None
    return _typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="clients",
        codec_type="HTTP2",
        max_request_headers_kb=max(most_kib, 60),
        http2_protocol_options=http2,
        common_http_protocol_options=http,
        request_headers_timeout=_seconds(_HEADERS_S),
        # Streams of health and load may be silent for ever. The workers end the others.
        stream_idle_timeout="0s",
        # Metadata passes as it is. The address of the client is no proxy's, whatever a caller's headers say.
        use_remote_address=True,
        skip_xff_append=True,
        generate_request_id=False,
        preserve_external_request_id=True,
        server_header_transformation="PASS_THROUGH",
        # Headers with which Envoy lets callers on its own network change timeouts and retries have no effect.
        internal_address_config={"unix_sockets": False, "cidr_ranges": [_NOBODY]},
        **_certificate_header(asks_certificate),
        local_reply_config={"mappers": [_lost()]},
        route_config={
            "virtual_hosts": [{"name": CLUSTER, "domains": ["*"], "routes": [_route()]}],
            "request_headers_to_add": [_header(PEER_HEADER, "%DOWNSTREAM_REMOTE_ADDRESS%")],
        },
        http_filters=[
            _typed(
                "envoy.filters.http.router",
                "extensions.filters.http.router.v3.Router",
                suppress_envoy_headers=True,
            )
        ],
    )


def _certificate_header(asks: bool) -> dict[str, Any]:
    """The workers get the certificates of a client that showed any, and nothing that a client writes."""
    if not asks:
        return {"forward_client_cert_details": "SANITIZE"}
    return {
        "forward_client_cert_details": "SANITIZE_SET",
        "set_current_client_cert_details": {"chain": True},
    }


def _route() -> dict[str, Any]:
    return {
        "match": {"prefix": "/"},
        "response_headers_to_remove": [NOT_BEGUN],
        "route": {
            "cluster": CLUSTER,
            # The worker keeps the deadline of a call.
            "timeout": "0s",
            "hash_policy": [{"header": {"header_name": _IMAGE_HEADER}}],
            # Only calls that no worker has seen, or that one refused because it loads or shuts down. Clients decide
            # about all others.
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,retriable-headers",
                "retriable_headers": [{"name": NOT_BEGUN, "present_match": True}],
                # The pauses between them last longer together than the time between two health checks.
                "num_retries": 5,
                "retry_host_predicate": [
                    _typed(
                        "envoy.retry_host_predicates.previous_hosts",
                        "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
                    )
                ],
                "host_selection_retry_max_attempts": 10,
            },
        },
    }


def _workers(plan: FrontPlan) -> dict[str, Any]:
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    thresholds = dict.fromkeys(limits, _MANY)
    http2 = {
        "initial_stream_window_size": _STREAM_WINDOW,
        "initial_connection_window_size": 16 * _CONNECTION_WINDOW,
    }
    return {
        "name": CLUSTER,
        **_found(plan),
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": _CONNECTION_WINDOW,
        # When a worker comes or goes, this moves fewer images of the others than Envoy's ring.
        "lb_policy": "MAGLEV",
        "common_lb_config": {
            "consistent_hashing_lb_config": {"hash_balance_factor": _BALANCE_PERCENT},
            # If no worker is healthy, calls go to any: its status says more than Envoy's.
            "healthy_panic_threshold": {"value": 1},
        },
        "circuit_breakers": {"thresholds": [thresholds]},
        "health_checks": [
            {
                "timeout": _seconds(_CHECK_TIMEOUT_S),
                "interval": _seconds(_CHECK_S),
                "no_traffic_interval": _seconds(_CHECK_S),
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        # A worker that has just died has no calls in progress, so it would get all new ones until the next check.
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": _FAILURES,
            "enforcing_local_origin_success_rate": 0,
            "enforcing_consecutive_5xx": 0,
            "enforcing_success_rate": 0,
            "base_ejection_time": "1s",
            "max_ejection_time": "1s",
            "max_ejection_percent": 100,
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": http2},
            }
        },
    }


def _found(plan: FrontPlan) -> dict[str, Any]:
    """Where the workers are."""
    if plan.endpoints is None:
        pipes = [{"endpoint": {"address": {"pipe": {"path": path}}}} for path in plan.workers]
        assignment = {"cluster_name": CLUSTER, "endpoints": [{"lb_endpoints": pipes}]}
        return {"type": "STATIC", "load_assignment": assignment}
    file = {"path": str(plan.endpoints), "watched_directory": {"path": str(plan.endpoints.parent)}}
    source = {"path_config_source": file, "resource_api_version": "V3"}
    return {"type": "EDS", "eds_cluster_config": {"service_name": SERVERS, "eds_config": source}}


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


def _overload(most_connections: int | None) -> dict[str, Any]:
    if most_connections is None:
        return {}
    monitor = _typed(
        "envoy.resource_monitors.global_downstream_max_connections",
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=most_connections,
    )
    return {"overload_manager": {"resource_monitors": [monitor]}}


def _lost() -> dict[str, Any]:
    """Gives Envoy's own UNAVAILABLE the details of the server's."""
    info = error_details_pb2.ErrorInfo(reason="WORKER_UNAVAILABLE", domain=DOMAIN)
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1))
    status = status_message(code_pb2.UNAVAILABLE, _LOST, (info, retry))
    text = base64.b64encode(status.SerializeToString()).decode().rstrip("=")
    return {
        "filter": {
            "status_code_filter": {
                "comparison": {"op": "EQ", "value": {"default_value": 503, "runtime_key": "none"}}
            }
        },
        "body": {"inline_string": _LOST},
        "headers_to_add": [_header("grpc-status-details-bin", text)],
    }


def _header(name: str, value: str) -> dict[str, Any]:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPE}.{kind}", **fields}}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"
