"""``cluster``: places servers on the nodes of a Ray cluster, and says where they are.

Only ``up`` and ``down`` load Ray. The others ask the directory over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType

from kestrel_client.commands.flag_table import add_flags as add_flags_of
from kestrel_client.commands.parser import CommandError

from ...cluster.directory import Server
from ...cluster.follow import DirectoryError, Follower, ask, check_url
from ...cluster.front import check_front, run_front
from ...cluster.head import ClusterError
from ...cluster.plan import cluster_plan
from ...logs.records import flush_log, set_up_logging
from ...settings.addresses import AddressError
from ...settings.cluster import ClusterConfig
from ...settings.configuration import add_flags, configuration
from ...settings.flags import Parser, add_settings, configured
from ...settings.server import ServerConfig
from ...workers.restarts import WorkersError
from ..engine_errors import command_errors

ESSENTIAL = """
    --model --weights --device --config --replicas --max-replicas --replica-gpus --insecure-listen
    --auth-tokens --tls-cert --tls-key --addresses-file --endpoints-file --front
""".split()
_ACTIONS = {
    "up": "start the servers, or upgrade them to these settings, and wait until they serve",
    "status": "list the servers",
    "follow": "write the servers to files whenever they change, and run a front with --front",
    "down": "end the servers, once their running requests have ended",
}

_FLAGS = """
    --directory URL  for status and follow: the list of servers [http://, --directory-listen, and --application as path]
    --addresses-file FILE  for follow: an address a line
    --endpoints-file FILE  for follow: what Envoy's EDS reads (path_config_source)
    --front  for follow: run Envoy at --listen, which gives each call to a server; needs the extra front
    --json   for status: print JSON
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    actions = "\n".join(f"  {name:<8}{what}" for name, what in _ACTIONS.items())
    parser.epilog = (
        f"actions:\n{actions}\n\n"
        "Takes the settings of serve, and the section [cluster] of the same file. Each server listens at the address\n"
        "of its node; --listen is the front's. Files that settings name must be on every node."
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=tuple(_ACTIONS),
        default="up",
        metavar="ACTION",
        help=f"{', '.join(_ACTIONS)} [up]",
    )
    add_flags(parser)
    add_settings(parser, ClusterConfig)
    assert isinstance(parser, Parser)
    add_flags_of(parser, _FLAGS, FILE=Path)
    parser.set_defaults(settings=parser.sources.settings)


def run(args: argparse.Namespace) -> int:
    config = configured(ClusterConfig, args)
    url = args.directory or f"http://{config.directory_listen}/{config.application}"
    if args.action == "status":
        return _status(url, args)
    if args.action == "follow":
        return _follow(url, args)
    on_ray = _ray()
    with command_errors(args, ClusterError, AddressError):
        if args.action == "down":
            on_ray.connect()
            on_ray.remove(config)
            return 0
        plan = cluster_plan(args, configuration(args), args.settings)
        on_ray.connect()
        on_ray.deploy(plan, partial(print, file=sys.stderr))
    print(
        f"kestrel-grpc cluster ready: {plan.task.model}, settings {plan.task.version}, listed at {url}"
    )
    return 0


def _ray() -> ModuleType:
    try:
        from ...cluster import on_ray
    except ImportError as error:
        raise CommandError(
            f"needs Ray, and the package {error.name} is missing; run pip install ./clients/python '.[ray]'"
        ) from None
    return on_ray


def _status(url: str, args: argparse.Namespace) -> int:
    with command_errors(args, DirectoryError):
        servers = ask(url)
    if args.json:
        print(json.dumps([asdict(each) for each in servers], indent=1))
    else:
        for each in servers:
            print(_line(each))
    return 0 if servers else 1


def _line(server: Server) -> str:
    load = " ".join(f"{name}={value:.2f}" for name, value in server.load.items())
    return f"{server.address} {server.model} {server.version} node={server.node[:12]} {load}"


def _follow(url: str, args: argparse.Namespace) -> int:
    if not args.front and args.addresses_file is None and args.endpoints_file is None:
        raise CommandError("follow needs --front, --addresses-file or --endpoints-file")
    for flag in ("addresses_file", "endpoints_file"):
        path = getattr(args, flag)
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(
                f"--{flag.replace('_', '-')}={path}: the folder {path.parent} does not exist"
            )
    config = configuration(args).server
    with command_errors(args, AddressError, DirectoryError):
        check_url(url)
        if args.front:
            check_front(config)
    set_up_logging(config.log_level, config.log_format, buffer_bytes=config.log_buffer_bytes)
    follower = Follower(url, args.addresses_file, args.endpoints_file)
    try:
        with command_errors(args, AddressError, WorkersError):
            asyncio.run(_until_signal(follower, config if args.front else None))
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None
    finally:
        flush_log()
    return 0


async def _until_signal(follower: Follower, front: ServerConfig | None) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    tasks = [asyncio.create_task(follower.run(stopping))]
    if front is not None:
        tasks.append(asyncio.create_task(run_front(front, follower, stopping)))
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    stopping.set()
    await asyncio.gather(*tasks)
