"""``train``: fits an adapter to labelled images, and writes it into the folder of adapters."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kestrel_client.commands.flag_table import add_flags
from kestrel_client.commands.terminal import counted
from kestrel_engine import teaching

from ...process.startup_progress import LoadingProgress
from ...settings.configuration import add_config_flag
from ...settings.flags import add_settings, configured
from ...settings.model import DEVICE_FLAGS, add_model_flags
from ..engine_errors import command_errors
from .model_argument import computing_config

if TYPE_CHECKING:
    from tqdm import tqdm

ESSENTIAL = """
    --adapter --data --overwrite --rank --epochs --minutes --layers --json --config --model --weights
    --adapters-dir --device --precision
""".split()

_FLAGS = """
    --adapter NAME  name of the adapter [required]
    --data FOLDER   folder of the images and their labels [required]
    --overwrite     replace NAME.safetensors if it is there
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "The folder has data.jsonl, with one example a line, or annotations.json in COCO's form\n"
        "(docs/use/teaching.md):\n"
        '  {"image": "a.png", "question": "Is there a hexagon?", "answer": "yes"}\n'
        '  {"image": "a.png", "object": "hexagon", "points": [[0.31, 0.52]]}\n'
        '  {"image": "a.png", "object": "hexagon", "boxes": [[0.25, 0.44, 0.37, 0.6]]}\n'
        "The adapter comes into --adapters-dir by one rename. A server of this folder finds it with the next request\n"
        "that names it; there is nothing to reload. Beside it is NAME.report.json:\n"
        "  kestrel-grpc train --adapter hexagons --data hexagons/ --adapters-dir /srv/adapters --minutes 2"
    )
    add_flags(parser.add_argument_group("what is taught"), _FLAGS)
    add_settings(parser, teaching.TeachingSettings)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_config_flag(parser)
    add_model_flags(parser, only=DEVICE_FLAGS)


def run(args: argparse.Namespace) -> int:
    settings = configured(teaching.TeachingSettings, args, seed=args.seed or 0)
    others = {"random_weights": args.random_weights == "on", "adapters_dir": args.adapters_dir}
    config = computing_config(args, **others)
    with command_errors(args):
        images = teaching.read_folder(Path(os.path.expanduser(args.data)))
        with LoadingProgress() as progress, _Bar() as bar:
            report = asyncio.run(
                teaching.teach(
                    config,
                    args.adapter,
                    images,
                    settings,
                    overwrite=args.overwrite,
                    progress=progress,
                    on_step=bar,
                )
            )
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report)
    return 0


class _Bar:
    """The bar of the training: steps, rate, time left and losses. It appears with the first step."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, step: Any) -> None:
        """``step``: how far the training is."""
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                unit="step",
                mininterval=0.2 if sys.stderr.isatty() else 10.0,
                dynamic_ncols=True,
                desc="training",
            )
        self._bar.total = step.num_steps
        losses = {"epoch": step.epoch, "loss": f"{step.loss:.3f}"}
        if step.validation is not None:
            losses["validation"] = f"{step.validation:.3f}"
        self._bar.set_postfix(losses, refresh=False)
        self._bar.update(step.step - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _print(report: Any) -> None:
    """``report``: from teaching.teach."""
    fitted = report.fitted
    memory = f", {fitted.peak_bytes / 2**30:.2f} GiB of GPU memory" if fitted.peak_bytes else ""
    print(
        f"{report.adapter}: {counted(fitted.steps, 'step')} in {fitted.seconds:.0f} s ({fitted.seconds_a_step:.3f} s a "
        f"step{memory}), ended by {fitted.ended}; loss {fitted.first_loss:.3f} -> {fitted.best_loss:.3f}"
    )
    kind = "held-out image" if report.held_out else "training image"
    print(f"right on {counted(report.held_out or report.images, kind)}:")
    print(
        f"{'':10}{'examples':>10}{'before':>9}{'after':>9}   objects: labelled, found before, after"
    )
    for kind, before in report.before.items():
        after = report.after[kind]
        shares = [each.right / each.examples for each in (before, after)]
        objects = f"   {before.labelled}, {before.hits}, {after.hits}" if before.labelled else ""
        print(f"{kind:10}{before.examples:10}{shares[0]:9.3f}{shares[1]:9.3f}{objects}")
    print(report.file)
