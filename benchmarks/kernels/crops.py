"""Measures making crops on the device: the time of the device and of the host, by the size of the image.

    python -m benchmarks.kernels.crops [--quick] [--json PATH]

Crops of every size are compared, byte for byte, with those that libvips makes on the CPU; the exit status is 1 if one
differs. "device" is the time from the end of one image to the end of the next by device events, with the copy of the
pixels. "host" is the time until everything is enqueued. "first" is the host time for a new size, whose tables must be
computed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.device.rates import seconds_of, synchronize
from benchmarks.reports.report import Report, benchmark_parser, median
from kestrel_engine.models.vision import num_distinct
from kestrel_engine.preprocess.crops import prepare
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.runtime.gpu.state.staging import ImageUploader, Uploader
from kestrel_engine.runtime.gpu.vision import device_crops
from kestrel_engine.runtime.gpu.vision.device_crops import DeviceCrops
from kestrel_engine.types.model_config import VisionConfig
from kestrel_engine.types.requests import PreparedImage

SIZES = ((420, 520), (850, 600), (1920, 1080), (4000, 3000), (4600, 3450))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUICK = VisionConfig(crop_size=56, max_crops=6, overlap_margin=1)


def image_of(width: int, height: int, vision: VisionConfig) -> tuple[PreparedImage, np.ndarray]:
    """Returns an image of noise as pixels, and its distinct crops."""
    rng = np.random.default_rng(width)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    kept = prepare(DecodedImage(pixels), vision, device_pixels=width * height)
    wanted = prepare(DecodedImage(pixels), vision)
    assert wanted.crops is not None
    return kept, wanted.crops[: num_distinct(wanted.num_crops, wanted.tiling)]


def measure(
    report: Report, vision: VisionConfig, sizes: Sequence[tuple[int, int]], repeats: int
) -> bool:
    """Measures one size. Returns False if crops differ."""
    make = DeviceCrops(vision, Uploader(DEVICE), ImageUploader(DEVICE), DEVICE)
    make.warm_up()
    right = True
    for width, height in sizes:
        image, wanted = image_of(width, height, vision)
        device_crops._layout.cache_clear()
        began = time.perf_counter()
        (found,) = make([image])
        first = time.perf_counter() - began
        differ = int((found.cpu().numpy() != wanted).sum())
        right &= not differ
        host = []
        for _ in range(repeats):
            synchronize(DEVICE)
            began = time.perf_counter()
            make([image])
            host.append(time.perf_counter() - began)
        device = seconds_of(lambda i=image: make([i]), DEVICE, repeats=repeats)  # type: ignore[misc]
        report.add(
            "One image (times in us)",
            {
                "size": f"{width}x{height}",
                "crops": len(wanted),
                "device": 1e6 * device,
                "host": 1e6 * median(host),
                "first": 1e6 * first,
                "bytes that differ": differ,
            },
        )
        if width * height < 2_500_000:
            ten = seconds_of(lambda i=image: make([i] * 10), DEVICE, repeats=repeats)  # type: ignore[misc]
            report.add(
                "Ten images in one group (us an image)",
                {"size": f"{width}x{height}", "device": 1e5 * ten},
            )
    return right


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = benchmark_parser("kernels.crops", __doc__)
    args = parser.parse_args(arguments)
    report = Report("crops", vars(args))
    sizes = ((100, 60),) if args.quick else SIZES
    vision = QUICK if args.quick else VisionConfig()
    right = measure(report, vision, sizes, 1 if args.quick else 30)
    report.finish(args.json)
    if not right:
        sys.exit("WRONG: crops of the device differ from those of the CPU")
    return report


if __name__ == "__main__":
    main()
