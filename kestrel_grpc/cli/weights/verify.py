"""``verify``: whether a model's files are whole, are what was published, and answer as they should."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Iterator

from kestrel_engine import ConfigError, KestrelError, RuntimeConfig, maintenance

from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.flags import SettingsError
from ...settings.model import DEVICE_FLAGS, add_model_flags, config_error
from ..findings import tell
from .download import source_config


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Checks, in this order: the files are there; their checksums, against what the hub said when they were\n"
        "downloaded or a SHA256SUMS beside them; names and shapes of all tensors; that all values are finite; and the\n"
        "answers that are known of the model, for which it is loaded. They are known of kestrel-tiny and of\n"
        "moondream3-preview: its own code points at and boxes a 'sign' in a picture which is not ours to ship (vLLM's\n"
        "test asset stop_sign.jpg); give it by --image. Weights by path are taken for what --model says:\n"
        "  kestrel-grpc verify\n"
        "  kestrel-grpc verify moondream3-preview --image stop_sign.jpg\n"
        "  kestrel-grpc verify --model moondream3-preview --weights /models/md3 --image stop_sign.jpg\n"
        "Exits with 1 if a check fails."
    )
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="as --model; what is configured if left out"
    )
    parser.add_argument("--image", metavar="FILE", help="the picture of the known answer")
    parser.add_argument(
        "--no-answer", action="store_true", help="don't load the model to ask it for known answers"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="where no checksums are recorded, write SHA256SUMS beside the files",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_config_flag(parser)
    add_model_flags(parser, only=DEVICE_FLAGS)


def run(args: argparse.Namespace) -> int:
    config = source_config(args)
    try:
        config = dataclasses.replace(
            config, device=args.device, dtype=args.dtype, cpu_threads=args.threads
        )
    except ConfigError as error:
        raise config_error(error, args) from None
    if args.no_answer and args.image is not None:
        raise SettingsError("--image is for the known answer, which --no-answer leaves out")
    with LoadingProgress() as progress:
        return tell(_findings(config, args, progress), as_json=args.json)


def _findings(
    config: RuntimeConfig, args: argparse.Namespace, progress: LoadingProgress
) -> Iterator[maintenance.Finding]:
    failed = False
    for finding in maintenance.verify(config, record=args.record, progress=progress):
        failed |= finding.status == "fail"
        yield finding
    if args.no_answer:
        return
    if failed:
        yield maintenance.Finding("answer", "warn", "not asked: something else is wrong already")
        return
    try:
        yield asyncio.run(maintenance.answer(config, args.image, progress=progress))
    except KestrelError as error:
        yield maintenance.Finding("answer", "fail", str(error), "--no-answer leaves this check out")
