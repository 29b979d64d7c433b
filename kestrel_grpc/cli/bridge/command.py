"""``bridge label-studio``: the process between Label Studio and a server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kestrel_client.commands.connection import add_connection_flags, open_async_client, sdk_errors
from kestrel_client.commands.flags import reported
from kestrel_client.commands.parser import CommandError
from kestrel_client.commands.values import whole

from ...security.listening import is_loopback
from ...settings.addresses import AddressError, parse_address
from ...settings.flags import SettingsError
from ...settings.http import HttpConfig, fetched_hosts
from ...settings.security import SecurityConfig

TOKEN = "KESTREL_BRIDGE_TOKEN"
LABEL_STUDIO_TOKEN = "LABEL_STUDIO_API_KEY"
_CONNECTIONS = 32
"""Limit on the callers' connections."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        f"The variable {TOKEN} holds the token or the password that callers must give, and {LABEL_STUDIO_TOKEN} the\n"
        "access token for images on --label-studio. Needs the extra http. docs/use/tools.md has\n"
        "the set-up."
    )
    parser.add_argument("tool", choices=("label-studio",), help="the tool that is answered")
    # They have no variables: KESTREL_LISTEN is the server's.
    flags = parser.add_argument_group("bridge")
    flags.add_argument(
        "--listen",
        type=reported(parse_address),
        default="127.0.0.1:9090",
        metavar="ADDRESS",
        help=f"address for the tool's calls; beyond loopback {TOKEN} must be set [127.0.0.1:9090]",
    )
    flags.add_argument(
        "--fetch-allow",
        action="extend",
        type=reported(fetched_hosts),
        default=[],
        metavar="HOST",
        help="host from which images are fetched: HOST or HOST:PORT; repeat the flag or separate hosts with commas; "
        "hosts with private IP addresses are refused [none]",
    )
    flags.add_argument(
        "--label-studio",
        metavar="URL",
        help="address of Label Studio, from which images that were uploaded to it are fetched [none]",
    )
    flags.add_argument(
        "--allow-data-urls", action="store_true", help="take images that tasks hold as data URLs"
    )
    flags.add_argument(
        "--concurrency",
        type=whole(1, 64),
        default=4,
        metavar="N",
        help="tasks that are computed at the same time [4]",
    )
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    token = os.environ.get(TOKEN) or None
    if token is None and not is_loopback(args.listen):
        raise SettingsError(
            f"refusing to listen on {args.listen}, which other machines can reach, without {TOKEN}"
        )
    with sdk_errors(args):
        try:
            asyncio.run(_serve(args, token))
        except ModuleNotFoundError as error:
            raise CommandError(
                f"the package {error.name} is missing; install it with pip install ./clients/python '.[http]'"
            ) from None
        except AddressError as error:
            raise SettingsError(f"--listen: {error}") from None
    return 0


async def _serve(args: argparse.Namespace, token: str | None) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with opened(args, token) as address:
        print(f"bridge for {args.tool} ready at http://{address}", flush=True)
        await ended.wait()


@asynccontextmanager
async def opened(args: argparse.Namespace, token: str | None) -> AsyncIterator[str]:
    """The bridge, listening. Yields its address. Raises AddressError, SettingsError, and the SDK's KestrelError for
    the flags of the server."""
    from ...http.connections import HttpConnections
    from ...http.listener import HttpListener
    from ...security.connections.connection_guard import ConnectionGuard
    from ...security.hosts import ANY
    from .app import Backend
    from .images import TaskImages, origin
    from .predictions import Predictor

    label_studio_token = os.environ.get(LABEL_STUDIO_TOKEN) or None
    own = None
    if args.label_studio is not None:
        try:
            own = origin(args.label_studio)
        except ValueError as error:
            raise SettingsError(f"--label-studio {args.label_studio}: {error}") from None
    images = TaskImages(args.fetch_allow, own, label_studio_token, args.allow_data_urls)
    async with open_async_client(args) as client:
        predictor = Predictor(client, images, args.concurrency)
        backend = Backend(predictor, token, args.server, args.timeout)
        connections = HttpConnections(_CONNECTIONS)
        limits = dataclasses.replace(SecurityConfig().connections, connections=_CONNECTIONS)
        guard = ConnectionGuard(limits, 0, connections)
        # A page of another site has no token, so any name may lead to a bridge that needs one.
        config = HttpConfig(http_listen=(args.listen,), http_hosts=() if token is None else (ANY,))
        application = backend.application()
        listener = HttpListener(application, config, SecurityConfig(), None, connections, guard)
        try:
            await listener.start()
            yield listener.addresses[0]
        finally:
            await listener.stop()
