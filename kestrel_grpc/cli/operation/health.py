"""``health``: reports whether a server is ready, for users, probes and scripts that wait."""

from __future__ import annotations

import argparse

from kestrel_client import DeadlineExceededError, KestrelError, NotFoundError

from ..connection import add_server_flags, open_client
from ..parser import EXIT_FAILED, CommandError
from ..values import seconds

_WAIT_S = 2.0


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Exits with 0 if the server accepts requests, otherwise with 1."
    add_server_flags(parser)
    parser.add_argument(
        "--wait",
        type=seconds(),
        metavar="SECONDS",
        default=_WAIT_S,
        help=f"how long to wait until the server is ready [{_WAIT_S:g}]",
    )
    parser.add_argument(
        "--service",
        default="",
        help="name of a service, like kestrel.v1.VisionService, or of the model [the whole server]",
    )


def run(args: argparse.Namespace) -> int:
    try:
        with open_client(args, None) as client:
            client.wait_ready(args.wait, service=args.service)
    except DeadlineExceededError:
        print("NOT_SERVING")
        return EXIT_FAILED
    except NotFoundError:
        raise CommandError(f"server {args.server} has no service {args.service!r}") from None
    except KestrelError as error:
        raise CommandError(f"server {args.server}: {error}") from None
    print("SERVING")
    return 0
