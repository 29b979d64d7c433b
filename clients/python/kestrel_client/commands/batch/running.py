"""The run of many rows: its flags, the server that a command starts for itself, its pace and its progress."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kestrel_client import (
    AnalyzeResult,
    AsyncKestrelClient,
    KestrelError,
    OverloadedError,
    PermissionDeniedError,
    RpcError,
    Task,
    UnauthenticatedError,
    UnavailableError,
)
from kestrel_client.values.plain import plain_value

from ..connection import BUSY, open_async_client, sdk_errors, servers_of
from ..flag_table import add_flags
from ..flags import SettingsError
from ..own_server import own_server
from ..parser import CommandError
from ..values import seconds, whole
from .journal import Journal, has_failed
from .rows import Row

if TYPE_CHECKING:
    from tqdm import tqdm

_FIRST_IN_FLIGHT = 4
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
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


class Pace:
    """The limit on requests in flight, between 1 and ``most``.

    It grows by one for each round of successes and is halved when the server refuses a request because it is busy
    (additive increase, multiplicative decrease, as in TCP: RFC 5681).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(min(_FIRST_IN_FLIGHT, most))
        self._shrunk_at = -1.0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def succeeded(self) -> None:
        self._limit = min(self._limit + 1 / self._limit, self._most)

    def refused(self, started: float) -> None:
        """Halves the limit, once for all requests that were in flight together. ``started``: when the request began."""
        if started > self._shrunk_at:
            self._limit = max(1.0, self._limit / 2)
            self._shrunk_at = time.monotonic()


@dataclass
class Summary:
    """What a run has done."""

    rows: int = 0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Rows and tasks that failed, by status."""
    refused: int = 0
    """Requests that were asked again, because the server was busy or away."""
    output_tokens: int = 0
    seconds: float = 0.0
    most_in_flight: int = 0

    def add(self, journal: Journal, row: Row, outcome: AnalyzeResult | KestrelError) -> None:
        """Appends what became of a row to ``journal``. Raises OSError."""
        line: dict[str, Any] = {"image": row.image}
        if row.number is not None:
            line["row"] = row.number
        if isinstance(outcome, KestrelError):
            line["error"] = _plain(outcome)
            self.errors[line["error"]["code"]] += 1
        else:
            self.output_tokens += outcome.usage.output_tokens
            self.errors.update(each.code.name for each in outcome.errors.values())
            line |= outcome.to_dict()
        journal.append(line)
        self.rows += 1
        self.failed += has_failed(line)


def progress_bar(args: argparse.Namespace, total: int, before: int) -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=before,
        unit="image",
        disable=args.quiet,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
    )


def run_rows(
    args: argparse.Namespace,
    journal: Journal,
    rows: Iterable[Row],
    tasks: Callable[[Row], Mapping[str, Task]],
    options: Mapping[str, Any],
    *,
    total: int,
    before: int,
    check: Callable[[AsyncKestrelClient], Awaitable[None]] | None = None,
) -> Summary:
    """Asks ``args.server`` for the tasks of each row, appends the results to ``journal``, and shows the progress.

    ``options``: of every call. ``total``: the rows of the whole command, of which ``before`` have results already.
    ``check``: called before the first row. Raises CommandError if the server stays away or refuses the caller, and
    OSError if a result cannot be written.
    """
    bar = progress_bar(args, total, before)

    async def ask() -> Summary:
        async with open_async_client(args) as client:
            if check is not None:
                await check(client)
            most = args.concurrency
            if most is None:
                most = (await client.get_model(args.model)).max_batch_size * len(servers_of(args))
            run = _Run(client, journal, tasks, options, Pace(most), args.patience, bar)
            return await run.all(rows)

    with bar, sdk_errors(args):
        return asyncio.run(ask())


@dataclass
class _Run:
    """A row whose request was refused, or lost with its server, is asked again. It fails only by an error that would
    come again. ``patience_s``: how long no request may succeed before the run is given up."""

    client: AsyncKestrelClient
    journal: Journal
    tasks: Callable[[Row], Mapping[str, Task]]
    options: Mapping[str, Any]
    pace: Pace
    patience_s: float
    bar: tqdm[Any]
    summary: Summary = field(default_factory=Summary)
    last_success: float = field(default_factory=time.monotonic)

    async def all(self, rows: Iterable[Row]) -> Summary:
        began = time.monotonic()
        running: set[asyncio.Task[None]] = set()
        try:
            for row in rows:
                while len(running) >= self.pace.limit:
                    running = await self._first_done(running)
                running.add(asyncio.create_task(self._row(row)))
                self.summary.most_in_flight = max(self.summary.most_in_flight, len(running))
            while running:
                running = await self._first_done(running)
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self.summary.seconds = time.monotonic() - began
        return self.summary

    async def _first_done(self, running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Waits until a task is done, and returns the others. Raises the error of one that failed."""
        done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            if (error := each.exception()) is not None:
                running -= done
                raise error
        state = {"failed": self.summary.failed, "in flight": len(left)}
        self.bar.set_postfix(state, refresh=False)
        self.bar.update(len(done))
        return left

    async def _row(self, row: Row) -> None:
        summary, pause = self.summary, _PAUSE_S
        outcome: AnalyzeResult | KestrelError
        while True:
            started = time.monotonic()
            try:
                result = await self.client.analyze(row.source, self.tasks(row), **self.options)
                for refused in result.errors.values():
                    if _is_passing(refused):
                        raise refused
            except (UnauthenticatedError, PermissionDeniedError) as error:
                raise CommandError(f"{error.message} [{error.code.name}]") from None
            except KestrelError as error:
                if not _is_passing(error):
                    outcome = error
                    break
                waited = time.monotonic() - self.last_success
                if waited > self.patience_s:
                    raise CommandError(
                        f"no request has succeeded for {waited:.0f} s: {error}. "
                        "The same command continues with the rows that are left"
                    ) from None
                self.pace.refused(started)
                summary.refused += 1
                await asyncio.sleep(max(pause, getattr(error, "retry_after_s", None) or 0.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self.last_success = time.monotonic()
                self.pace.succeeded()
                outcome = result
                break
        summary.add(self.journal, row, outcome)


def _is_passing(error: KestrelError) -> bool:
    """Whether the same request may succeed later. The refusal of a call says when to come back, unless the message is
    too large; that of a task has a reason."""
    if isinstance(error, OverloadedError):
        return error.retry_after_s is not None or error.reason in BUSY
    return isinstance(error, UnavailableError)


def _plain(error: KestrelError) -> dict[str, str]:
    if isinstance(error, RpcError):
        return dict(plain_value(error))
    return {"code": "CLIENT", "message": str(error), "reason": type(error).__name__}
