"""``admin``: what whoever runs a server may do to it while it runs (AdminService)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kestrel_client import KestrelAdmin

from ..connection import add_server_flags, connected_admin
from ..parser import CommandError

_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Needs a token with the scope admin; for statistics metrics is enough."
    add_server_flags(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("drain", help="take no more requests; those that run go on to their end")
    cancel = actions.add_parser("cancel", help="end requests by their id")
    cancel.add_argument("request_id", metavar="REQUEST_ID")
    flush = actions.add_parser("flush", help="forget what is kept to save work")
    flush.add_argument("--stored-images", action="store_true", help="pictures kept by id too")
    level = actions.add_parser("log-level", help="change what the server logs, until it ends")
    level.add_argument("level", choices=_LEVELS)
    level.add_argument(
        "module",
        nargs="?",
        default="",
        metavar="MODULE",
        help="of this module only, and what is below it, like kestrel_engine.steps.loop [all]",
    )
    actions.add_parser("statistics", help="what the server is doing, and has done")
    _add_profile(actions)
    _add_capture(actions)


def _add_profile(actions: Any) -> None:
    profile = actions.add_parser(
        "profile",
        help="record what step thread and device do, into the server's --profile-dir",
        description="Ends at the first of its bounds, or by Ctrl-C. The file is for Perfetto or chrome://tracing.",
    )
    profile.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="most seconds, 0.1 to 60 [10]"
    )
    profile.add_argument(
        "--steps",
        type=_up_to(10_000),
        default=500,
        metavar="N",
        help="most steps, 1 to 10000 [500]",
    )
    profile.add_argument(
        "--python-functions",
        action="store_true",
        help="the step thread's Python functions too, which slows it down",
    )
    profile.add_argument(
        "--only",
        choices=("start", "stop"),
        help="start without waiting for the end, or end what was started",
    )


def _add_capture(actions: Any) -> None:
    capture = actions.add_parser(
        "capture",
        help="write requests that fail into the server's --capture-dir, for 'kestrel-grpc replay'",
        description="Requests that fail by the server's fault: UNKNOWN, INTERNAL, DATA_LOSS, DEADLINE_EXCEEDED.",
    )
    capture.add_argument("action_of_it", choices=("start", "stop"), metavar="start|stop")
    capture.add_argument(
        "--requests",
        type=_up_to(100),
        default=10,
        metavar="N",
        help="end after so many, 1 to 100 [10]",
    )
    capture.add_argument(
        "--pictures", action="store_true", help="their pictures too, if --capture-pictures lets us"
    )


def run(args: argparse.Namespace) -> int:
    with connected_admin(args) as admin:
        try:
            for line in _ACTIONS[args.action](admin, args):
                print(line)
        except UnicodeError:  # What the shell passed on isn't text, so no message takes it.
            raise CommandError("what was given is no valid UTF-8") from None
    return 0


def _up_to(most: int) -> Callable[[str], int]:
    """Reads a whole number from 1 to ``most``; a message would not even hold others."""

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to {most}")
        return value

    return parse


def _drain(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    return [f"draining: {admin.drain()} requests still run or wait"]


def _cancel(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    return [f"{admin.cancel(args.request_id)} requests cancelled"]


def _flush(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    forgotten = admin.flush_caches(stored_images=args.stored_images)
    return [f"flushed; {forgotten} stored pictures forgotten"]


def _level(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    before = admin.set_log_level(args.level, args.module)
    named = before or ("none of its own" if args.module else "another")
    return [f"log level {args.level}, before {named}"]


def _statistics(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    told = admin.statistics().to_dict()
    methods = told.pop("methods")
    groups = {"": told, **{f"{each.pop('method')} ": each for each in methods}}
    return [
        f"{prefix}{name}: {_number(value)}"
        for prefix, group in groups.items()
        for name, value in group.items()
    ]


def _number(number: float | int) -> str:
    return f"{number:g}" if isinstance(number, float) else f"{number}"


def _profile(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    """Ctrl-C ends it early; its file is written all the same."""
    if args.only != "stop":
        file = admin.start_profile(
            seconds=args.seconds, steps=args.steps, python_functions=args.python_functions
        )
        if args.only == "start":
            return [f"profile {file} has begun"]
        print(f"recording {file}, for {args.seconds:g} s or {args.steps} steps", flush=True)
        with suppress(KeyboardInterrupt):
            time.sleep(args.seconds)
    done = admin.stop_profile()
    return [
        f"profile {done.file}: {done.file_bytes} bytes, {done.steps} steps in {done.seconds:.2f} s"
    ]


def _capture(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    if args.action_of_it == "start":
        requests = admin.start_capture(requests=args.requests, images=args.pictures)
        return [f"the next {requests} requests that fail are captured"]
    done = admin.stop_capture()
    return [*done.files, f"{len(done.files)} captured, {done.lost} lost"]


_ACTIONS: dict[str, Callable[[KestrelAdmin, argparse.Namespace], list[str]]] = {
    "drain": _drain,
    "cancel": _cancel,
    "flush": _flush,
    "log-level": _level,
    "statistics": _statistics,
    "profile": _profile,
    "capture": _capture,
}
