"""Measures the vision tower: TFLOP/s and crops/s by the number of crops of a pass.

python -m benchmarks.gpu.vision --model moondream2 --random-weights --device cuda --json F

The crops of the trace's images are on the device. Device events time the tower alone (patch embedding, blocks and the
last LayerNorm) as steps run it: the captured pass, with the copies of crops and features to and from its graph. The
benchmark also measures whole steps, with the copy of the crops, the tower, stitching, pooling and the projector, by the
times that the runtime reports.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kestrel_engine import ImageLimits, PreparedImage
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.types.model_config import VisionConfig

from ..device.model_work import vision_flop
from ..device.rates import gemm_rate, seconds_of
from ..models.hand_made_steps import HandMadeSteps
from ..models.opening import MODEL_FLAGS, Opened, run_on_model
from ..reports import bars
from ..reports.program import Flag, Program
from ..reports.report import Report, median
from ..traffic.chart_trace import draw_images

PROGRAM = Program(
    "gpu.vision",
    __doc__,
    Flag("--crops", (56, 28, 9, 1), "crops of a pass", quick=[2, 1]),
    Flag("--repeats", 9, "measurements, whose median is reported", quick=1),
    others=MODEL_FLAGS,
)
IMAGES_FROM = 3_000_000
"""The images of the trace whose crops are encoded."""


def prepared_images(count: int, vision: VisionConfig) -> list[PreparedImage]:
    """Returns images of the trace, decoded and tiled, each with a different key."""
    limits = ImageLimits()
    images = draw_images(min(count, 8), first=IMAGES_FROM)
    drawn = [cut_crops(open_image(image, limits), vision) for image in images]
    return [replace(drawn[i % len(drawn)], key=f"benchmark-{i}") for i in range(count)]


def measure(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    crop_counts, repeats = args.crops, args.repeats
    config, device = opened.built.model, opened.device
    runtime = opened.runtime
    model = runtime.model
    encode_crops = getattr(runtime, "encode_crops", model.vision.encode_crops)
    images = prepared_images(6, config.vision)
    crops = np.concatenate([image.crops for image in images])
    most = max(crop_counts)
    crops = np.concatenate([crops] * -(-most // len(crops)))[:most]
    there = torch.from_numpy(crops).to(device)
    ceiling = _ceiling(config.vision, most, model.dtype, device, repeats)
    title = "Vision tower, crops on the device"
    for count in crop_counts:
        some = there[:count]
        with torch.inference_mode():
            took = seconds_of(partial(encode_crops, some), device, repeats=repeats)
        tflops = vision_flop(config, count) / took / 1e12
        report.add(
            title,
            {
                "model": opened.name,
                "crops": count,
                "ms": 1e3 * took,
                "crops/s": count / took,
                "TFLOP/s": tflops,
                "GEMM ceiling": ceiling / 1e12,
            },
        )
        limits = bars.VISION_TFLOPS.get(count, bars.NONE) if opened.on_cuda else bars.NONE
        name = f"{opened.name}: vision tower, {count} crops"
        report.figure(name, tflops, "TFLOP/s", limits, floor=ceiling / 1e12)
    _whole_step(opened, report, images, repeats)


def _ceiling(
    vision: VisionConfig, crops: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> float:
    """Returns FLOP/s of the tower's largest matrix products, weighted by their shares of the work."""
    rows, d, ff = crops * vision.grid**2, vision.enc_dim, vision.enc_ff_dim
    shapes = [(3 * d, d), (d, d), (ff, d), (d, ff)]
    flop = [2 * rows * columns * inner for columns, inner in shapes]
    rates = [gemm_rate(rows, n, k, dtype, device, repeats=repeats) for n, k in shapes]
    return sum(flop) / sum(f / rate for f, rate in zip(flop, rates, strict=True))


def _whole_step(
    opened: Opened, report: Report, images: Sequence[PreparedImage], repeats: int
) -> None:
    steps = HandMadeSteps(opened.runtime)
    times = []
    for _ in range(repeats):
        times.append(steps.encode(images).vision_s)
        steps.end([], [image.key for image in images])
    crops = sum(image.num_crops for image in images)
    report.add(
        "A step that encodes whole images, by the runtime's clock",
        {
            "model": opened.name,
            "images": len(images),
            "crops": crops,
            "ms": 1e3 * median(times),
            "crops/s": crops / median(times),
        },
    )
    name = f"{opened.name}: step of {len(images)} images"
    report.figure(name, 1e3 * median(times), "ms", at_least=False)


def main(arguments: Sequence[str] | None = None) -> Report:
    return run_on_model(PROGRAM, measure, arguments)


if __name__ == "__main__":
    main()
