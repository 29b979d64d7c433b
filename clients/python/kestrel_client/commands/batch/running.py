"""The run of many rows: its flags, the server that a command starts for itself, and the progress that it shows."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kestrel_client import AnalyzeResult, AsyncKestrelClient, Task

from ..connection import open_async_client, sdk_errors, servers_of
from ..flag_table import add_flags
from ..flags import SettingsError
from ..own_server import own_server
from ..values import seconds, whole
from .journal import Journal
from .rows import Row
from .runner import Runner, Summary

_OWN_SERVER = ("config", "weights", "tokenizer")
"""Flags of the server that a command starts for itself."""


_FLAGS = """
    --concurrency N  limit on the requests in flight; fewer while the server is busy [the batch size of all servers]
    --patience SECONDS  how long to try again while the server is busy or cannot be reached [=300]
    --in-process     start a server for this command instead of calling --server; --model names what it serves
    --config FILE    configuration of the server that the command starts (TOML)
    --weights PATH   start a server with these weights, as --in-process does
    --tokenizer FILE  tokenizer.json of --weights
"""


def add_running_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running")
    add_flags(group, _FLAGS, N=whole(1, 1024), SECONDS=seconds(0, 86_400))


def check_running_flags(args: argparse.Namespace) -> None:
    """Raises SettingsError."""
    if args.request_id is not None:
        raise SettingsError(f"--request-id names one request; {args.command} makes many")
    if args.tokenizer is not None and args.weights is None:
        raise SettingsError("--tokenizer: needs --weights")
    args.in_process = args.in_process or args.weights is not None
    if args.config is not None and not args.in_process:
        raise SettingsError("--config: needs --in-process")


@contextmanager
def server_of(args: argparse.Namespace) -> Iterator[None]:
    """Sets ``args.server`` to a server of this command, if it needs one."""
    if not args.in_process:
        yield
        return
    # SIGTERM then ends the server too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    flags = [] if args.model is None else ["--model", args.model]
    for name in _OWN_SERVER:
        if (value := getattr(args, name)) is not None:
            flags += [f"--{name}", value]
    with own_server(flags) as (address, _):
        args.server = address
        yield


def run_rows(
    args: argparse.Namespace,
    journal: Journal,
    rows: Iterable[Row],
    tasks: Callable[[Row], Mapping[str, Task]],
    options: Mapping[str, Any],
    *,
    total: int | None,
    before: int,
    check: Callable[[AsyncKestrelClient], Awaitable[None]] | None = None,
    on_result: Callable[[Row, AnalyzeResult], None] = lambda row, result: None,
) -> Summary:
    """Asks ``args.server`` for the tasks of each row, and shows the progress.

    ``options``: of every call. ``total``: the rows of the whole command, if known, of which ``before`` have results
    already. ``check``: called before the first row. See Runner for the rest, and for the errors.
    """
    from tqdm import tqdm

    bar = tqdm(
        total=total,
        initial=before,
        unit="image",
        disable=args.quiet,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
    )

    def on_done(summary: Summary, in_flight: int) -> None:
        bar.update(before + summary.rows - bar.n)
        bar.set_postfix({"failed": summary.failed, "in flight": in_flight}, refresh=False)

    async def ask() -> Summary:
        async with open_async_client(args) as client:
            if check is not None:
                await check(client)
            most = args.concurrency
            if most is None:
                most = (await client.get_model(args.model)).max_batch_size * len(servers_of(args))
            return await Runner(
                client, journal, tasks, options, most, args.patience, on_result, on_done
            ).run(rows)

    with bar, sdk_errors(args):
        return asyncio.run(ask())
