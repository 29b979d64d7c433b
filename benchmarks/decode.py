"""Measures the decode step of the real runtime, without a scheduler, against its memory floor.

python -m benchmarks.decode --model moondream2 --random-weights --device cuda --json F

Sequences of different texts are prefilled to about 800 positions. Then each step takes the tokens that the last step
sampled as input, with two steps in flight, as in the engine's step thread. Sampling is greedy, under the rule of an
answer. The floor is the time to read weights and KV cache once and to write the new keys and values, at the copy rate
of the same run. In an MoE model, the floor counts the experts that the batch uses, in their stored format; plain torch
runs the same sequences to find these experts. With --precision fp8, it counts the FP8 copies of the other weights.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kestrel_engine.runtime.gpu.footprint import FP8_DECODE
from kestrel_engine.runtime.protocol import StepHandle
from kestrel_engine.types.model_config import ModelConfig
from kestrel_engine.types.step import StepPlan, TokenRule

from .device.model_work import chosen_experts, decoder_bytes, touched
from .device.rates import copy_rate, synchronize
from .models.hand_made_steps import HandMadeSteps, Held
from .models.opening import MODEL_FLAGS, Opened, run_on_model, server_gc
from .reports import bars
from .reports.program import Flag, Program
from .reports.report import Report, median, quantile

PROGRAM = Program(
    "decode",
    __doc__,
    Flag("--batches", (1, 4, 16, 32, 64), "batch sizes", quick=[1, 4]),
    Flag("--context", 800, "positions of a sequence", quick=48),
    Flag("--steps", 96, "measured steps", quick=6),
    Flag("--warm-up", 16, "steps before the measured ones", quick=2),
    Flag("--shared", 0, "positions that all sequences share, such as those of one image (730)"),
    others=MODEL_FLAGS,
)
ROWS_A_PREFILL = 8
FIRST_TEXT_ID = 10
"""Smaller ids are special in every family."""


@dataclass(frozen=True)
class Context:
    """Prefilled sequences, and the position that the first decode step writes."""

    held: list[Held]
    texts: list[list[int]]
    start: int


@dataclass(frozen=True)
class Timed:
    """Times of the measured steps: wall time, host time in ``launch``, and the device's time for decode."""

    step_s: list[float]
    launch_s: list[float]
    device_s: list[float]


def prefill_contexts(
    steps: HandMadeSteps,
    config: ModelConfig,
    count: int,
    length: int,
    room: int,
    *,
    shared: int = 0,
) -> Context:
    """Prefills ``count`` sequences of ``length`` positions of random text, with pages for ``room`` more positions.
    ``shared``: the first positions that all have in common, rounded down to whole pages."""
    rng = random.Random(0)
    texts = [
        [
            config.ids.bos_id,
            *rng.choices(range(FIRST_TEXT_ID, config.text.vocab_size), k=length - 1),
        ]
        for _ in range(count)
    ]
    held = [steps.hold(length + room)]
    page_size = steps.runtime.limits.page_size
    beginning = held[0].pages[: shared // page_size]
    shared = len(beginning) * page_size
    held += [steps.hold(length + room, beginning) for _ in range(count - 1)]
    texts = [texts[0][:shared] + text[shared:] for text in texts]
    if shared:
        steps.prefill([steps.row(held[0], tuple(texts[0][:shared]), 0)])
    for first in range(0, count, ROWS_A_PREFILL):
        some = range(first, min(first + ROWS_A_PREFILL, count))
        result = steps.prefill(
            [steps.row(held[i], tuple(texts[i][shared:]), shared, draw=0) for i in some]
        )
        for i in some:
            texts[i].append(result.tokens[held[i].sequence_id].id)
    return Context(held, texts, length)


def run_pipelined(steps: HandMadeSteps, plans: Sequence[StepPlan], warm_up: int) -> Timed:
    """Runs steps with two in flight: N + 1 is launched before N is collected. Does not count ``warm_up`` steps."""
    runtime, out = steps.runtime, list[StepHandle]()
    step_s: list[float] = []
    launch_s: list[float] = []
    device_s: list[float] = []
    last = time.perf_counter()
    for plan in plans:
        began = time.perf_counter()
        out.append(runtime.launch(plan))
        launch_s.append(time.perf_counter() - began)
        if len(out) == 2:
            device_s.append(runtime.collect(out.pop(0)).decode_s)
            now = time.perf_counter()
            step_s.append(now - last)
            last = now
    for handle in out:
        runtime.collect(handle)
    return Timed(step_s[warm_up:], launch_s[warm_up:], device_s[warm_up:])


def collect_cost(steps: HandMadeSteps, plans: Sequence[StepPlan], device: torch.device) -> float:
    """Returns the host seconds of ``collect`` for a step that the device has already finished; nan if unknown."""
    if device.type != "cuda":
        return math.nan
    times = []
    for plan in plans:
        handle = steps.runtime.launch(plan)
        synchronize(device)
        began = time.perf_counter()
        steps.runtime.collect(handle)
        times.append(time.perf_counter() - began)
    return median(times)


def measure(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    num_steps, warm_up, shared = args.steps, args.warm_up, args.shared
    config, device = opened.built.model, opened.device
    model = opened.runtime.model
    rate = copy_rate(device)
    ids = config.ids
    rule = TokenRule(stop=ids.eos_id, suppressed=(ids.eos_id, ids.answer_id))
    steps = HandMadeSteps(opened.runtime, rule=rule)
    total = num_steps + warm_up
    largest = min(max(args.batches), opened.runtime.limits.max_batch_size)
    prefilled = prefill_contexts(
        steps, config, largest, args.context - total // 2, total + 1, shared=shared
    )
    in_fp8 = opened.config.fp8_gemms in FP8_DECODE
    work = decoder_bytes(model, opened.kv_dtype, in_fp8=in_fp8)
    routed = chosen_experts(model, prefilled.texts) if work.moe_layers else None
    positions = prefilled.start + warm_up + num_steps / 2
    for batch in sorted(b for b in args.batches if b <= largest):
        held = prefilled.held[:batch]
        with server_gc():
            timed = run_pipelined(
                steps, steps.decode_plans(held, prefilled.start, total + 1), warm_up
            )
        collected = collect_cost(steps, steps.decode_plans(held, prefilled.start, 5), device)
        experts = touched(routed[:batch]) if routed is not None else 0.0
        floor = work.step(batch, positions - shared + shared / batch, experts) / rate
        # Use the mean, so that work that moves from one step to another is counted.
        step_s = sum(timed.step_s) / len(timed.step_s)
        row: dict[str, float | int | str] = {
            "model": opened.name,
            "batch": batch,
            "shared": shared,
            "ms": 1e3 * step_s,
            "p95 ms": 1e3 * quantile(timed.step_s, 0.95),
            "device ms": 1e3 * median(timed.device_s),
            "floor ms": 1e3 * floor,
            "share": floor / step_s,
            "tokens/s": batch / step_s,
            "launch us": 1e6 * median(timed.launch_s),
            "collect us": 1e6 * collected,
        }
        if routed is not None:
            row["experts"] = experts
            row["if even"] = work.expected_experts(batch)
        report.add(
            f"Decode at about {positions:.0f} positions; copy rate {rate / 1e12:.3g} TB/s", row
        )
        # The limits are for weights and KV cache in the model's dtype. In FP8, there is less to read but the same other
        # work.
        judged = opened.on_cuda and args.context >= 800 and not (in_fp8 or opened.kv_in_fp8)
        narrow = (", FP8 weights" if in_fp8 else "") + (
            ", FP8 KV cache" if opened.kv_in_fp8 else ""
        )
        name = f"{opened.name}{narrow}: decode step, batch {batch}"
        limits = bars.DECODE_SHARE.get((opened.name, batch), bars.NONE).below(1e3 * floor)
        if shared:
            name += ", one image"
            limits = bars.DECODE_SHARED_MS.get((opened.name, batch), bars.NONE)
        limits = limits if judged else bars.NONE
        report.figure(name, 1e3 * step_s, "ms", limits, at_least=False, floor=1e3 * floor)
    steps.end(prefilled.held)


def main(arguments: Sequence[str] | None = None) -> Report:
    return run_on_model(PROGRAM, measure, arguments)


if __name__ == "__main__":
    main()
