"""``calibrate``: fits the calibration of a model's scores on labelled images, and writes it to a file."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from kestrel_client.commands.files import file_errors
from kestrel_client.commands.flag_table import add_flags
from kestrel_client.commands.terminal import counted
from kestrel_client.commands.values import whole
from kestrel_engine import maintenance

from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.model import DEVICE_FLAGS, add_model_flags
from ..engine_errors import command_errors
from .model_argument import add_model_argument, computing_config

ESSENTIAL = "--annotations --images --out --json --config --model --weights --device".split()

_FLAGS = """
    --annotations FILE  labels in COCO's form, with boxes [required]
    --images FOLDER     folder of the image files [required]
    --out FILE          file to write the calibration to
    --limit N           use only the first N images
    --absent N          questions about absent objects for each image [=1]
    --json              print JSON
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Asks point, detect and segment about each image, compares the results with the labels, and fits a curve for\n"
        "each skill on half of the images. The error that it prints is measured on the other half; the written curves\n"
        "are then fitted on all images. Without --out it only measures. The server reads the file\n"
        "score_calibration.json beside the weights, or the file that --calibration names (docs/use/scores.md):\n"
        "  kestrel-grpc calibrate --annotations instances.json --images photos/ --out score_calibration.json"
    )
    add_model_argument(parser)
    add_flags(parser, _FLAGS, limit=whole(2), absent=whole(0))
    add_config_flag(parser)
    add_model_flags(parser, only=DEVICE_FLAGS)


def run(args: argparse.Namespace) -> int:
    config, places = computing_config(args), (Path(args.annotations), Path(args.images))
    with command_errors(args):
        images = maintenance.read_labelled_images(*places, absent=args.absent)[: args.limit]
        with LoadingProgress() as progress:
            report = asyncio.run(maintenance.calibrate(config, images, progress=progress))
    if args.out is not None:
        with file_errors("write", args.out):
            Path(args.out).write_text(report.text, encoding="utf-8")
    _print(report, as_json=args.json)
    return 0


def _print(report: Any, *, as_json: bool) -> None:
    """``report``: from maintenance.calibrate."""
    if as_json:
        names = {
            "results": "count",
            "correct": "correct",
            "raw_error": "raw_error",
            "error": "error",
        }
        shown = {
            "model": report.model,
            "images": report.num_images,
            "curves": {
                skill: {key: getattr(fitted, name) for key, name in names.items()}
                for skill, fitted in report.curves.items()
            },
        }
        print(json.dumps(shown))
        return
    print(f"{report.model}: {counted(report.num_images, 'image')}")
    print(f"{'':10}{'results':>9}{'correct':>9}{'error raw':>11}{'calibrated':>12}")
    for name, fitted in report.curves.items():
        print(
            f"{name:10}{fitted.count:9}{fitted.correct:9.3f}{fitted.raw_error:11.4f}{fitted.error:12.4f}"
        )
