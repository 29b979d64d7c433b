"""How a channel to the server is made: address, TLS, token, limits, retries. Opens nothing itself."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc

from .errors import InvalidRequestError
from .version import __version__

DEFAULT_PORT = 50051
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_MAX_MESSAGE_BYTES = 33 * 1024 * 1024
_URL = re.compile(r"(https?)://([^/]*)", re.IGNORECASE)
_SCHEME = re.compile(r"(dns|ipv4|ipv6|passthrough):")
_FOREVER_S = 1e9
"""Thirty years: gRPC's clock overflows some way beyond, and such a call would expire at once."""
HEALTH_CHECK_METHOD = "/grpc.health.v1.Health/Check"
VISION_SERVICE = "kestrel.v1.VisionService"
IMAGE_SERVICE = "kestrel.v1.ImageService"
MODEL_SERVICE = "kestrel.v1.ModelService"

ChannelOptions: TypeAlias = Sequence[tuple[str, str | int]]
Metadata: TypeAlias = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]
"""Metadata of a call: bytes only under keys that end in ``-bin``."""

SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": name} for name in (VISION_SERVICE, IMAGE_SERVICE, MODEL_SERVICE)],
            # Every method may be repeated: doing it twice changes no more than once. The server overrides the pauses
            # by pushback, and forbids a repetition with a negative one.
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ],
}
"""gRPC's service config: retries, and calls spread over all addresses that the name resolves to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How to talk TLS. Certificates and keys are PEM: contents as bytes, or the path of a file."""

    root_certificates: bytes | str | os.PathLike[str] | None = None
    """Who is trusted; default: gRPC's built-in list of public authorities."""
    certificate: bytes | str | os.PathLike[str] | None = field(default=None, repr=False)
    """The client's own certificate chain, if the server asks for one. Needs ``private_key``."""
    private_key: bytes | str | os.PathLike[str] | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name that the server's certificate must hold; default: the host of the target."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidRequestError("tls: certificate and private_key need each other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What both clients need to open a channel and to make a call. Raises InvalidRequestError for what can't work."""

    target: str = DEFAULT_TARGET
    tls: Tls | bool = False
    token: str | None = field(default=None, repr=False)
    timeout: float | None = DEFAULT_TIMEOUT_S
    metadata: Metadata | None = field(default=None, repr=False)
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    channel_options: ChannelOptions = ()

    def __post_init__(self) -> None:
        if not self.target:
            raise InvalidRequestError("target: must not be empty")
        if (scheme := _URL.match(self.target)) is not None:
            tls = ", with TLS" if scheme[1].lower() == "https" else ""
            raise InvalidRequestError(
                f"target: {self.target} is a web address; gRPC takes HOST:PORT{tls}: {scheme[2]}"
            )
        if self.max_message_bytes < 1:
            raise InvalidRequestError(
                f"max_message_bytes={self.max_message_bytes}: must be at least 1"
            )
        self.call_timeout(None)
        _pairs(self.metadata)
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise InvalidRequestError("token: must be visible ASCII characters")
        if self.token is not None and not self.tls and not is_local(self.target):
            raise InvalidRequestError(
                f"token: would travel to {self.target} in the clear; pass tls=True or a Tls"
            )

    @property
    def address(self) -> str:
        """``target`` as gRPC takes it: a host alone gets the server's default port, where gRPC would take 443."""
        if self.target.startswith(("unix:", "unix-abstract:", "vsock:")) or "," in self.target:
            return self.target
        scheme, slashes, host = self.target.rpartition("/")
        if not slashes and (known := _SCHEME.match(host)) is not None:
            scheme, host = known[0], host[known.end() :]
        else:
            scheme += slashes
        if host.startswith("["):
            bare = host.endswith("]")
        elif host.count(":") > 1:  # an IPv6 address without brackets has no port
            return f"{scheme}[{host}]:{DEFAULT_PORT}"
        else:
            bare = ":" not in host
        return f"{self.target}:{DEFAULT_PORT}" if bare and host else self.target

    @property
    def options(self) -> list[tuple[str, str | int]]:
        """Options of the channel; the caller's own come last and win."""
        options: list[tuple[str, str | int]] = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # gRPC repeats a call only while the whole request fits this buffer; its default of 256 KiB is less than
            # a photograph.
            ("grpc.per_rpc_retry_buffer_size", self.max_message_bytes + 1024 * 1024),
            ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
            # gRPC's default of 1000 is more than all pauses between attempts: no attempt would find a new connection.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.primary_user_agent", f"kestrel-client/{__version__}"),
        ]
        if isinstance(self.tls, Tls) and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return [*options, *self.channel_options]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for a channel without TLS. Reads certificates and keys; raises InvalidRequestError if it can't."""
        if not self.tls:
            return None
        tls = self.tls if isinstance(self.tls, Tls) else Tls()
        channel = grpc.ssl_channel_credentials(
            root_certificates=_pem("root_certificates", tls.root_certificates),
            private_key=_pem("private_key", tls.private_key),
            certificate_chain=_pem("certificate", tls.certificate),
        )
        if self.token is None:
            return channel
        token = grpc.access_token_call_credentials(self.token)
        return grpc.composite_channel_credentials(channel, token)

    def call_timeout(self, own: float | None) -> float | None:
        """Seconds that a call may take, the client's if it has none of its ``own``; None: no limit."""
        timeout = self.timeout if own is None else own
        if timeout is None:
            return None
        if not timeout > 0:
            raise InvalidRequestError(f"timeout={timeout}: must be above 0, or None for no limit")
        return timeout if timeout < _FOREVER_S else None

    def call_metadata(self, own: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
        """What a call sends: the client's, the call's own, and without TLS the token."""
        pairs = (*_pairs(self.metadata), *_pairs(own))
        if self.token is not None and not self.tls:
            return (*pairs, ("authorization", f"Bearer {self.token}"))
        return pairs


def _pairs(metadata: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    if metadata is None:
        return ()
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
    return tuple((_key(key.lower(), value), value) for key, value in pairs)


def _key(key: str, value: str | bytes) -> str:
    """gRPC itself would fail such a call with INTERNAL, and name nothing."""
    if not re.fullmatch(r"[0-9a-z_.-]+", key):
        raise InvalidRequestError(f"metadata: {key!r} is not letters, digits, '_', '-' and '.'")
    if not key.endswith("-bin") and not (isinstance(value, str) and re.fullmatch(r"[ -~]*", value)):
        raise InvalidRequestError(f"metadata: the value of {key!r} must be printable ASCII text")
    return key


def is_local(target: str) -> bool:
    """Whether what is sent to this gRPC target stays on this machine."""
    scheme, _, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("dns", "ipv4", "ipv6", "passthrough"):
        target = rest.rpartition("/")[2]
    hosts = [_host(address) for address in target.split(",")]
    return all(map(_is_loopback, hosts))


def _host(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.count(":") > 1 else address.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _pem(name: str, source: bytes | str | os.PathLike[str] | None) -> bytes | None:
    if source is None or isinstance(source, bytes):
        return source
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise InvalidRequestError(
            f"tls: can't read {name} {os.fspath(source)}: {error.strerror or error}"
        ) from error
    if b"-----BEGIN " not in content:
        raise InvalidRequestError(f"tls: {name} {os.fspath(source)} holds no PEM")
    return content
