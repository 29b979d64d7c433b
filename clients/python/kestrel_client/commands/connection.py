"""The flags of the connection, which all client commands share, and the messages for the SDK's errors.

The client commands use kestrel_client and import neither torch nor numpy.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from kestrel_client import (
    AsyncKestrelClient,
    DeadlineExceededError,
    InvalidArgumentError,
    InvalidRequestError,
    KestrelAdmin,
    KestrelClient,
    KestrelError,
    OverloadedError,
    PermissionDeniedError,
    RpcError,
    Tls,
    UnauthenticatedError,
    UnavailableError,
)
from kestrel_client.connection import ChannelOptions, Connection, is_local, with_port
from kestrel_client.errors import from_rpc_error

from .flags import DEFAULT_ADDRESS, Flags, SettingsError
from .parser import EXIT_FAILED, CommandError, suggestion
from .requests.flags import flag_of
from .requests.inputs import Input
from .terminal import styled
from .values import timeout

DEFAULT_TIMEOUT_S = 300.0
_Image = TypeVar("_Image", bound=Input | None)
CallMetadata = tuple[tuple[str, str | bytes], ...]


BUSY = ("QUEUE_FULL", "DISPLACED", "PIXELS_WAITING", "QUEUE_TIMEOUT")
"""Reasons for which a busy server refuses the requests of all callers. Its message addresses the operator."""
_TOKENS = ("KESTREL_TOKEN", "KESTREL_API_KEY")
"""Variables that may hold the token. It has no flag, because every user of the machine can read processes' flags."""


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser).add(
        "--timeout",
        type=timeout,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="limit on the time for an answer",
    )


def add_server_flags(parser: argparse.ArgumentParser, *, again: bool = False) -> Flags:
    """Adds the flags of the server's address and of TLS. Returns their group. ``again``: as for Flags."""
    flags = Flags(
        parser,
        "connection",
        again=again,
        description="The variable KESTREL_TOKEN, or else KESTREL_API_KEY, may hold a token.",
    )
    flags.add(
        "--server",
        default=DEFAULT_ADDRESS,
        metavar="ADDRESS",
        help="address of the server: HOST:PORT or unix:PATH; several IP addresses separated by commas; "
        "directory:FILE or directory:URL, a list of servers that may change",
    )
    flags.add(
        "--tls",
        choices=("on", "off"),
        nargs="?",
        const="on",
        default="off",
        help="use TLS; the other TLS flags turn it on too",
    )
    flags.add("--ca", metavar="FILE", shown="public authorities", help="trusted authorities (PEM)")
    flags.add("--client-cert", metavar="FILE", shown="none", help="the client's certificate (PEM)")
    flags.add(
        "--client-key", metavar="FILE", shown="none", help="private key of --client-cert (PEM)"
    )
    flags.add(
        "--server-name",
        metavar="NAME",
        shown="the address's host",
        help="name that the server's certificate must contain",
    )
    return flags


def open_client(args: argparse.Namespace, timeout: float | None) -> KestrelClient:
    """A client of ``args.server``. Raises the SDK's KestrelError if the arguments are invalid."""
    return KestrelClient(_target(args), timeout=timeout, **_security(args))


def open_async_client(
    args: argparse.Namespace, channel_options: ChannelOptions = ()
) -> AsyncKestrelClient:
    """Like ``open_client``, but asynchronous and with the timeout of ``args``."""
    security = _security(args)
    return AsyncKestrelClient(
        _target(args), timeout=args.timeout, channel_options=channel_options, **security
    )


def servers_of(args: argparse.Namespace) -> list[str]:
    """The addresses of ``--server``."""
    return [address for each in args.server.split(",") if (address := each.strip())]


def _target(args: argparse.Namespace) -> str | list[str]:
    addresses = servers_of(args)
    return addresses if len(addresses) > 1 else str(args.server)


@contextmanager
def open_channel(args: argparse.Namespace) -> Iterator[tuple[grpc.Channel, CallMetadata]]:
    """A channel for calls that the SDK has no methods for, and the metadata of calls. Errors as for ``connected``."""
    _check_single(args)
    with sdk_errors(args):
        connection = Connection(target=args.server, **_security(args))
        credentials = connection.credentials()
        channel = (
            grpc.insecure_channel(connection.address, connection.options)
            if credentials is None
            else grpc.secure_channel(connection.address, credentials, connection.options)
        )
        with channel:
            try:
                yield channel, connection.call_metadata(None)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None


@contextmanager
def connected_admin(args: argparse.Namespace) -> Iterator[KestrelAdmin]:
    """A client of AdminService at ``args.server``. The SDK's errors are raised as CommandErrors."""
    _check_single(args)
    with sdk_errors(args), KestrelAdmin(args.server, **_security(args)) as admin:
        yield admin


def _check_single(args: argparse.Namespace) -> None:
    if len(servers_of(args)) > 1 or args.server.startswith("directory:"):
        raise SettingsError(f"--server {args.server}: this command takes one server")


def token_variable() -> str | None:
    """The variable that holds the token, if one does."""
    return next((name for name in _TOKENS if os.environ.get(name)), None)


def _security(args: argparse.Namespace) -> dict[str, Any]:
    """TLS and token, as keyword arguments of clients."""
    parts = (args.ca, args.client_cert, args.client_key, args.server_name)
    tls: Tls | bool = args.tls != "off"
    if any(parts) or tls:
        ca, certificate, key, name = parts
        tls = Tls(root_certificates=ca, certificate=certificate, private_key=key, server_name=name)
    variable = token_variable()
    return {"tls": tls, "token": None if variable is None else os.environ[variable]}


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[KestrelClient]:
    """A client of ``args.server``. The SDK's errors are raised as CommandErrors."""
    with sdk_errors(args), open_client(args, args.timeout) as client:
        yield client


@contextmanager
def sdk_errors(args: argparse.Namespace) -> Iterator[None]:
    """Raises the SDK's errors as CommandErrors."""
    try:
        yield
    except InvalidRequestError as error:
        if str(error).startswith("target: "):
            raise SettingsError(f"--server: {str(error).removeprefix('target: ')}") from None
        if str(error).startswith("token: would be sent"):
            raise SettingsError(
                f"the token would be sent to {args.server} unencrypted; set --tls, or --ca with the authority's file"
            ) from None
        raise CommandError(_with_flags(str(error))) from None
    except KestrelError as error:
        raise CommandError(
            failure_text(error, args.server, getattr(args, "timeout", None), args)
        ) from None


def failure_text(
    error: KestrelError,
    server: str,
    timeout_s: float | None,
    args: argparse.Namespace | None = None,
    image: str | None = None,
) -> str:
    """Describes an error of the SDK in one line for the user. ``args``: of the request, whose flags name fields in
    place of the server's names. ``image``: names the only image of the request in place of its field."""
    match error:
        case UnavailableError():
            # Only servers send a reason. Without one, no server answered.
            why = error.message if error.reason else _unreached(error.message, server)
            return f"server {server} is unavailable: {why}"
        case DeadlineExceededError() if timeout_s is not None:
            # Server and client both notice the end of the time. Either may be first.
            return f"no answer within {timeout_s:g} s; increase --timeout [DEADLINE_EXCEEDED]"
        case OverloadedError() if error.reason in BUSY:
            after = error.retry_after_s
            wait = "" if after is None else f" in {max(after, 0.1):.2g} s"
            return f"server {server} is busy; try again{wait} [RESOURCE_EXHAUSTED]"
        case InvalidArgumentError():
            return f"{_as_given(error, args, image)} [INVALID_ARGUMENT]"
        case RpcError(reason="MODEL_NOT_FOUND" | "SKILL_NOT_FOUND"):
            return f"{error.message}{_near_name(error.message)} [{error.code.name}]"
        case UnauthenticatedError():
            return f"{error.message}; {_about_token()} [UNAUTHENTICATED]"
        case RpcError():
            return f"{error.message} [{error.code.name}]"
    return str(error)


def _as_given(
    error: InvalidArgumentError, args: argparse.Namespace | None, image: str | None
) -> str:
    """The server's message, which begins with a field, with the user's own name of what fills the field."""
    field, colon, rest = error.message.partition(": ")
    if not colon or all(field != each.field for each in error.field_violations):
        return error.message
    if field in ("image", "images[0]") and image is not None:
        return f"{image}: {rest}" if image else rest
    flag = None if args is None else flag_of(field, args)
    return error.message if flag is None else f"{flag}: {rest}"


def _about_token() -> str:
    variable = token_variable()
    if variable is None:
        return "set KESTREL_TOKEN"
    return f"{variable} held the token; ask the operator for another ('kestrel-grpc token')"


_FLAGS_OF_TLS = {
    "root_certificates": "--ca",
    "private_key": "--client-key",
    "certificate": "--client-cert",
}


def _with_flags(message: str) -> str:
    """The SDK's message about TLS, with the flags instead of the SDK's arguments."""
    if message.startswith("tls: "):
        for name, flag in _FLAGS_OF_TLS.items():
            message = re.sub(rf"\b{name}\b(?! chain)", flag, message)
    return message


def _near_name(message: str) -> str:
    """A suggestion from the server's message: "'x' is not served; this server serves y, z", or "the model has no skill
    'x'; its skills are y, z"."""
    found = re.search(r"'([^']*)'[^']*; (?:this server serves|its skills are) (.+)", message)
    return suggestion(found[1], found[2].split(", ")) if found else ""


def ask_each(
    args: argparse.Namespace, inputs: Sequence[_Image], ask: Callable[[KestrelClient, _Image], bool]
) -> int:
    """Calls ``ask`` with a client and each of the images. Returns the exit status.

    ``ask`` returns whether all has succeeded. The error of one of several images is printed, and the others follow. An
    error that would affect all images, such as an unavailable server, ends the command.
    """
    status = 0
    with connected(args) as client:
        for each in inputs:
            try:
                if not ask(client, each):
                    status = EXIT_FAILED
            except (UnavailableError, UnauthenticatedError, PermissionDeniedError):
                raise
            except (KestrelError, CommandError) as error:
                only, why = each is None or len(inputs) == 1, str(error)
                if isinstance(error, RpcError):
                    image = None if each is None else each.shown if only else ""
                    why = failure_text(error, args.server, args.timeout, args, image)
                    if only:
                        raise CommandError(why) from None
                if each is None or only:
                    raise
                status = EXIT_FAILED
                label = styled("failed", "red", sys.stderr)
                print(f"{label}: {each.name}: {why}", file=sys.stderr, flush=True)
    return status


_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that gRPC reads, in its order."""
_CAUSES = {
    "wrong_version_number": "the server does not use TLS there; omit --tls, --ca and the other flags of TLS",
    "hostname verification": "the server's certificate does not contain the address's host; "
    "set --server-name to a name in it",
    "certificate has expired": "the server's certificate has expired; its operator must renew it",
    "certificate_verify_failed": "no trusted authority signed the server's certificate; "
    "set --ca to the file of the authority that did",
    "handshake": "no TLS connection; do both sides use TLS and trust each other?",
    "socket closed": "the server closed the connection. If it uses TLS, set --ca FILE or --tls; if it asks for a "
    "client's certificate, set --client-cert and --client-key",
    "failed parsing http/2": "that port speaks another protocol, such as HTTP or TLS; give the address of the gRPC "
    "port (serve --listen), or set --tls",
    "resolving": "the host's name is not known; check --server",
}
"""What gRPC's messages about failed connections contain, and what that means. The first that fits counts."""


def _unreached(message: str, server: str) -> str:
    """Describes a failed connection: the part of gRPC's message that names the cause, with a hint."""
    cause = message.rpartition("last error: ")[2]
    sign = next((sign for sign in _CAUSES if sign in cause.lower()), "")
    hint = _CAUSES.get(sign, "no server answers there; is 'kestrel-grpc serve' running?")
    is_proxys = sign in ("", "socket closed", "resolving") and _host(server) not in cause
    if is_proxys and (variable := _proxy_variable(server)) is not None:
        hint = f"the call went to the proxy of {variable}; to call the server directly, add its host to no_proxy"
    return f"{hint} ({cause})"


def _proxy_variable(server: str) -> str | None:
    """The variable of the proxy through which gRPC calls ``server``; None without one."""
    if not server or is_local(server):
        return None
    excepted = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
    if any(_host(server).endswith(each.strip()) for each in excepted.split(",") if each.strip()):
        return None
    return next((name for name in _PROXIES if os.environ.get(name)), None)


def _host(server: str) -> str:
    return with_port(server).rpartition("/")[2].rpartition(":")[0].strip("[]")
