"""``admin``: what whoever runs a server may do to it while it runs (AdminService)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kestrel_client._pb.kestrel.v1 import admin_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub

from .connection import CallMetadata, add_server_flags, open_channel

_TIMEOUT_S = 10.0
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
    actions.add_parser("statistics", help="what the server is doing, and has done")


def run(args: argparse.Namespace) -> int:
    with open_channel(args) as (channel, metadata):
        for line in _ACTIONS[args.action](AdminServiceStub(channel), metadata, args):
            print(line)
    return 0


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
    request = pb.SetLogLevelRequest(level=_LEVELS[args.level])
    response = stub.SetLogLevel(request, metadata=metadata, timeout=_TIMEOUT_S)
    names = {level: name for name, level in _LEVELS.items()}
    return [f"log level {args.level}, before {names.get(response.previous_level, 'another')}"]


def _statistics(
    stub: AdminServiceStub, metadata: CallMetadata, args: argparse.Namespace
) -> list[str]:
    request = pb.GetStatisticsRequest()
    response = stub.GetStatistics(request, metadata=metadata, timeout=_TIMEOUT_S)
    values = {field.name: getattr(response, field.name) for field in response.DESCRIPTOR.fields}
    return [
        f"{name}: {value:g}" if isinstance(value, float) else f"{name}: {value}"
        for name, value in values.items()
    ]


_ACTIONS: dict[str, Callable[[Any, CallMetadata, argparse.Namespace], list[str]]] = {
    "drain": _drain,
    "cancel": _cancel,
    "flush": _flush,
    "log-level": _level,
    "statistics": _statistics,
}
