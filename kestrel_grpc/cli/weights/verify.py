"""``verify``: checks that a model's files are complete and unchanged, and that the model gives known answers."""

from __future__ import annotations

import argparse
import asyncio
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kestrel_client.commands.flag_table import add_flags
from kestrel_engine import ConfigError, KestrelError, RuntimeConfig, maintenance

from ... import __version__
from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.flags import SettingsError
from ...settings.model import DEVICE_FLAGS, add_model_flags, config_error
from ..findings import print_findings
from .model_argument import add_model_argument, computing_config

ESSENTIAL = ("--image", "--json", "--config", "--model", "--weights", "--device")

_FLAGS = """
    --image FILE...  a picture of a known answer
    --no-answer      do not load the model to check known answers
    --record         if no checksums are recorded, write SHA256SUMS beside the files
    --json           print JSON
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Checks that the files exist, their checksums (of the hub at the download, or a SHA256SUMS beside the files),\n"
        "names and shapes of all tensors, their values, and the ids of the released tokenizer. Then loads the model\n"
        "and checks its known answers, its speed and its memory. Some known answers are about pictures that we may\n"
        "not distribute: the check names them; give them with --image. Weights given by a path are checked as the\n"
        "model that --model names:\n"
        "  kestrel-grpc verify\n"
        "  kestrel-grpc verify moondream3-preview --image stop_sign.jpg --image bottles.jpg\n"
        "  kestrel-grpc verify --model moondream3-preview --weights /models/md3 --image stop_sign.jpg\n"
        "Exits with 1 if a check fails."
    )
    add_model_argument(parser)
    add_flags(parser, _FLAGS)
    parser.set_defaults(image=[])
    add_config_flag(parser)
    add_model_flags(parser, only=DEVICE_FLAGS)


def run(args: argparse.Namespace) -> int:
    config = computing_config(args)
    if args.no_answer and args.image:
        raise SettingsError("--image is for known answers, which --no-answer skips")
    for path in args.image:
        if not Path(path).is_file():
            raise SettingsError(f"--image={path}: no such file")
    with LoadingProgress() as progress:
        return print_findings(_findings(config, args, progress), as_json=args.json)


def _findings(
    config: RuntimeConfig, args: argparse.Namespace, progress: LoadingProgress
) -> Iterator[maintenance.Finding]:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "tokenizers"))
    machine = f"kestrel-grpc {__version__}, {versions}, Python {platform.python_version()}"
    yield maintenance.Finding("versions", "ok", f"{machine}, {platform.platform()}")
    failed = False
    try:
        for finding in maintenance.verify(config, record=args.record, progress=progress):
            failed |= finding.status == "fail"
            yield finding
    except ConfigError as error:
        failed = True
        yield maintenance.Finding("files", "fail", str(config_error(error, args)))
    if args.no_answer:
        return
    if failed:
        yield maintenance.Finding("answers", "warn", "not checked, because another check failed")
        return
    accepting = maintenance.accept(config, args.image, progress=progress)

    async def following() -> maintenance.Finding | None:
        return await anext(accepting, None)

    with asyncio.Runner() as runner:
        try:
            while (found := runner.run(following())) is not None:
                yield found
        except (KestrelError, OSError) as error:
            told = config_error(error, args) if isinstance(error, ConfigError) else error
            remedy = "--no-answer skips these checks"
            yield maintenance.Finding("answers", "fail", str(told), remedy)
