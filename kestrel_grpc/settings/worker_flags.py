"""The flags of several processes: from them comes a WorkersConfig."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .addresses import parse_address, unix_path
from .sources import SettingsError, name_of
from .workers import INDEX, MOST_WORKERS, WorkersConfig, address_of

if TYPE_CHECKING:
    from .server import Flags

_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")
_MOST_RESTARTS = 1_000_000


def add_worker_flags(flags: Flags, whole: Callable[[str], int]) -> None:
    """``whole`` reads a number."""
    defaults = WorkersConfig()
    flags.add(
        "--workers",
        type=whole,
        metavar="N",
        shown="as many as --devices, else 1",
        help="processes that share the TCP addresses of --listen, each with a model and a device of its own; on Linux",
    )
    flags.add(
        "--devices",
        type=devices,
        metavar="DEVICES",
        shown="cpu, or with --device cuda cuda:0 and so on",
        help="each worker's device, with commas: cuda:0,cuda:1",
    )
    flags.add(
        "--worker-listen",
        type=pattern,
        metavar="ADDRESS",
        shown="none",
        help="each worker's own address besides, for probes and administration: "
        "unix:PATH with {index} in it, or HOST:PORT, where worker 1 takes PORT+1",
    )
    flags.add(
        "--worker-restarts",
        type=whole,
        metavar="N",
        default=defaults.restarts,
        help="how often a worker that ended may be started anew within 10 minutes; after that the server ends",
    )


def workers_config(args: argparse.Namespace) -> WorkersConfig:
    """Raises SettingsError."""
    given = tuple(args.devices.split(",")) if args.devices else ()
    count = args.workers if args.workers is not None else max(1, len(given))
    name = name_of(args, "--workers")
    if not 1 <= count <= MOST_WORKERS:
        raise SettingsError(f"{name}={count}: must be 1 to {MOST_WORKERS}")
    if given and len(given) != count:
        raise SettingsError(
            f"{name}={count}: must be the number of devices, and "
            f"{name_of(args, '--devices')} names {len(given)}"
        )
    if given and getattr(args, "device", "auto") != "auto":
        raise SettingsError(
            f"{name_of(args, '--devices')} and {name_of(args, '--device')}: give one of the two"
        )
    if not 0 <= args.worker_restarts <= _MOST_RESTARTS:
        raise SettingsError(
            f"{name_of(args, '--worker-restarts')}={args.worker_restarts}: must be 0 to {_MOST_RESTARTS}"
        )
    try:
        if args.worker_listen is not None:
            parse_address(address_of(args.worker_listen, count - 1))
    except ValueError as error:
        raise SettingsError(
            f"{name_of(args, '--worker-listen')}={args.worker_listen}: of worker {count - 1}: {error}"
        ) from None
    return WorkersConfig(
        count=count, devices=given, listen=args.worker_listen, restarts=args.worker_restarts
    )


def devices(text: str) -> str:
    """A device for each worker, with commas and no spaces between them. Raises ValueError."""
    named = [part.strip() for part in text.split(",")]
    for device in named:
        if not _DEVICE.fullmatch(device):
            raise ValueError("must be cpu or cuda:N, with commas between them")
        if device != "cpu" and named.count(device) > 1:
            raise ValueError(f"{device} is named twice; one process keeps a GPU busy")
    return ",".join(named)


def pattern(text: str) -> str:
    """An address for each worker. Raises ValueError."""
    parse_address(text.replace(INDEX, "0"))
    if (unix_path(text) is not None) != (INDEX in text):
        raise ValueError("must be unix:PATH with {index} in it, or HOST:PORT")
    return text
