"""What the client commands share: the flags of the connection, and the SDK's errors as lines for people.

The commands talk through kestrel_client and load neither torch nor numpy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kestrel_client import (
    AsyncKestrelClient,
    DeadlineExceededError,
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
from kestrel_client.connection import Connection
from kestrel_client.errors import from_rpc_error

from ..settings.addresses import DEFAULT_ADDRESS
from ..settings.flags import Flags, SettingsError
from .parser import CommandError, suggestion
from .terminal import styled

DEFAULT_TIMEOUT_S = 300.0
CallMetadata = tuple[tuple[str, str | bytes], ...]


_BUSY = ("QUEUE_FULL", "DISPLACED", "PIXELS_WAITING", "QUEUE_TIMEOUT")
"""Reasons for which a server refuses all callers' requests; its own words are for its operator."""
_TOKENS = ("KESTREL_TOKEN", "KESTREL_API_KEY")
"""Variables that may hold the token. It has no flag: every user of the machine sees the flags of its processes."""


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser).add(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long the answer may take",
    )


def add_server_flags(parser: argparse.ArgumentParser) -> Flags:
    """Where the server is and how to talk to it; returns the group."""
    flags = Flags(
        parser,
        "connection",
        description="A token is taken from the variable KESTREL_TOKEN, else KESTREL_API_KEY.",
    )
    flags.add(
        "--server",
        default=DEFAULT_ADDRESS,
        metavar="ADDRESS",
        help="HOST:PORT or unix:PATH of the server",
    )
    flags.add(
        "--tls",
        choices=("on", "off"),
        nargs="?",
        const="on",
        default="off",
        help="talk TLS; --ca turns it on too",
    )
    flags.add("--ca", metavar="FILE", shown="public ones", help="authorities to trust, PEM")
    flags.add("--client-cert", metavar="FILE", shown="none", help="our own certificate, PEM")
    flags.add("--client-key", metavar="FILE", shown="none", help="its private key, PEM")
    flags.add(
        "--server-name",
        metavar="NAME",
        shown="the address's host",
        help="name that the server's certificate must hold",
    )
    return flags


def open_client(args: argparse.Namespace, timeout: float | None) -> KestrelClient:
    """Raises the SDK's KestrelError for what can't work."""
    return KestrelClient(args.server, tls=_tls(args), token=_token(), timeout=timeout)


def open_async_client(args: argparse.Namespace) -> AsyncKestrelClient:
    """As ``open_client``, with the timeout of ``args``."""
    return AsyncKestrelClient(args.server, tls=_tls(args), token=_token(), timeout=args.timeout)


@contextmanager
def open_channel(args: argparse.Namespace) -> Iterator[tuple[grpc.Channel, CallMetadata]]:
    """A channel for what the SDK has no methods for, and the metadata that calls send. Errors as for ``connected``."""
    with told_errors(args):
        connection = Connection(target=args.server, tls=_tls(args), token=_token())
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
    """A client of the administration of ``args.server``; its errors become CommandErrors."""
    with told_errors(args), KestrelAdmin(args.server, tls=_tls(args), token=_token()) as admin:
        yield admin


def _token() -> str | None:
    return next((value for name in _TOKENS if (value := os.environ.get(name))), None)


def _tls(args: argparse.Namespace) -> Tls | bool:
    parts = (args.ca, args.client_cert, args.client_key, args.server_name)
    if args.tls == "off" and not any(parts):
        return False
    return Tls(
        root_certificates=args.ca,
        certificate=args.client_cert,
        private_key=args.client_key,
        server_name=args.server_name,
    )


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[KestrelClient]:
    """A client of ``args.server``; its errors become CommandErrors."""
    with told_errors(args), open_client(args, args.timeout) as client:
        yield client


@contextmanager
def told_errors(args: argparse.Namespace) -> Iterator[None]:
    """The SDK's errors become CommandErrors."""
    try:
        yield
    except InvalidRequestError as error:
        if str(error).startswith("target: "):
            raise SettingsError(f"--server: {str(error).removeprefix('target: ')}") from None
        raise CommandError(str(error)) from None
    except KestrelError as error:
        raise CommandError(
            failure_text(error, args.server, getattr(args, "timeout", None))
        ) from None


def failure_text(error: KestrelError, server: str, timeout_s: float | None) -> str:
    """What went wrong, for people, in one line."""
    match error:
        case UnavailableError():
            # A reason comes from a server; without one there was none to answer.
            why = error.message if error.reason else _unreached(error.message)
            return f"server {server} is unavailable: {why}"
        case DeadlineExceededError() if timeout_s is not None and not error.reason:
            return f"no answer within {timeout_s:g} s; --timeout allows more [DEADLINE_EXCEEDED]"
        case OverloadedError() if error.reason in _BUSY:
            after = error.retry_after_s
            wait = "" if after is None else f" in {max(after, 0.1):.2g} s"
            return f"server {server} is busy; try again{wait} [RESOURCE_EXHAUSTED]"
        case RpcError(reason=reason) if reason == "MODEL_NOT_FOUND":
            return f"{error.message}{_near_model(error.message)} [{error.code.name}]"
        case RpcError():
            return f"{error.message} [{error.code.name}]"
    return str(error)


def _near_model(message: str) -> str:
    """A suggestion from the server's message: "'x' is not served; this server serves y, z"."""
    asked, _, served = message.rpartition(" is not served; this server serves ")
    name = asked.rpartition(": ")[2].strip("'")
    return suggestion(name, served.split(", ")) if served else ""


class Attempt:
    """``failed``: whether it did, and that was reported."""

    failed = False


@contextmanager
def reported_failures(name: str, *, alone: bool) -> Iterator[Attempt]:
    """An error about one of several images is printed and noted. If the image is ``alone``, the error is raised.

    An error that all images would have, such as a server that isn't there, is raised too.
    """
    attempt = Attempt()
    try:
        yield attempt
    except (UnavailableError, UnauthenticatedError, PermissionDeniedError):
        raise
    except (KestrelError, CommandError) as error:
        if alone:
            raise
        attempt.failed = True
        text = failure_text(error, "", None) if isinstance(error, KestrelError) else str(error)
        print(f"{styled('failed', 'red', sys.stderr)}: {name}: {text}", file=sys.stderr, flush=True)


def _unreached(message: str) -> str:
    """What gRPC says of a server that it can't talk to, without what it says of every such server."""
    cause = message.rpartition("last error: ")[2]
    if any(sign in cause.lower() for sign in ("handshake", "verification", "socket closed")):
        return f"no connection; do both sides talk TLS, and trust each other? ({cause})"
    return f"nobody answers there; is 'kestrel-grpc serve' running? ({cause})"
