"""``download``: downloads a model's files to the hub's cache, or to a folder or a bucket for machines without access to
the hub."""

from __future__ import annotations

import argparse
import dataclasses

from kestrel_client.commands.parser import CommandError
from kestrel_engine import ConfigError, KestrelError, RuntimeConfig, maintenance

from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.model import SOURCE_FLAGS, add_model_flags, config_error

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
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="like --model [the configured model]"
    )
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        help="copy the files to this folder, or upload them to s3://BUCKET/PREFIX, with SHA256SUMS",
    )
    add_config_flag(parser)
    add_model_flags(parser, only=SOURCE_FLAGS)


def run(args: argparse.Namespace) -> int:
    config = source_config(args)
    try:
        with LoadingProgress() as progress:
            done = maintenance.download(config, args.to, progress=progress)
    except ConfigError as error:
        raise config_error(error, args) from None
    except KestrelError as error:
        raise CommandError(str(error)) from None
    for file in done.files:
        print(file)
    print(f"{done.name}: {len(done.files)} files, {done.size_bytes / 1e6:,.1f} MB")
    return 0


def computing_config(args: argparse.Namespace) -> RuntimeConfig:
    """``source_config`` with the device, its precision and its threads. Raises SettingsError."""
    config = source_config(args)
    try:
        return dataclasses.replace(
            config, device=args.device, precision=args.precision, cpu_threads=args.threads
        )
    except ConfigError as error:
        raise config_error(error, args) from None


def source_config(args: argparse.Namespace) -> RuntimeConfig:
    """The configuration of the model and its files. MODEL overrides all other settings. Raises SettingsError."""
    try:
        config = RuntimeConfig(
            model=args.model,
            model_path=args.weights,
            tokenizer_path=args.tokenizer,
            cache_dir=args.cache_dir,
            offline=args.offline,
        )
        if args.name is None:
            return config
        return dataclasses.replace(config, model=args.name, model_path=None)
    except ConfigError as error:
        raise config_error(error, args) from None
