"""The settings of a connection: address, TLS, token, limits, retries. ``channel.py`` uses them."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from .directory import SCHEME as DIRECTORY
from .errors import InvalidRequestError
from .version import __version__

DEFAULT_PORT = 50051
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_MAX_MESSAGE_BYTES = 33 * 1024 * 1024
_URL = re.compile(r"(https?)://([^/]*)", re.IGNORECASE)
_PORT = re.compile(r"(?!unix|vsock).*:([0-9]+)")
_SCHEME = re.compile(r"(dns|ipv4|ipv6|passthrough):")
_ANY_SCHEME = re.compile(r"(dns|ipv4|ipv6|passthrough|unix|unix-abstract|vsock|xds):")
_FOREVER_S = 1e9
"""Thirty years. gRPC's clock overflows at a longer timeout, and the call would expire at once."""
VISION_SERVICE = "kestrel.v1.VisionService"
IMAGE_SERVICE = "kestrel.v1.ImageService"
MODEL_SERVICE = "kestrel.v1.ModelService"

ChannelOptions: TypeAlias = Sequence[tuple[str, str | int]]
Metadata: TypeAlias = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]
"""Metadata of a call: bytes only under keys that end in ``-bin``."""

IMAGE_HEADER = "x-kestrel-image"
"""Names what a call is about: the digest or id of its image, or a session. Calls with the same value go to the same
server of several."""

SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": name} for name in (VISION_SERVICE, IMAGE_SERVICE, MODEL_SERVICE)],
            # Every method is idempotent and may be retried. The server's pushback overrides these pauses; a negative
            # pushback forbids the retry.
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
"""gRPC's service config: retries, and calls distributed over all addresses that the name resolves to."""

_LARGEST_RING = 4096
"""gRPC's own limit on the places of a ring."""
_PLACES_OF_A_SERVER = 256
"""Places of a server on the ring, however many servers there are. So a server that joins takes over some images, and
no others move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS settings. Certificates and keys are PEM: the contents as bytes, or the path of a file."""

    root_certificates: bytes | str | os.PathLike[str] | None = None
    """The trusted authorities; default: gRPC's built-in list of public ones."""
    certificate: bytes | str | os.PathLike[str] | None = field(default=None, repr=False)
    """The client's certificate chain, for servers that ask for one. Needs ``private_key``."""
    private_key: bytes | str | os.PathLike[str] | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name that the server's certificate must contain; default: the host of the target."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidRequestError("tls: certificate and private_key must be given together")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The arguments of a client, checked. Raises InvalidRequestError, naming the argument that is invalid."""

    target: str | Sequence[str] = DEFAULT_TARGET
    tls: Tls | bool = False
    token: str | None = field(default=None, repr=False)
    timeout: float | None = DEFAULT_TIMEOUT_S
    hedge_after: float | None = None
    metadata: Metadata | None = field(default=None, repr=False)
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    channel_options: ChannelOptions = ()

    def __post_init__(self) -> None:
        if not self.target:
            raise InvalidRequestError("target: must not be empty")
        for target in (self.target,) if isinstance(self.target, str) else self.target:
            _check_target(target)
        if self.directory is not None and not self.directory:
            raise InvalidRequestError(
                f"target: {DIRECTORY} needs a file or an http(s) address, like "
                f"{DIRECTORY}/run/kestrel/servers"
            )
        if not isinstance(self.target, str) or self.directory is not None:
            if not isinstance(self.target, str):
                _joined(self.target)
            if self.tls and not (isinstance(self.tls, Tls) and self.tls.server_name):
                raise InvalidRequestError(
                    "tls: several addresses need Tls(server_name=...), the name that the certificate of each server "
                    "contains"
                )
        if self.max_message_bytes < 1:
            raise InvalidRequestError(
                f"max_message_bytes={self.max_message_bytes}: must be at least 1"
            )
        self.call_timeout(None)
        if self.hedge_after is not None and not self.hedge_after > 0:
            raise InvalidRequestError(
                f"hedge_after={self.hedge_after}: must be above 0, or None to send no call twice"
            )
        _pairs(self.metadata)
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise InvalidRequestError("token: must be visible ASCII characters")
        # Of a directory's servers this is checked when they are known.
        if self.token is not None and not (self.tls or self.directory or is_local(self.target)):
            raise InvalidRequestError(
                f"token: would be sent to {self.target} unencrypted; pass tls=True or a Tls"
            )

    @property
    def directory(self) -> str | None:
        """The file or address that lists the servers; None if the target names them."""
        if isinstance(self.target, str) and self.target.startswith(DIRECTORY):
            return self.target.removeprefix(DIRECTORY)
        return None

    @property
    def address(self) -> str:
        """``target`` in gRPC's form, with a port. Several addresses become one target."""
        return with_port(self.target) if isinstance(self.target, str) else _joined(self.target)

    @property
    def options(self) -> list[tuple[str, str | int]]:
        """Options of the channel. The caller's options are last and take precedence."""
        options: list[tuple[str, str | int]] = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            # gRPC retries a call only if the whole request fits this buffer. Its default, 256 KiB, is less than a
            # photograph.
            ("grpc.per_rpc_retry_buffer_size", self.max_message_bytes + 1024 * 1024),
            ("grpc.service_config", json.dumps(self._service_config())),
            # gRPC's default, 1000, is longer than all pauses between attempts: no retry would get a new connection.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.primary_user_agent", f"kestrel-client/{__version__}"),
        ]
        if is_local(self.target):
            # A proxy cannot reach this machine's loopback. gRPC asks it all the same, unless no_proxy names the host.
            options.append(("grpc.enable_http_proxy", 0))
        if isinstance(self.tls, Tls) and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        elif not isinstance(self.target, str):
            # The default is the whole list, which is no valid authority.
            options.append(("grpc.default_authority", with_port(self.target[0])))
        if not isinstance(self.target, str):
            options.append(("grpc.lb.ring_hash.ring_size_cap", self._ring_places))
        return [*options, *self.channel_options]

    @property
    def _ring_places(self) -> int:
        """Only of a list it is known how many servers there are."""
        if isinstance(self.target, str):
            return _LARGEST_RING
        return _PLACES_OF_A_SERVER * len(self.target)

    def _service_config(self) -> dict[str, Any]:
        """For what may be several servers (a list, a directory, or a name whose addresses DNS gives): a call goes to
        the server that IMAGE_HEADER selects, or to the next one that serves."""
        if isinstance(self.target, str) and not (
            self.target.startswith(("dns:", DIRECTORY)) or "," in self.target
        ):
            return SERVICE_CONFIG
        # gRPC reads ``requestHashHeader`` only if this variable is true, when a channel reads its service config.
        os.environ["GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"] = "true"
        places = self._ring_places
        ring = {"minRingSize": places, "maxRingSize": places, "requestHashHeader": IMAGE_HEADER}
        return {
            **SERVICE_CONFIG,
            # gRPC takes the first policy that it knows.
            "loadBalancingConfig": [{"ring_hash_experimental": ring}, {"round_robin": {}}],
            # A server that drains is left before it closes its connections.
            "healthCheckConfig": {"serviceName": ""},
        }

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Reads the certificates and keys. Returns None without TLS. Raises InvalidRequestError."""
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
        """The timeout of a call in seconds: its ``own``, or the client's; None for no limit."""
        timeout = self.timeout if own is None else own
        if timeout is None:
            return None
        if not timeout > 0:
            raise InvalidRequestError(f"timeout={timeout}: must be above 0, or None for no limit")
        return timeout if timeout < _FOREVER_S else None

    def call_metadata(
        self, own: Metadata | None, about: str = ""
    ) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of a call: the client's, the call's ``own``, and without TLS the token.

        ``about``: the value of IMAGE_HEADER, unless the caller gives one; empty for none.
        """
        pairs = (*_pairs(self.metadata), *_pairs(own))
        if about and not any(key == IMAGE_HEADER for key, _ in pairs):
            pairs = (*pairs, (IMAGE_HEADER, about))
        if self.token is not None and not self.tls:
            return (*pairs, ("authorization", f"Bearer {self.token}"))
        return pairs


def with_port(target: str) -> str:
    """A target in gRPC's form. A host without a port gets the server's default port; gRPC would use 443."""
    if target.startswith(("unix:", "unix-abstract:", "vsock:")) or "," in target:
        return target
    scheme, slashes, host = target.rpartition("/")
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
    return f"{target}:{DEFAULT_PORT}" if bare and host else target


def _check_target(target: str) -> None:
    """Raises InvalidRequestError."""
    if target.startswith(DIRECTORY):
        return
    if (scheme := _URL.match(target)) is not None:
        tls = ", with TLS" if scheme[1].lower() == "https" else ""
        raise InvalidRequestError(
            f"target: {target} is a web address; gRPC takes HOST:PORT{tls}: {scheme[2]}"
        )
    if "," in target and not _ANY_SCHEME.match(target):
        listed = [each.strip() for each in target.split(",")]
        raise InvalidRequestError(
            f"target: {target!r} names several servers; give a list: {listed}"
        )
    if (port := _PORT.fullmatch(with_port(target))) and not 1 <= int(port[1]) <= 65535:
        raise InvalidRequestError(f"target: {target} has port {port[1]}; a port is 1 to 65535")


def _joined(targets: Sequence[str]) -> str:
    """Several addresses as one target. Raises InvalidRequestError: gRPC takes only literal addresses of one family."""
    addresses, versions = [], set()
    for target in targets:
        address = with_port(target)
        host = _host(address)
        try:
            parsed = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            raise InvalidRequestError(
                f"target: a list takes IP addresses like 10.0.0.7:50051, not {target!r}; "
                "for a name that DNS resolves to all servers, give 'dns:///NAME:PORT' alone"
            ) from None
        if not re.fullmatch(r".*:[0-9]+", address):
            raise InvalidRequestError(f"target: {target!r} needs a number as its port")
        addresses.append(address.replace("localhost", "127.0.0.1"))
        versions.add(parsed.version)
    if len(versions) > 1:
        raise InvalidRequestError("target: a list takes IPv4 or IPv6 addresses, not both")
    return f"ipv{versions.pop()}:{','.join(addresses)}"


def _pairs(metadata: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    if metadata is None:
        return ()
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
    return tuple((_key(key.lower(), value), value) for key, value in pairs)


def _key(key: str, value: str | bytes) -> str:
    """Checks one pair. gRPC would fail a call with an invalid key or value with INTERNAL, without naming it."""
    if not re.fullmatch(r"[0-9a-z_.-]+", key):
        raise InvalidRequestError(
            f"metadata: the key {key!r} may contain only letters, digits, '_', '-' and '.'"
        )
    if not key.endswith("-bin") and not (isinstance(value, str) and re.fullmatch(r"[ -~]*", value)):
        raise InvalidRequestError(f"metadata: the value of {key!r} must be printable ASCII text")
    return key


def is_local(target: str | Sequence[str]) -> bool:
    """Whether this gRPC target, or each of several, is on this machine."""
    if not isinstance(target, str):
        return all(map(is_local, target))
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
        raise InvalidRequestError(f"tls: {name} {os.fspath(source)} is not a PEM file")
    return content
