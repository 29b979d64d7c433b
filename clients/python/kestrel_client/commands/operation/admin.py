"""``admin``: manages a running server with AdminService."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kestrel_client import KestrelAdmin

from ..connection import add_server_flags, connected_admin
from ..flag_table import add_flags
from ..parser import CommandError
from ..terminal import counted
from ..values import seconds, whole

_LEVELS = ("debug", "info", "warning", "error")


_MODULE = "change only this module and its submodules, like kestrel_engine.steps.loop [all modules]"
_LOADED = "name, hub id or path, which settings of its own may follow: moondream2,kv-cache-gib=8"
_PROFILE = """
    --seconds S  limit in seconds, 0.1 to 60 [=10]
    --steps N    limit in steps, 1 to 10000 [=500]
    --python-functions  also record the step thread's Python functions, which slows it down
    --only {start,stop}  only start a recording without waiting for its end, or only stop a running one
"""
_CAPTURE = """
    --requests N  stop after this many requests, 1 to 100 [=10]
    --images      also write the images of the requests, if the server has --capture-images
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Needs a token with the scope admin. For statistics, the scope metrics is enough."
    )
    add_server_flags(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(actions, "drain", "refuse new requests; running requests continue")
    cancel = _add_action(actions, "cancel", "cancel requests by their id")
    cancel.add_argument("request_id", metavar="REQUEST_ID", help="id of the requests to cancel")
    flush = _add_action(actions, "flush", "empty the server's caches")
    add_flags(flush, "--stored-images  also delete all stored images")
    level = _add_action(actions, "log-level", "change the server's log level until it ends")
    level.add_argument("level", choices=_LEVELS, help="least severe level to log")
    level.add_argument("module", nargs="?", default="", metavar="MODULE", help=_MODULE)
    _add_action(actions, "statistics", "print counts of requests, calls, pages and tokens")
    _add_profile(actions)
    _add_capture(actions)
    load = _add_action(actions, "load-model", "load another model while the server serves")
    load.add_argument("model", metavar="MODEL", help=_LOADED)
    add_flags(load, "--default  then make it the default model")
    unload = _add_action(actions, "unload-model", "unload a model that is not the default")
    unload.add_argument("model", metavar="MODEL", help="name of the model, as models lists it")
    add_flags(
        unload,
        "--grace S  seconds that running requests may take [the server's --grace]",
        S=seconds(0.0, 86_400.0),
    )
    default = _add_action(actions, "default-model", "make a loaded model the default")
    default.add_argument("model", metavar="MODEL", help="name of the model, as models lists it")
    for name, does in (
        ("load-adapter", "load an adapter before the first request names it"),
        ("unload-adapter", "drop an adapter from memory; running requests keep it"),
    ):
        adapter = _add_action(actions, name, does)
        adapter.add_argument("adapter", metavar="NAME", help="name of the adapter, as in requests")
        add_flags(adapter, "--model MODEL  model that applies it [the default model]")


def _add_action(
    actions: Any, name: str, help: str, description: str | None = None
) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = actions.add_parser(
        name, help=help, description=description or f"{help[0].upper()}{help[1:]}."
    )
    add_server_flags(added, again=True)
    return added


def _add_profile(actions: Any) -> None:
    profile = _add_action(
        actions,
        "profile",
        "record a profile of the step thread and the device in the server's --profile-dir",
        "Record a profile of the step thread and the device. The recording ends at the first of its "
        "limits, or with Ctrl-C. Open the file with Perfetto or chrome://tracing.",
    )
    add_flags(profile, _PROFILE, S=seconds(0.1, 60), N=whole(1, 10_000))


def _add_capture(actions: Any) -> None:
    capture = _add_action(
        actions,
        "capture",
        "write failing requests to the server's --capture-dir, for 'kestrel-grpc replay'",
        "Write requests that fail by the server's fault to files. Such requests end with UNKNOWN, "
        "INTERNAL, DATA_LOSS or DEADLINE_EXCEEDED.",
    )
    capture.add_argument(
        "action_of_it",
        choices=("start", "stop"),
        metavar="start|stop",
        help="start or stop capturing",
    )
    add_flags(capture, _CAPTURE, N=whole(1, 100))


def run(args: argparse.Namespace) -> int:
    with connected_admin(args) as admin:
        try:
            for line in _ACTIONS[args.action](admin, args):
                print(line)
        except UnicodeError:  # A message holds only text.
            raise CommandError("an argument is not valid UTF-8") from None
    return 0


def _drain(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    left = admin.drain()
    return [
        f"draining: {counted(left, 'request')} {'is' if left == 1 else 'are'} running or waiting"
    ]


def _cancel(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    return [f"{counted(admin.cancel(args.request_id), 'request')} cancelled"]


def _flush(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    deleted = admin.flush_caches(stored_images=args.stored_images)
    return [f"flushed; {deleted} stored images deleted"]


def _level(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    before = admin.set_log_level(args.level, args.module)
    named = before or ("none of its own" if args.module else "another")
    return [f"log level {args.level}, previously {named}"]


def _statistics(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    statistics = admin.statistics().to_dict()
    methods = statistics.pop("methods")
    groups = {"": statistics, **{f"{each.pop('method')} ": each for each in methods}}
    return [
        f"{prefix}{name}: {_number(value)}"
        for prefix, group in groups.items()
        for name, value in group.items()
    ]


def _number(number: float | int) -> str:
    return f"{number:g}" if isinstance(number, float) else f"{number}"


def _profile(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    """Records a profile. Ctrl-C ends the recording early; the server still writes the file."""
    if args.only != "stop":
        file = admin.start_profile(
            seconds=args.seconds, steps=args.steps, python_functions=args.python_functions
        )
        if args.only == "start":
            return [f"profile {file} has begun"]
        print(
            f"recording {file}, for {args.seconds:g} s or {counted(args.steps, 'step')}", flush=True
        )
        with suppress(KeyboardInterrupt):
            time.sleep(args.seconds)
    done = admin.stop_profile()
    return [
        f"profile {done.file}: {done.size_bytes} bytes, {counted(done.steps, 'step')} in {done.duration_ms / 1e3:.2f} s"
    ]


def _capture(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    if args.action_of_it == "start":
        requests = admin.start_capture(requests=args.requests, images=args.images)
        return [f"capturing the next {requests} requests that fail"]
    done = admin.stop_capture()
    return [*done.files, f"{len(done.files)} captured, {done.lost} lost"]


def _load_model(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    source, *own = args.model.split(",")
    settings = dict(_setting(text) for text in own)
    shown = -1
    with admin.load_model(source, settings, make_default=args.default) as loading:
        for progress in loading:
            tenths = 10 * progress.done // progress.total if progress.total else 0
            if tenths != shown:
                shown = tenths
                print(f"{10 * tenths} %: {progress.step}", file=sys.stderr, flush=True)
        loaded = loading.result()
    return [f"{loaded.model} is loaded, in {loaded.load_ms / 1e3:.1f} s"]


def _setting(text: str) -> tuple[str, str]:
    """The name and the value of a setting behind a model's name. Raises CommandError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"{text!r} is not SETTING=VALUE of a model's setting")
    return name, value


def _unload_model(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    admin.unload_model(args.model, grace_s=args.grace)
    return [f"{args.model} is unloaded"]


def _default_model(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    before = admin.set_default_model(args.model)
    return [f"{args.model} is the default model, in place of {before}"]


def _load_adapter(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    adapter = admin.load_adapter(args.adapter, model=args.model)
    return [f"{adapter.name} is loaded: {adapter.size_bytes / 1e6:.1f} MB"]


def _unload_adapter(admin: KestrelAdmin, args: argparse.Namespace) -> list[str]:
    was_loaded = admin.unload_adapter(args.adapter, model=args.model)
    return [f"{args.adapter} {'is unloaded' if was_loaded else 'was not loaded'}"]


_ACTIONS: dict[str, Callable[[KestrelAdmin, argparse.Namespace], list[str]]] = {
    "drain": _drain,
    "cancel": _cancel,
    "flush": _flush,
    "log-level": _level,
    "statistics": _statistics,
    "profile": _profile,
    "capture": _capture,
    "load-model": _load_model,
    "unload-model": _unload_model,
    "default-model": _default_model,
    "load-adapter": _load_adapter,
    "unload-adapter": _unload_adapter,
}
