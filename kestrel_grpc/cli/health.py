"""``health``: whether a server is ready, for people, probes and scripts that wait."""

from __future__ import annotations

import argparse

from kestrel_client import DeadlineExceededError, KestrelClient, KestrelError

from ..settings import DEFAULT_ADDRESS, Flags
from .parser import EXIT_FAILED, CommandError

_ONE_LOOK_S = 2.0


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Exits with 0 if the server answers requests, else with 1."
    Flags(parser).add(
        "--server",
        default=DEFAULT_ADDRESS,
        metavar="ADDRESS",
        help="HOST:PORT or unix:PATH of the server",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        default=_ONE_LOOK_S,
        help=f"how long it may take to become ready [{_ONE_LOOK_S:g}]",
    )
    parser.add_argument(
        "--service", default="", help="name of one service, like kestrel.v1.VisionService"
    )


def run(args: argparse.Namespace) -> int:
    try:
        with KestrelClient(args.server) as client:
            client.wait_ready(args.wait, service=args.service)
    except DeadlineExceededError:
        print("NOT_SERVING")
        return EXIT_FAILED
    except KestrelError as error:
        raise CommandError(f"server {args.server}: {error}") from None
    print("SERVING")
    return 0
