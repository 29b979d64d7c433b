"""``admin``: what whoever runs a server may do to it while it runs (AdminService)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub

from .connection import CallMetadata, add_server_flags, open_channel
from .parser import CommandError

_TIMEOUT_S = 10.0
_WRITE_S = 120.0
"""For what may have to be written first; a profiler's first start takes seconds, too."""
_LEVELS = {
    "debug": pb.LOG_LEVEL_DEBUG,
    "info": pb.LOG_LEVEL_INFO,
    "warning": pb.LOG_LEVEL_WARNING,
    "error": pb.LOG_LEVEL_ERROR,
}


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
    level.add_argument("level", choices=tuple(_LEVELS))
    level.add_argument(
        "module",
        nargs="?",
        default="",
        metavar="MODULE",
        help="of this module only, and what is below it, like kestrel_engine.loop [all]",
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
    with open_channel(args) as (channel, metadata):
        try:
            lines = _ACTIONS[args.action](AdminServiceStub(channel), metadata, args)
        except UnicodeError:  # What the shell passed on isn't text, so no message takes it.
            raise CommandError("what was given is no valid UTF-8") from None
        for line in lines:
            print(line)
    return 0


def _up_to(most: int) -> Callable[[str], int]:
    """Reads a whole number from 1 to ``most``; a message would not even hold others."""

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to {most}")
        return value

    return parse


def _drain(stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace) -> list[str]:
    response = stub.Drain(pb.DrainRequest(), metadata=metadata, timeout=_TIMEOUT_S)
    return [f"draining: {response.remaining_requests} requests still run or wait"]


def _cancel(stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace) -> list[str]:
    request = pb.CancelRequestRequest(request_id=args.request_id)
    response = stub.CancelRequest(request, metadata=metadata, timeout=_TIMEOUT_S)
    return [f"{response.cancelled_requests} requests cancelled"]


def _flush(stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace) -> list[str]:
    request = pb.FlushCachesRequest(stored_images=args.stored_images)
    response = stub.FlushCaches(request, metadata=metadata, timeout=_TIMEOUT_S)
    return [f"flushed; {response.forgotten_images} stored pictures forgotten"]


def _level(stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace) -> list[str]:
    request = pb.SetLogLevelRequest(level=_LEVELS[args.level], module=args.module)
    response = stub.SetLogLevel(request, metadata=metadata, timeout=_TIMEOUT_S)
    names = {level: name for name, level in _LEVELS.items()}
    before = names.get(response.previous_level, "none of its own" if args.module else "another")
    return [f"log level {args.level}, before {before}"]


def _statistics(
    stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace
) -> list[str]:
    request = pb.GetStatisticsRequest()
    response = stub.GetStatistics(request, metadata=metadata, timeout=_TIMEOUT_S)
    methods = {f"{each.method} ": each for each in response.methods}
    return [
        f"{prefix}{field.name}: {_told(getattr(message, field.name))}"
        for prefix, message in {"": response, **methods}.items()
        for field in message.DESCRIPTOR.fields
        if field.name not in ("methods", "method")
    ]


def _told(number: float | int) -> str:
    return f"{number:g}" if isinstance(number, float) else f"{number}"


def _profile(stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace) -> list[str]:
    """Ctrl-C ends it early; its file is written all the same."""
    if args.only != "stop":
        request = pb.StartProfileRequest(
            seconds=args.seconds, steps=args.steps, python_functions=args.python_functions
        )
        started = stub.StartProfile(request, metadata=metadata, timeout=_WRITE_S)
        if args.only == "start":
            return [f"profile {started.file} has begun"]
        print(f"recording {started.file}, for {args.seconds:g} s or {args.steps} steps", flush=True)
        with suppress(KeyboardInterrupt):
            time.sleep(args.seconds)
    response = stub.StopProfile(pb.StopProfileRequest(), metadata=metadata, timeout=_WRITE_S)
    return [
        f"profile {response.file}: {response.size_bytes} bytes, "
        f"{response.steps} steps in {response.seconds:.2f} s"
    ]


def _capture(stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace) -> list[str]:
    if args.action_of_it == "start":
        request = pb.StartCaptureRequest(requests=args.requests, pictures=args.pictures)
        started = stub.StartCapture(request, metadata=metadata, timeout=_TIMEOUT_S)
        return [f"the next {started.requests} requests that fail are captured"]
    response = stub.StopCapture(pb.StopCaptureRequest(), metadata=metadata, timeout=_WRITE_S)
    return [*response.files, f"{len(response.files)} captured, {response.lost} lost"]


_ACTIONS: dict[str, Callable[[Any, CallMetadata, argparse.Namespace], list[str]]] = {
    "drain": _drain,
    "cancel": _cancel,
    "flush": _flush,
    "log-level": _level,
    "statistics": _statistics,
    "profile": _profile,
    "capture": _capture,
}
