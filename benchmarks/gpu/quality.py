"""A quality gate: the drift of the served logits from float32, and kestrel-tiny's score.

python -m benchmarks.gpu.quality --model moondream2 --random-weights --device cuda --json F
python -m benchmarks.gpu.quality --score-only --device cuda
python -m benchmarks.gpu.quality --model moondream2 --random-weights --device cuda --precision fp8-vision

Drift: plain torch runs the same weights, widened to float32, with the same images, questions and continuations as the
served dtype and kernels (teacher forcing). At the end of prompts, all logits are compared. In decode steps, the best id
and its log-probability are compared, because a step returns only these. Score: kestrel-tiny answers the first scenes of
the frozen evaluation, on the device, in the types that --precision names. The exit
status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from kestrel_engine.models import weight_only
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.requests import ImageBlock, Token
from kestrel_engine.types.step import Row

from ..decode import FIRST_TEXT_ID
from ..device.rates import synchronize
from ..models import TINY
from ..models.hand_made_steps import HandMadeSteps, Held
from ..models.opening import (
    MODEL_FLAGS,
    ModelRuntime,
    Opened,
    engine_on,
    model_arguments,
    opened_model,
)
from ..reports.program import Flag, Program
from ..reports.report import Report
from .vision import prepared_images

PROGRAM = Program(
    "gpu.quality",
    __doc__,
    Flag("--images", 4, "images for the drift, with 4 questions each", quick=1),
    Flag("--steps", 16, "decode steps for the drift", quick=2),
    Flag("--scenes", 150, "scenes for the score", quick=1),
    Flag("--drift-only", False, "measure only the drift"),
    Flag("--score-only", False, "measure only the score"),
    others=MODEL_FLAGS,
)
RELATIVE_ERROR = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.03}
"""The limit of ||served - float32|| / ||float32|| over the logits at the ends of prompts, each row less its mean."""
WITH_EXPERTS = 2.5
"""The factor of the limit for MoE models, in which rounding may route a token to another expert: Moondream 3's logits
are off by 0.019 in bfloat16."""
IN_FP8 = {"off": 1.0, "vision": 1.0, "prefill": 1.5, "all": 1.5}
"""Times as much by the products in FP8. One is off by 3.7 %, and the stream that sums them by less: on Moondream 2
logits are off by 0.011 in bfloat16, 0.013 with the tower in FP8, 0.034 with prefill or with both. The two factors don't
add up: Moondream 3's logits are off by 0.035 with both, so a model with experts has the larger limit."""
KV_IN_FP8 = 0.015
"""More, with keys and values in FP8. Each is off by a fortieth, and attention takes the mean of those that it looks at:
of hundreds in a model of random weights (Moondream 2's logits are off by 0.0114 instead of 0.0113), of few in a trained
one (kestrel-tiny's in float32 by 0.018 of 0.04, the mean of its decoded log-probabilities by 0.050 of 0.08)."""
LEAST_SCORE = 0.985
"""Share of the evaluation's tasks; the whole evaluation in float32 gives 0.997."""
QUESTIONS_A_IMAGE = 4


@dataclass(frozen=True)
class Prompts:
    """The token ids of each sequence after BOS and its image: a question, then the forced continuation."""

    images: list[int]
    questions: list[tuple[int, ...]]
    continuations: list[tuple[int, ...]]


SCALES = {"weight": "scale", "fc1": "fc1_scale", "fc2": "fc2_scale"}
"""Where a layer has the scales of a weight in 4 or 8 bits."""


def values_of(layer: object) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields every tensor below ``layer``, with its values in float32. Of scales these are None: the values of their
    weight include them."""
    if isinstance(layer, Tensor):
        yield layer, layer.float()
    elif isinstance(layer, (list, tuple)):
        for item in layer:
            yield from values_of(item)
    elif is_dataclass(layer) and not isinstance(layer, type):
        given = {field.name: getattr(layer, field.name) for field in fields(layer)}
        for name, scales in SCALES.items():
            if isinstance(given.get(scales), Tensor):
                weight, by = given.pop(name), given.pop(scales)
                yield by, None
                # A matrix, or those of all experts.
                matrices = [(weight, by)] if name == "weight" else zip(weight, by, strict=True)
                wide = [weight_only.widened(*each, torch.float32) for each in matrices]
                yield weight, wide[0] if name == "weight" else torch.stack(wide)
        yield from values_of(list(given.values()))
    elif hasattr(layer, "__dict__"):
        yield from values_of(list(vars(layer).values()))


def widened(model: Moondream) -> Moondream:
    """Returns a copy with float32 tensors of the same values, and without scales."""
    return copy.deepcopy(model, {id(tensor): values for tensor, values in values_of(model)})


def make_prompts(opened: Opened, *, images: int, steps: int) -> Prompts:
    rng = random.Random(0)
    words = range(FIRST_TEXT_ID, opened.built.model.text.vocab_size)
    count = images * QUESTIONS_A_IMAGE
    return Prompts(
        [i // QUESTIONS_A_IMAGE for i in range(count)],
        [tuple(rng.choices(words, k=rng.randint(12, 30))) for _ in range(count)],
        [tuple(rng.choices(words, k=steps)) for _ in range(count)],
    )


class Forced:
    """A runtime that runs ``prompts``."""

    def __init__(self, runtime: ModelRuntime, opened: Opened, prompts: Prompts) -> None:
        self.runtime, self._prompts = runtime, prompts
        self._config, self._device = opened.built.model, opened.device
        self.steps = HandMadeSteps(runtime)
        self._keys: list[str] = []
        self._held: list[Held] = []

    def prefill(self, *, at_once: int = 8) -> Tensor:
        """Returns the logits at the end of each prompt: [sequences, vocab] float32 on the CPU."""
        config, prompts = self._config, self._prompts
        images = prepared_images(1 + max(prompts.images), config.vision)
        self._keys = [image.key for image in images]
        self.steps.encode(images)
        rows, found = [], []
        for number, question in zip(prompts.images, prompts.questions, strict=True):
            block = ImageBlock(self._keys[number], config.image_positions)
            tokens: tuple[Token, ...] = (config.ids.bos_id, block, *question)
            room = config.image_prefix + len(question) + len(prompts.continuations[0])
            self._held.append(self.steps.hold(room))
            rows.append(self.steps.row(self._held[-1], tokens, 0))
        for first in range(0, len(rows), at_once):
            found.append(self._logits(rows[first : first + at_once]))
        return torch.cat(found)

    def _logits(self, rows: Sequence[Row]) -> Tensor:
        hidden = self.runtime.hidden(rows)
        synchronize(self._device)
        with torch.inference_mode():
            return self.runtime.model.text.logits(hidden).float().cpu()

    def _next_rows(self, step: int, *, sampled: bool) -> list[Row]:
        prompts, prefix = self._prompts, self._config.image_prefix
        return [
            self.steps.row(
                held, (ids[step],), prefix + len(question) + step, draw=step if sampled else None
            )
            for held, question, ids in zip(
                self._held, prompts.questions, prompts.continuations, strict=True
            )
        ]

    def decode_logits(self, step: int) -> Tensor:
        """Returns the logits after token ``step`` of each continuation."""
        return self._logits(self._next_rows(step, sampled=False))

    def decode_best(self, step: int) -> tuple[list[int], list[float]]:
        """Runs a decode step and returns each row's best id and its log-probability."""
        result = self.steps.decode(self._next_rows(step, sampled=True))
        tokens = [result.tokens[held.sequence_id] for held in self._held]
        return [t.id for t in tokens], [t.logprob or 0.0 for t in tokens]

    def end(self) -> None:
        self.steps.end(self._held, self._keys)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """Returns the relative error of rows of logits, less their means, which do not affect a softmax."""
    found, reference = (t - t.mean(dim=-1, keepdim=True) for t in (found, reference))
    return float((found - reference).norm() / reference.norm())


def limit_of(dtype: str, fp8_gemms: str, *, kv_in_fp8: bool, has_experts: bool) -> float:
    """Returns the limit of the relative error of logits."""
    plain = RELATIVE_ERROR[dtype]
    limit = (plain + (KV_IN_FP8 if kv_in_fp8 else 0.0)) * IN_FP8[fp8_gemms]
    return max(limit, plain * WITH_EXPERTS) if has_experts else limit


def measure_drift(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    """Adds tables, figures and the bar of the relative error."""
    steps, fp8_gemms = args.steps, opened.config.fp8_gemms
    served = opened.runtime
    config, limits = opened.built.model, served.limits
    prompts = make_prompts(opened, images=args.images, steps=steps)
    room = config.image_prefix + 32 + steps
    reference = TorchRuntime(
        widened(served.model),
        config,
        num_pages=len(prompts.questions) * (-(-room // limits.page_size) + 1),
        page_size=limits.page_size,
        max_batch_size=len(prompts.questions),
        max_seq_length=min(limits.max_seq_length, room + limits.page_size),
        device=opened.device,
        dtype=torch.float32,
    )
    info = opened.built.info
    key: Row = {
        "model": opened.name,
        "dtype": info.dtype,
        "FP8": fp8_gemms,
        "KV": info.kv_cache_dtype,
    }
    exact = Forced(reference, opened, prompts)
    tested = Forced(served, opened, prompts)
    try:
        wanted, got = exact.prefill(), tested.prefill()
        error = relative_error(got, wanted)
        agreement = [float((got.argmax(-1) == wanted.argmax(-1)).float().mean())]
        gap = (got - wanted).abs()
        report.add(
            "Logits at the end of prompts against float32",
            {
                **key,
                "rows": len(wanted),
                "relative error": error,
                "max abs": float(gap.max()),
                "mean abs": float(gap.mean()),
                "std": float(wanted.std()),
                "top-1 equal": agreement[0],
            },
        )
        off: list[float] = []
        same: list[bool] = []
        for step in range(steps):
            logprobs = exact.decode_logits(step).log_softmax(dim=-1)
            best = logprobs.argmax(dim=-1).tolist()
            ids, values = tested.decode_best(step)
            for row, (token, value) in enumerate(zip(ids, values, strict=True)):
                off.append(abs(value - float(logprobs[row, token])))
                same.append(token == best[row])
        report.add(
            "Decode steps: the best id and its log-probability against float32",
            {
                **key,
                "tokens": len(off),
                "max abs": max(off),
                "mean abs": sum(off) / len(off),
                "top-1 equal": sum(same) / len(same),
            },
        )
    finally:
        exact.end()
        tested.end()
        reference.close()
    name = f"{opened.name} {computed_in(opened)}"
    has_experts = config.text.moe is not None
    limit = limit_of(info.dtype, fp8_gemms, kv_in_fp8=opened.kv_in_fp8, has_experts=has_experts)
    report.bar(f"{name}: relative error of logits", error, limit)
    report.bar(f"{name}: mean error of decoded log-probabilities", sum(off) / len(off), 2 * limit)
    report.figure(f"{name}: decoded tokens equal to float32's", sum(same) / len(same), "of all")


def computed_in(opened: Opened) -> str:
    """Formats the dtype, and the parts that are in FP8."""
    fp8_gemms = opened.config.fp8_gemms
    cache = ", FP8 KV cache" if opened.kv_in_fp8 else ""
    return opened.built.info.dtype + ("" if fp8_gemms == "off" else f", FP8 {fp8_gemms}") + cache


async def measure_score(args: argparse.Namespace, opened: Opened, report: Report) -> None:
    """Returns the share of tasks that kestrel-tiny answers correctly."""
    from training.judging import answer, is_right, score
    from training.scenes.evaluation_set import encode, example

    examples = [example("seen", index) for index in range(args.scenes)]
    with ThreadPoolExecutor(thread_name_prefix="render") as pool:
        images = list(pool.map(encode, examples))
    replies: list[tuple[str, bool]] = []
    async with engine_on(opened) as running:
        waiting = iter(zip(examples, images, strict=True))

        async def caller() -> None:
            for found, image in waiting:
                size = found.scene.width, found.scene.height
                outputs = await asyncio.gather(
                    *(answer(running.engine, image, ask, size) for ask in found.asks)
                )
                for ask, output in zip(found.asks, outputs, strict=True):
                    won, possible = score(ask, output, *size)
                    replies.append((ask.skill, is_right(ask, won / possible)))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(8, args.scenes)):
                group.create_task(caller())
    name = f"kestrel-tiny {computed_in(opened)} on {opened.device.type}"
    for skill in sorted({skill for skill, _ in replies}):
        those = [right for each, right in replies if each == skill]
        report.add(
            f"{name}, {args.scenes} scenes",
            {"skill": skill, "tasks": len(those), "right": sum(those) / len(those)},
        )
    share = sum(right for _, right in replies) / len(replies)
    report.bar(f"{name}: tasks answered right", share, LEAST_SCORE, at_least=True)


def passed(report: Report) -> bool:
    return all(bar.is_met for bar in report.bars)


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, of_model, report):
        config = model_arguments(of_model, quick=args.quick)
        if not args.score_only:
            with opened_model(config) as opened:
                measure_drift(args, opened, report)
        if not args.drift_only:
            flags = ["--model", TINY, "--device", config.device, "--max-batch-size", "32"]
            flags += ["--precision", config.precision]
            flags += ["--threads", str(config.cpu_threads)] if config.cpu_threads else []
            with opened_model(model_arguments(flags)) as opened:
                asyncio.run(measure_score(args, opened, report))
    return report


if __name__ == "__main__":
    sys.exit(0 if passed(main()) else 1)
