"""``replay``: repeats a captured request, with a server or in this process."""

from __future__ import annotations

import argparse
import asyncio
import tempfile

import grpc

from kestrel_client.commands.operation import replay

from ...edge.messages.fields import request_options

ESSENTIAL = ("--image", "--in-process", "--server", "--model", "--weights", "--device", "--config")
_UNBOUNDED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    from ...settings.configuration import add_config_flag
    from ...settings.model import add_model_flags

    replay.add_arguments(parser, command)
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="load the model here instead of calling a server, with the model flags of serve",
    )
    add_config_flag(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    if not args.in_process:
        return replay.run(args)
    return asyncio.run(_in_process(args, replay.read_captured(args)))


async def _in_process(args: argparse.Namespace, captured: replay.CapturedCall) -> int:
    """Runs the request with a server in this process, on a private unix socket. Returns the exit status."""
    from kestrel_engine import InferenceEngine

    from ...process.server import KestrelServer
    from ...process.startup_progress import LoadingProgress
    from ...settings.model import runtime_config
    from ...settings.server import ServerConfig
    from ..engine_errors import command_errors

    runtime = runtime_config(args)
    requests = captured.request if isinstance(captured.request, list) else [captured.request]
    for request in requests:
        if (options := request_options(request)) is not None:
            options.ClearField("model")  # This server has only one model.
    with tempfile.TemporaryDirectory(prefix="kestrel-replay-") as folder:
        address = f"unix:{folder}/replay.sock"
        with command_errors(args), LoadingProgress() as progress:
            server = KestrelServer(
                ServerConfig(listen=(address,)),
                runtime,
                lambda: InferenceEngine.create(runtime, progress=progress),
            )
            await server.start()
            engine = await server.load()
        if captured.model not in (None, engine.info.model):
            print(f"captured from {captured.model}, repeated with {engine.info.model}")
        try:
            with grpc.insecure_channel(address, _UNBOUNDED) as channel:
                return await asyncio.to_thread(replay.call, channel, (), captured, args.timeout)
        finally:
            await server.stop(grace_s=0)
