"""``download``: downloads a model's files to the hub's cache, or to a folder or a bucket for machines without access to
the hub."""

from __future__ import annotations

import argparse

from kestrel_client.commands.terminal import counted
from kestrel_engine import maintenance

from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.model import SOURCE_FLAGS, add_model_flags
from ..engine_errors import command_errors
from .model_argument import add_model_argument, source_config

ESSENTIAL = ("--to", "--config", "--cache-dir")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Without --to, the files are in the hub's cache (HF_HOME), where 'serve --offline' finds them.\n"
        "With --to, they are in a folder with their checksums, for a machine without access to the hub:\n"
        "  kestrel-grpc download moondream2 --to /models/moondream2\n"
        "  kestrel-grpc verify --model moondream2 --weights /models/moondream2\n"
        "  kestrel-grpc serve --model moondream2 --weights /models/moondream2\n"
        "With --to s3://BUCKET/PREFIX, they are in a bucket, for many machines (docs/run/scaling.md). Run it again to\n"
        "go on after an interruption:\n"
        "  kestrel-grpc download moondream2 --to s3://my-bucket/models/moondream2\n"
        "  kestrel-grpc serve --model s3://my-bucket/models/moondream2\n"
        "A gated model needs access, granted on the hub's page, and HF_TOKEN."
    )
    add_model_argument(parser)
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        help="copy the files to this folder, or upload them to s3://BUCKET/PREFIX, with SHA256SUMS",
    )
    add_config_flag(parser)
    add_model_flags(parser, only=SOURCE_FLAGS)


def run(args: argparse.Namespace) -> int:
    config = source_config(args)
    with command_errors(args), LoadingProgress() as progress:
        done = maintenance.download(config, args.to, progress=progress)
    for file in done.files:
        print(file)
    print(f"{done.name}: {counted(len(done.files), 'file')}, {done.size_bytes / 1e6:,.1f} MB")
    return 0
