"""Measures prefill: batches of image prefixes, questions after cached prefixes, and the MoE layers alone.

python -m benchmarks.gpu.prefill --model moondream2 --random-weights --device cuda --json F

The runtime executes steps with prefixes (BOS and image, which attend in both directions) or with questions, without a
scheduler, and reports their times. The MoE layers are called as in the runtime's prefill, with random activations for
the tokens of as many prefixes. The routers choose the experts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kestrel_engine.models.text import Moe
from kestrel_engine.types.requests import ImageBlock

from ..decode import FIRST_TEXT_ID
from ..device.model_work import moe_flop, prefix_flop
from ..device.rates import gemm_rate, seconds_of
from ..models.hand_made_steps import HandMadeSteps
from ..models.opening import MODEL_FLAGS, Opened, run_on_model
from ..reports import bars
from ..reports.program import Flag, Program
from ..reports.report import Report, median
from .vision import prepared_images

PROGRAM = Program(
    "gpu.prefill",
    __doc__,
    Flag("--images", (1, 4, 16), "images a step", quick=[1, 2]),
    Flag("--repeats", 7, "measurements, whose median is reported", quick=1),
    others=MODEL_FLAGS,
)
QUESTION = 25
"""Tokens of a question with its template."""


def measure_prefixes(
    opened: Opened, report: Report, *, image_counts: Sequence[int], repeats: int
) -> None:
    config, device = opened.built.model, opened.device
    model = opened.runtime.model
    steps = HandMadeSteps(opened.runtime)
    most = max(image_counts)
    text, prefix = config.text, config.image_prefix
    # The rate of the largest product is the ceiling, because most of the work is fc1 and fc2.
    ceiling = gemm_rate(most * prefix, text.ff_dim, text.dim, model.dtype, device, repeats=repeats)
    images = prepared_images(most, config.vision)
    steps.encode(images)
    held = [steps.hold(prefix + QUESTION) for _ in images]
    rng, bos = random.Random(0), config.ids.bos_id
    for count in image_counts:
        rows = [
            steps.row(h, (bos, ImageBlock(p.key, config.image_positions)), 0)
            for h, p in zip(held[:count], images, strict=False)
        ]
        took = median([steps.prefill(rows).prefill_s for _ in range(repeats + 1)][1:])
        tflops = prefix_flop(config, count) / took / 1e12
        report.add(
            "Image prefixes, by the runtime's clock",
            {
                "model": opened.name,
                "images": count,
                "positions": count * prefix,
                "ms": 1e3 * took,
                "TFLOP/s": tflops,
                "GEMM ceiling": ceiling / 1e12,
            },
        )
        limits = bars.PREFILL_TFLOPS.get((opened.name, count), bars.NONE)
        limits = limits if opened.on_cuda else bars.NONE
        name = f"{opened.name}: prefix prefill, {count} images"
        report.figure(name, tflops, "TFLOP/s", limits, floor=ceiling / 1e12)
    for count in image_counts:
        words = range(FIRST_TEXT_ID, text.vocab_size)
        rows = [
            steps.row(h, tuple(rng.choices(words, k=QUESTION)), prefix, draw=0)
            for h in held[:count]
        ]
        took = median([steps.prefill(rows).prefill_s for _ in range(repeats + 1)][1:])
        report.add(
            f"Questions of {QUESTION} tokens behind cached prefixes, with one sampled token",
            {"model": opened.name, "questions": count, "ms": 1e3 * took},
        )
        name = f"{opened.name}: prefill of {count} questions"
        report.figure(name, 1e3 * took, "ms", at_least=False)
    steps.end(held, [p.key for p in images])


def measure_moe(opened: Opened, report: Report, *, images: int, repeats: int) -> None:
    """Measures the MoE layers. Does nothing for a model without experts."""
    config, device = opened.built.model, opened.device
    model = opened.runtime.model
    layers = [block.mlp for block in model.text.blocks if isinstance(block.mlp, Moe)]
    if not layers:
        return
    tokens = images * config.image_prefix
    u = torch.randn(tokens, config.text.dim, device=device).to(model.dtype)
    call = moe_call(kernels=hasattr(opened.runtime, "vision"))
    with torch.inference_mode():
        took = median(
            [seconds_of(partial(call, layer, u), device, repeats=repeats) for layer in layers[:4]]
        )
    tflops = moe_flop(config, tokens) / took / 1e12
    stored = str(layers[0].fc1.dtype).removeprefix("torch.")
    report.add(
        "One MoE layer, router included",
        {
            "model": opened.name,
            "tokens": tokens,
            "experts": stored,
            "ms": 1e3 * took,
            "TFLOP/s": tflops,
        },
    )
    judged = opened.on_cuda and opened.name.startswith("moondream3") and images == 16
    name = f"{opened.name}: MoE layer, {images} images, {stored}"
    report.figure(name, tflops, "TFLOP/s", bars.MOE_TFLOPS if judged else bars.NONE)


def moe_call(*, kernels: bool) -> Callable[[Moe, Tensor], Tensor]:
    """Returns the function that computes a layer's experts in prefill: the kernels, or plain torch."""
    if not kernels:
        return Moe.__call__
    from kestrel_engine.kernels.moe.prefill import moe_prefill
    from kestrel_engine.kernels.moe.route import route

    def call(layer: Moe, u: Tensor) -> Tensor:
        weights, experts = route(layer.router(u), layer.experts_per_token)
        return moe_prefill(
            u, weights, experts, layer.fc1, layer.fc2, layer.fc1_scale, layer.fc2_scale
        )

    return call


def measure(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    measure_prefixes(opened, report, image_counts=args.images, repeats=args.repeats)
    measure_moe(opened, report, images=max(args.images), repeats=args.repeats)


def main(arguments: Sequence[str] | None = None) -> Report:
    return run_on_model(PROGRAM, measure, arguments)


if __name__ == "__main__":
    main()
