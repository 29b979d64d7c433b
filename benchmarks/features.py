"""Measures what features of requests cost decode steps, side by side with the feature off.

python -m benchmarks.features --json F

Each feature is measured in turn with the same work without it. The figures are the processor's time, which other
programs change little, so they are for a CPU. On a GPU, use benchmarks.decode.

"scores": what follows the model's heads in steps that read boxes, with the probabilities that scores need and without
them, beside the time of such a step.
"logprobs": an engine answers all rows with log-probabilities, also with 20 alternatives of each token, and without.
"JSON schema": an engine answers a quarter of the rows under a JSON Schema, and without it. As all constrained rows do,
these take part in every second step only, so they get half the tokens, in both runs.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files

import torch
from torch import Tensor

from kestrel_engine import InferenceEngine
from kestrel_engine.runtime import sampler
from kestrel_engine.runtime.torch_runtime import read_bins
from kestrel_engine.types.model_config import ModelConfig
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import PREVIOUS, Row, SampleSpec, StepPlan, TokenRule

from .decode import prefill_contexts, run_pipelined
from .models.hand_made_steps import HandMadeSteps
from .models.opening import Opened, engine_on, model_arguments, opened_model, parse, server_gc
from .reports.report import Report, benchmark_parser, median

CONTEXT = 400
"""Positions of a sequence of the hand-made steps, about as many as those of an image and a question."""
ENDLESS = '{"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 4000}'
"""A schema whose texts are longer than any answer here."""
TOP = 20
BARS = {
    "scores": 1.02,
    "logprobs": 1.05,
    f"logprobs and {TOP} alternatives": 1.05,
    "JSON schema": 1.10,
}
"""The most that each may cost: processor time with the feature over that without it."""


def _ids_alone(logits: Tensor, specs: Sequence[SampleSpec]) -> list[sampler.Drawn | None]:
    """As sampler.sample for greedy rows, without log-probabilities."""
    assert all(torch.isfinite(logits).all(dim=-1).tolist())
    for row, spec in zip(logits, specs, strict=True):
        sampler._mask_(row, spec.rule)
    return [sampler.Drawn(i, 0.0) for i in logits.argmax(dim=-1).tolist()]


def step_seconds(opened: Opened, rows: int, objects: int) -> float:
    """Runs steps of ``rows`` sequences that read ``objects`` boxes of each. Returns the processor time of a step."""
    config = opened.built.model
    count = 3 * objects
    steps = HandMadeSteps(opened.runtime)
    context = prefill_contexts(steps, config, rows, CONTEXT, count)
    numbers = itertools.count(1 << 50)
    plans = []
    for step in range(count):
        spec = SampleSpec(box_rules(config)[step % 3], SamplingParams(), step + 1)
        start = context.start + step
        decode = [Row(h.sequence_id, (PREVIOUS,), start, h.pages, spec) for h in context.held]
        plans.append(StepPlan(next(numbers), decode=tuple(decode)))
    began = time.process_time()
    run_pipelined(steps, plans, 0)
    seconds = (time.process_time() - began) / count
    steps.end(context.held)
    return seconds


def box_rules(config: ModelConfig) -> tuple[TokenRule, TokenRule, TokenRule]:
    """The rules of a box, as those of skills.objects.locate, but the model cannot end."""
    ids = config.ids
    return (
        TokenRule(allowed=(ids.coord_id,), stop=ids.eos_id, read_coord=True),
        TokenRule(forced=ids.coord_id, read_coord=True),
        TokenRule(forced=ids.size_id, read_size=True),
    )


def score_reads(opened: Opened, rows: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What follows the heads in the three steps of a box, for ``rows`` rows: without what scores need, and with it."""
    config = opened.built.model
    spec = SampleSpec(box_rules(config)[0], SamplingParams(), 1)
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, config.text.vocab_size, generator=numbers)
    coords = torch.randn(rows, 1024, generator=numbers)
    sizes = torch.randn(rows, 2, 1024, generator=numbers)

    def off() -> None:
        _ids_alone(logits.clone(), [spec] * rows)
        for bins in (coords, coords, sizes):
            bins.argmax(dim=-1).tolist()

    def on() -> None:
        sampler.sample(logits.clone(), [spec] * rows)
        for bins in (coords, coords, sizes):
            best, near = read_bins(bins)
            best.tolist()
            near.tolist()

    return off, on


def least_seconds(work: Callable[[], None], repeats: int) -> float:
    """The least time of several, which other programs change least."""
    found = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - began)
    return found


def measure_scores(opened: Opened, report: Report, rows: int, tokens: int, repeats: int) -> None:
    step_s = step_seconds(opened, rows, max(1, tokens // 3))
    off, on = (least_seconds(work, repeats) / 3 for work in score_reads(opened, rows))
    ratio = (step_s + on - off) / step_s
    report.add(
        "scores: reading ids and bins, milliseconds of a step",
        {
            "rows": rows,
            "step ms": 1e3 * step_s,
            "off ms": 1e3 * off,
            "on ms": 1e3 * on,
            "on / off": ratio,
        },
    )
    report.bar("scores", ratio, BARS["scores"])


async def answer_all(
    engine: InferenceEngine,
    rows: int,
    tokens: int,
    *,
    logprobs: bool = False,
    top: int = 0,
    constrained: int = 0,
) -> float:
    """Answers ``rows`` questions about one image at once. Returns the seconds for a token. A quarter of the rows get
    half of ``tokens``. ``top``: alternatives of each token. ``constrained``: rows of that quarter with a schema."""
    image = (files("kestrel_engine") / "bundled/kestrel_tiny/sample.jpg").read_bytes()
    half = rows // 4

    async def one(index: int) -> int:
        limit = tokens // 2 if index < half else tokens
        settings: dict[str, object] = {"max_tokens": limit, "temperature": 0.0}
        skill = "forced_query"
        if logprobs:
            settings |= {"logprobs": True, "top_logprobs": top}
        if index < constrained:
            settings["constraint"] = {"json_schema": ENDLESS}
            skill = "query"
        arguments = {"question": f"How many are there, {index}?"}
        result = await (await engine.submit(skill, image, arguments, settings)).result()
        assert result.metrics.output_tokens == limit, result
        assert (result.logprobs is not None) == logprobs, result
        return limit

    began = time.process_time()
    counts = await asyncio.gather(*map(one, range(rows)))
    return (time.process_time() - began) / sum(counts)


async def in_turn(
    report: Report,
    feature: str,
    rows: int,
    rounds: int,
    off: Callable[[], Awaitable[float]],
    on: Callable[[], Awaitable[float]],
) -> None:
    """Measures a feature ``rounds`` times, after one time that does not count."""
    pairs = []
    with server_gc():
        for _ in range(1 + rounds):
            pairs.append((await off(), await on()))
    # Other programs change the least times least.
    off_s, on_s = (min(times) for times in zip(*pairs[1:], strict=True))
    ratios = [b / a for a, b in pairs[1:]]
    report.add(
        f"{feature}: processor time of a token, least of {rounds} rounds",
        {
            "rows": rows,
            "off ms": 1e3 * off_s,
            "on ms": 1e3 * on_s,
            "on / off": on_s / off_s,
            "median of rounds": median(ratios),
        },
    )
    report.bar(feature, on_s / off_s, BARS[feature])


async def measure(opened: Opened, report: Report, rows: int, tokens: int, rounds: int) -> None:
    measure_scores(opened, report, rows, tokens, 30 * rounds)
    async with engine_on(opened) as running:
        engine = running.engine

        def plain() -> Awaitable[float]:
            return answer_all(engine, rows, tokens)

        await in_turn(
            report, "logprobs", rows, rounds, plain,
            lambda: answer_all(engine, rows, tokens, logprobs=True),
        )  # fmt: skip
        await in_turn(
            report, f"logprobs and {TOP} alternatives", rows, rounds, plain,
            lambda: answer_all(engine, rows, tokens, logprobs=True, top=TOP),
        )  # fmt: skip
        await in_turn(
            report, "JSON schema", rows, rounds, plain,
            lambda: answer_all(engine, rows, tokens, constrained=rows // 4),
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("features", __doc__)
    parser.add_argument("--rows", type=int, default=64, help="rows of a step [64]")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of an answer [40]")
    parser.add_argument("--rounds", type=int, default=7, help="times to measure each [7]")
    args, model_flags = parse(parser, arguments)
    if args.quick:
        args.rows, args.tokens, args.rounds = 8, 6, 1
    given = ("--device", "cpu", "--max-batch-size", str(args.rows), *model_flags)
    with opened_model(model_arguments(given, quick=args.quick)) as opened:
        report = Report("features", {"model": opened.name, **vars(args)})
        asyncio.run(measure(opened, report, args.rows, args.tokens, args.rounds))
    report.finish(args.json)


if __name__ == "__main__":
    main()
