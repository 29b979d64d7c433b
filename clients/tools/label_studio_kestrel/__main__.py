"""``python -m label_studio_kestrel``: the process between Label Studio and a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from kestrel_client.commands.connection import add_connection_flags, open_async_client, sdk_errors
from kestrel_client.commands.flag_table import add_flags
from kestrel_client.commands.flags import SettingsError
from kestrel_client.commands.parser import CommandError, CommandParser

from .app import Backend
from .heads import HeadLimit
from .images import TaskImages, origin
from .predictions import Predictor

TOKEN = "KESTREL_BRIDGE_TOKEN"
_CONNECTIONS = 32
"""Limit on the callers' connections."""
_HOST = re.compile(r"(?!.*\.\d+(:|$))[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:\d{1,5})?")
_FLAGS = f"""
    --listen HOST:PORT  address for the tool's calls; beyond loopback {TOKEN} must be set [=127.0.0.1:9090]
    --fetch-allow HOST...  host from which images are fetched, HOST or HOST:PORT, with public addresses; repeat the
        flag [none]
    --label-studio URL  address of Label Studio, from which images that were uploaded to it are fetched [none]
"""


def _host(name: str) -> str:
    if not _HOST.fullmatch(name):
        raise ValueError("must be a name like images.example.org")
    return name


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("must be HOST:PORT")
    return host, int(port)


def parser() -> CommandParser:
    made = CommandParser(
        prog="label_studio_kestrel",
        description="Answers Label Studio with a server's results.",
        epilog=f"The variable {TOKEN} holds the password that callers must give, and LABEL_STUDIO_API_KEY the access "
        "token for images on --label-studio.",
    )
    made.removed = {
        "--allow-data-urls": "; data URLs are always taken",
        "--concurrency": "; 4 tasks are computed at the same time",
    }
    group = made.add_argument_group("bridge")
    add_flags(group, _FLAGS, listen=_address, fetch_allow=_host, label_studio=origin)
    add_connection_flags(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status."""
    made = parser()
    args = made.parse_args(argv)
    token = os.environ.get(TOKEN) or None
    host, _ = args.listen
    if token is None and host not in ("127.0.0.1", "localhost", "[::1]"):
        made.error(f"refusing to listen on {host}, which other machines can reach, without {TOKEN}")
    try:
        with sdk_errors(args):
            asyncio.run(_serve(args, token))
    except (SettingsError, CommandError) as error:
        made.error(str(error))
    return 0


async def _serve(args: argparse.Namespace, token: str | None) -> None:
    async with opened(args, token) as server:
        await server.serve()


@asynccontextmanager
async def opened(args: argparse.Namespace, token: str | None) -> AsyncIterator[uvicorn.Server]:
    """The bridge. Raises the SDK's KestrelError for the flags of the server."""
    host, port = args.listen
    own_token = os.environ.get("LABEL_STUDIO_API_KEY") or None
    hosts = args.fetch_allow or ()
    async with (
        open_async_client(args) as client,
        TaskImages(hosts, args.label_studio, own_token) as images,
    ):
        app = Backend(Predictor(client, images), token, args.server, args.timeout).application()
        options: dict[str, Any] = {
            "limit_concurrency": _CONNECTIONS,
            "access_log": False,
            "lifespan": "off",
            "http": HeadLimit,
        }
        yield uvicorn.Server(uvicorn.Config(app, host.strip("[]"), port, **options))


if __name__ == "__main__":
    sys.exit(main())
