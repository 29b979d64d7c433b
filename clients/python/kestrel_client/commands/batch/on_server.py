"""The run of many rows as a batch of the server, which goes on without this command."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from kestrel_client import (
    DeadlineExceededError,
    InvalidRequestError,
    KestrelClient,
    KestrelError,
    Task,
    UnavailableError,
)

from ..connection import open_client, sdk_errors, servers_of
from ..files import json_text
from ..flags import SettingsError
from ..parser import CommandError
from .journal import Journal
from .rows import Row
from .running import Summary, progress_bar

_LONGEST_ID = 512
_PAUSE_S = 1.0


def check_on_server(args: argparse.Namespace) -> None:
    """Raises SettingsError."""
    for name in ("batch", "off_peak"):
        if getattr(args, name) and not args.on_server:
            raise SettingsError(f"--{name.replace('_', '-')}: needs --on-server")
    if args.batch and args.off_peak:
        raise SettingsError("--off-peak: cannot be with --batch, whose batch exists already")
    if args.on_server and args.in_process:
        raise SettingsError("--on-server: a server that ends with the command keeps no batch")
    if args.on_server and len(servers_of(args)) > 1:
        raise SettingsError("--on-server: needs one --server, which keeps the batch")


def run_on_server(
    args: argparse.Namespace,
    journal: Journal,
    rows: list[Row],
    tasks: Callable[[Row], Mapping[str, Task]],
    options: Mapping[str, Any],
) -> Summary:
    """Makes a batch of the ``rows`` without results, or finds the one that an earlier command has made, and appends its
    results to ``journal``. Raises CommandError."""
    by_id = {_id(row, journal.digest): row for row in rows}
    left = {each: row for each, row in by_id.items() if row.identity not in journal.done}
    requests = {each: (row.source, tasks(row)) for each, row in by_id.items()}
    summary, began, unread = Summary(), time.monotonic(), dict[str, KestrelError]()
    with (
        progress_bar(args, len(rows), len(rows) - len(left)) as bar,
        sdk_errors(args),
        open_client(args, None) as client,
    ):
        if args.batch is None:
            args.batch = client.create_batch(
                {each: requests[each] for each in left},
                off_peak=args.off_peak,
                left_out=unread,
                **options,
            ).batch_id
            instead = " in place of --off-peak" if args.off_peak else ""
            print(
                f"the server has the batch; --batch {args.batch}{instead} comes back to it",
                file=sys.stderr,
            )
        for each, error in unread.items():
            summary.add(journal, left[each], error)
            bar.update()
        for result in _results(client, args, requests):
            if by_id[result.custom_id].identity not in journal.done:
                summary.add(journal, by_id[result.custom_id], result.outcome)
                bar.update()
    summary.seconds = time.monotonic() - began
    return summary


def _results(client: KestrelClient, args: argparse.Namespace, requests: Any) -> Any:
    """The results of the batch. The server may restart, and it limits the duration of each stream. Raises
    KestrelError."""
    start, since = 0, time.monotonic()
    while True:
        try:
            for result in client.batch_results(args.batch, start_index=start, requests=requests):
                yield result
                start, since = result.index + 1, time.monotonic()
            return
        except InvalidRequestError:
            raise CommandError(
                f"--batch {args.batch}: is of other images or tasks than this command"
            ) from None
        except DeadlineExceededError:
            since = time.monotonic()
        except UnavailableError:
            if time.monotonic() - since > args.patience:
                raise
        time.sleep(_PAUSE_S)


def _id(row: Row, run: str) -> str:
    """The row's name in the batch, the same for every command with the tasks and options of the digest ``run``."""
    name = json_text([row.image, row.number, run])
    return name if len(name) <= _LONGEST_ID else hashlib.sha256(name.encode()).hexdigest()
