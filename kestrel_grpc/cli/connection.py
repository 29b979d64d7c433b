"""What the client commands share: the flags of the connection, and the SDK's errors as lines for people.

The commands talk through kestrel_client and load neither torch nor numpy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from kestrel_client import KestrelClient, KestrelError, RpcError, UnavailableError

from ..settings import DEFAULT_ADDRESS, Flags
from .parser import CommandError

DEFAULT_TIMEOUT_S = 300.0


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    flags = Flags(parser.add_argument_group("connection"))
    flags.add(
        "--server",
        default=DEFAULT_ADDRESS,
        metavar="ADDRESS",
        help="HOST:PORT or unix:PATH of the server",
    )
    flags.add(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long the answer may take",
    )


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[KestrelClient]:
    """A client of ``args.server``; its errors become CommandErrors."""
    try:
        with KestrelClient(args.server, timeout=args.timeout) as client:
            yield client
    except UnavailableError as error:
        # A reason comes from a server; without one there was none to answer.
        why = (
            error.message
            if error.reason
            else "nobody answers there; is 'kestrel-grpc serve' running?"
        )
        raise CommandError(f"server {args.server} is unavailable: {why}") from None
    except RpcError as error:
        raise CommandError(f"{error.message} [{error.code.name}]") from None
    except KestrelError as error:
        raise CommandError(str(error)) from None
