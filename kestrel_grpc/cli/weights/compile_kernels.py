"""``compile``: compiles the kernels of models into a folder that an image or a volume carries. Needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from kestrel_client.commands.flag_table import add_flags
from kestrel_engine import RuntimeConfig, maintenance

from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.model import add_model_flags, runtime_configs
from ..engine_errors import command_errors

ESSENTIAL = "--arch --out --config --model --weights --precision --max-batch-size".split()

_FLAGS = """
    --arch ARCH          architecture of the cards: sm_90 for H100 and H200 [required]
    --out DIR            folder for the kernels [required]
    --multiprocessors N  number of the card's multiprocessors, which some FP8 kernels are compiled for [sm_90: 132]
    --adapters           also for requests with adapters
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Give the settings that the server will have, or its file:\n"
        "  kestrel-grpc compile --arch sm_90 --model moondream2 --precision fp8 --out /opt/kernels\n"
        "  kestrel-grpc serve --model moondream2 --precision fp8 --kernel-cache-dir /opt/kernels\n"
        "Run it with the same installation as the server: Triton finds kernels by the contents of its own files.\n"
        "A named model has its released shape, and nothing is downloaded. For another one, give its files\n"
        "(--weights). A second call compiles only what is missing."
    )
    add_flags(parser, _FLAGS, multiprocessors=int)
    add_config_flag(parser)
    add_model_flags(parser, several=True)


def run(args: argparse.Namespace) -> int:
    configs: list[RuntimeConfig] = list(runtime_configs(args))
    if args.adapters:
        configs = [dataclasses.replace(config, adapters_dir=".") for config in configs]
    folder, num_sms = Path(os.path.expanduser(args.out)), args.multiprocessors
    with command_errors(args), LoadingProgress() as progress:
        compiling = maintenance.compile_kernels(
            configs, args.arch, folder, num_sms=num_sms, progress=progress
        )
        for config, done in zip(configs, compiling, strict=True):
            print(
                f"{config.model}: {done.compiled} kernels compiled for {args.arch}, {done.found} found in {folder},"
                f" in {done.seconds:.0f} s",
                flush=True,
            )
    return 0
