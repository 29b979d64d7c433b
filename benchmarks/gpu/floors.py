"""Measures the limits of this machine that no kernel, copy or image decoder can exceed.

python -m benchmarks.gpu.floors [--device cuda] [--json F]

It measures the copy rate of the device's memory (bytes read and written), bf16 and FP8 matrix products (a large one,
and the shapes of Moondream's vision tower and prefill), copies from pinned host memory, the host time of a launch and
of a graph launch, and preprocessing of the trace's images on all cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from kestrel_engine import ImageLimits, processors
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.types.model_config import VisionConfig

from ..device.rates import (
    copy_rate,
    fp8_gemm_rate,
    gemm_rate,
    seconds_of,
    supports_fp8,
    synchronize,
)
from ..reports.program import Flag, Program
from ..reports.report import Report, median
from ..traffic.chart_trace import draw_images

PROGRAM = Program(
    "gpu.floors", __doc__, Flag("--device", "auto", "auto (CUDA if there is one), cpu or cuda")
)
PREPROCESSING_FROM = 2_000_000
"""The images of the trace that are preprocessed."""

GEMMS = {
    "large": (8192, 8192, 8192),
    "vision qkv, 56 crops": (56 * 729, 3 * 1152, 1152),
    "vision fc1, 56 crops": (56 * 729, 4304, 1152),
    "vision fc2, 56 crops": (56 * 729, 1152, 4304),
    "prefill qkv, 16 images": (16 * 730, 3 * 2048, 2048),
    "prefill fc1, 16 images": (16 * 730, 8192, 2048),
    "prefill fc2, 16 images": (16 * 730, 2048, 8192),
}
"""Rows, columns and inner dimension."""


def measure_memory(report: Report, device: torch.device, *, quick: bool) -> None:
    rate = copy_rate(device, num_bytes=4 << 20 if quick else None)
    report.figure(f"{device.type}: copy rate", rate / 1e12, "TB/s")
    if device.type != "cuda":
        return
    num_bytes = 64 << 20
    host = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8).pin_memory()
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    took = seconds_of(lambda: there.copy_(host, non_blocking=True), device, repeats=9)
    report.figure("pinned host to device", num_bytes / took / 1e9, "GB/s")


def measure_gemms(report: Report, device: torch.device, *, quick: bool) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    for shape, sizes in GEMMS.items():
        rows, columns, inner = (max(s // 64, 8) for s in sizes) if quick else sizes
        rate = gemm_rate(rows, columns, inner, dtype, device)
        report.figure(f"{name} GEMM, {shape}", rate / 1e12, "TFLOP/s")
    if not supports_fp8(device):
        return
    for shape in ("large", "prefill fc1, 16 images"):
        for row_scales in (False, True):
            scales = "a scale a row" if row_scales else "one scale"
            rate = fp8_gemm_rate(*GEMMS[shape], device, row_scales=row_scales)
            report.figure(f"FP8 GEMM, {shape}, {scales}", rate / 1e12, "TFLOP/s")


def measure_launches(report: Report, device: torch.device, *, quick: bool) -> None:
    """Measures the host time to enqueue a small operator and, on CUDA, a graph of a hundred operators."""
    x, count = torch.zeros(32, device=device), 100 if quick else 2000
    took = _host_us(lambda: x.add_(1), device, count)
    report.figure("host time of a small operator", took, "us", at_least=False)
    if device.type != "cuda":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            x.add_(1)
    took = _host_us(graph.replay, device, 200)
    report.figure("host time of launching a graph of 100 kernels", took, "us", at_least=False)
    device_s = seconds_of(graph.replay, device, repeats=50)
    report.figure(
        "device time of a dependent empty kernel in a graph", 1e4 * device_s, "us", at_least=False
    )


def _host_us(work: Callable[[], object], device: torch.device, count: int) -> float:
    """Returns the median of rounds that are short enough not to fill the device's queue."""
    rounds, portion = [], 50
    for _ in range(max(count // portion, 1)):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(portion):
            work()
        rounds.append((time.perf_counter() - began) / portion)
    synchronize(device)
    return 1e6 * median(rounds)


def measure_preprocessing(report: Report, _: torch.device, *, quick: bool) -> None:
    """Measures preprocessing of the trace's images, from JPEG bytes to crops, with one thread and on all cores."""
    cores = processors()
    images = draw_images(2 if quick else 16 * cores, first=PREPROCESSING_FROM)
    limits, vision = ImageLimits(), VisionConfig()

    def work(image: bytes) -> int:
        return cut_crops(open_image(image, limits), vision).num_crops

    work(images[0])
    few = images[: 2 if quick else 16]
    began = time.perf_counter()
    crops = sum(work(image) for image in few)
    alone = time.perf_counter() - began
    report.figure("preprocessing, 1 thread", len(few) / alone, "images/s")
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, few))
        began = time.perf_counter()
        list(pool.map(work, images))
        together = time.perf_counter() - began
    report.figure(f"preprocessing, {cores} threads", len(images) / together, "images/s")
    report.add("Preprocessing", {"images": len(images), "crops an image": crops / len(few)})


def main(arguments: Sequence[str] | None = None) -> Report:
    """With --quick, a CPU gets a sixty-fourth of the work."""
    with PROGRAM.reporting(arguments) as (args, _, report):
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(auto if args.device == "auto" else args.device)
        for measure in (measure_memory, measure_gemms, measure_launches, measure_preprocessing):
            measure(report, device, quick=args.quick)
    return report


if __name__ == "__main__":
    main()
