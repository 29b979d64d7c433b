"""``verify``: checks that a model's files are complete and unchanged, and that the model gives known answers."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator

from kestrel_engine import KestrelError, RuntimeConfig, maintenance

from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.flags import SettingsError
from ...settings.model import DEVICE_FLAGS, add_model_flags
from ..findings import print_findings
from .download import computing_config

ESSENTIAL = ("--image", "--json", "--config", "--model", "--weights", "--device")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Checks that the files exist, their checksums (of the hub at the download, or a SHA256SUMS beside the files),\n"
        "names and shapes of all tensors, and that all values are finite. Then loads the model and checks its known\n"
        "answers. Known answers exist for kestrel-tiny and moondream3-preview. The answer of\n"
        "moondream3-preview is about an image that we may not distribute (vLLM's test asset stop_sign.jpg): its own\n"
        "code points at the 'sign' in it and draws its box. Give the image with --image. Weights given by a path are\n"
        "checked as the model that --model names:\n"
        "  kestrel-grpc verify\n"
        "  kestrel-grpc verify moondream3-preview --image stop_sign.jpg\n"
        "  kestrel-grpc verify --model moondream3-preview --weights /models/md3 --image stop_sign.jpg\n"
        "Exits with 1 if a check fails."
    )
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="like --model [the configured model]"
    )
    parser.add_argument("--image", metavar="FILE", help="the image of the known answer")
    parser.add_argument(
        "--no-answer", action="store_true", help="do not load the model to check known answers"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="if no checksums are recorded, write SHA256SUMS beside the files",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_config_flag(parser)
    add_model_flags(parser, only=DEVICE_FLAGS)


def run(args: argparse.Namespace) -> int:
    config = computing_config(args)
    if args.no_answer and args.image is not None:
        raise SettingsError("--image is for the known answer, which --no-answer skips")
    with LoadingProgress() as progress:
        return print_findings(_findings(config, args, progress), as_json=args.json)


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
        yield maintenance.Finding("answer", "warn", "not checked, because another check failed")
        return
    try:
        yield asyncio.run(maintenance.answer(config, args.image, progress=progress))
    except KestrelError as error:
        yield maintenance.Finding("answer", "fail", str(error), "--no-answer skips this check")
