"""``python -m label_studio_kestrel``: the process between Label Studio and a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from kestrel_client.commands.connection import add_connection_flags, open_async_client, sdk_errors
from kestrel_client.commands.flags import SettingsError
from kestrel_client.commands.parser import CommandError, CommandParser
from kestrel_client.commands.values import whole

from .app import Backend
from .images import TaskImages, origin
from .predictions import Predictor

TOKEN = "KESTREL_BRIDGE_TOKEN"
_CONNECTIONS = 32
"""Limit on the callers' connections."""
_HOST = re.compile(r"(?!.*\.\d+(:|$))[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:\d{1,5})?")


def _host(name: str) -> str:
    if not _HOST.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{name}: must be a name like images.example.org")
    return name


def parser() -> CommandParser:
    made = CommandParser(
        prog="label_studio_kestrel",
        description="Answers Label Studio with a server's results.",
        epilog=f"The variable {TOKEN} holds the token or the password that callers must give, and "
        "LABEL_STUDIO_API_KEY the access token for images on --label-studio.",
    )
    add = made.add_argument_group("bridge").add_argument
    add(
        "--listen",
        default="127.0.0.1:9090",
        metavar="HOST:PORT",
        help=f"address for the tool's calls; beyond loopback {TOKEN} must be set [127.0.0.1:9090]",
    )
    add(
        "--fetch-allow",
        action="append",
        default=[],
        type=_host,
        metavar="HOST",
        help="host from which images are fetched, HOST or HOST:PORT, with public addresses; repeat the flag [none]",
    )
    add(
        "--label-studio",
        type=origin,
        metavar="URL",
        help="address of Label Studio, from which images that were uploaded to it are fetched [none]",
    )
    add("--allow-data-urls", action="store_true", help="take images that tasks hold as data URLs")
    add(
        "--concurrency",
        type=whole(1, 64),
        default=4,
        metavar="N",
        help="tasks that are computed at the same time [4]",
    )
    add_connection_flags(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status."""
    made = parser()
    try:
        args = made.parse_args(argv)
        with sdk_errors(args):
            asyncio.run(_serve(args, os.environ.get(TOKEN) or None))
    except (SettingsError, CommandError) as error:
        made.error(str(error))
    return 0


async def _serve(args: argparse.Namespace, token: str | None) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with opened(args, token) as address:
        print(f"bridge for Label Studio ready at http://{address}", flush=True)
        await ended.wait()


class _Listener(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # They are ours.


@asynccontextmanager
async def opened(args: argparse.Namespace, token: str | None) -> AsyncIterator[str]:
    """The bridge, listening. Yields its address. Raises SettingsError, and the SDK's KestrelError for the flags of the
    server."""
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError(f"--listen {args.listen}: must be HOST:PORT")
    if token is None and host not in ("127.0.0.1", "localhost", "[::1]"):
        raise SettingsError(
            f"refusing to listen on {args.listen}, which other machines can reach, without {TOKEN}"
        )
    own_token = os.environ.get("LABEL_STUDIO_API_KEY") or None
    async with (
        open_async_client(args) as client,
        TaskImages(args.fetch_allow, args.label_studio, own_token, args.allow_data_urls) as images,
    ):
        predictor = Predictor(client, images, args.concurrency)
        app = Backend(predictor, token, args.server, args.timeout).application()
        try:
            listening = socket.create_server((host.strip("[]"), int(port)))
        except (OSError, OverflowError) as error:
            raise SettingsError(f"--listen {args.listen}: {error}") from None
        config = uvicorn.Config(
            app, limit_concurrency=_CONNECTIONS, log_level="warning", lifespan="off"
        )
        listener = _Listener(config)
        serving = asyncio.create_task(listener.serve([listening]))
        try:
            yield f"{host}:{listening.getsockname()[1]}"
        finally:
            listener.should_exit = listener.force_exit = True
            await serving
            listening.close()


if __name__ == "__main__":
    sys.exit(main())
