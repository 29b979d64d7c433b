"""Random mixes of requests, run together under random settings, to be compared with each request alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kestrel_engine import EngineResult, InferenceEngine, RuntimeConfig
from kestrel_engine.types.observer import ImageEvent, RequestEvent, StepEvent

SAMPLED = {"temperature": 1.0, "top_p": 0.9}


@dataclass(frozen=True)
class Ask:
    """One request; ``image`` names a golden image, or several."""

    skill: str
    image: str | tuple[str, ...] | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def sampled(self, seed: int) -> Ask:
        return Ask(
            self.skill,
            self.image,
            self.arguments,
            tuple((dict(self.settings) | SAMPLED | {"seed": seed}).items()),
        )


def ask(
    skill: str,
    image: str | tuple[str, ...] | None = None,
    *,
    settings: Mapping[str, Any],
    **arguments: Any,
) -> Ask:
    greedy = {"temperature": 0.0, **settings}
    return Ask(skill, image, tuple(arguments.items()), tuple(greedy.items()))


BOX = (0.2, 0.3, 0.7, 0.8)

ASKS = (
    ask("query", "square_378", settings={"max_tokens": 24}, question="What is happening here?"),
    ask("query", "square_378", settings={"max_tokens": 12}, question="Count the circles."),
    ask("query", "small_120x90", settings={"max_tokens": 16}, question="What is it? " * 12),
    ask("query", settings={"max_tokens": 24}, question="Is it day or night?"),
    ask("query", settings={"max_tokens": 20}, question="List all objects. " * 6),
    ask("caption", "gray_640x480", settings={"max_tokens": 12}, length="short"),
    ask("caption", "square_378", settings={"max_tokens": 28}, length="normal"),
    ask("point", "square_378", settings={"max_objects": 4}, object="blue rectangle"),
    ask("detect", "gray_640x480", settings={"max_objects": 3}, object="sign"),
    ask("detect", "small_120x90", settings={"max_objects": 4}, object="face"),
)
REFERRING = (
    ask(
        "query",
        "square_378",
        settings={"max_tokens": 10},
        question="Where is the dog?",
        spatial_refs=((0.4, 0.6), BOX),
    ),
    ask("query", "gray_640x480", settings={"max_tokens": 8}, question="Why?", reasoning=True),
    ask(
        "query",
        "gray_640x480",
        settings={"max_tokens": 6, "max_reasoning_tokens": 4, "max_absence": 1.0},
        question="What does it say?",
        reasoning=True,
        system="Be brief.",
        presupposes=("sign",),
    ),
    ask("gaze", "square_378", settings={}, eye=(0.3, 0.7)),
)
PAIR = ("square_378", "gray_640x480")
SEVERAL = (
    ask("query", PAIR, settings={"max_tokens": 12}, question="Which image has more signs?"),
    ask("query", PAIR, settings={"max_tokens": 12}, question="Are both at night?"),
    ask(
        "query",
        ("square_378", "small_120x90"),
        settings={"max_tokens": 10},
        question="And this one?",
        history=(("Is it a dog?", "No."),),
        image_turns=(0, 1),
    ),
    ask("query", PAIR, settings={"max_tokens": 8}, question="Why?", reasoning=True),
)
"""Questions about two images. Moondream 2 has no room for more."""
SEGMENTING = (ask("segment", "square_378", settings={"max_tokens": 24}, object="shoe"),)


@dataclass(frozen=True)
class Model:
    """``config``: what opens it. ``pages``: page sizes that divide its image prefix."""

    name: str
    config: Mapping[str, Any]
    prefix: int
    pages: tuple[int, ...]
    asks: tuple[Ask, ...]


@dataclass
class Seen:
    """What the engine's steps were like."""

    preemptions: int = 0
    cached_positions: int = 0
    largest_batch: int = 0
    num_steps: int = 0
    num_overtaken: int = 0
    """Steps that came back after a step that was launched later."""
    latest: int = -1

    def on_step(self, event: StepEvent) -> None:
        self.preemptions = event.stats.preemptions
        self.cached_positions = event.stats.cached_positions
        self.largest_batch = max(self.largest_batch, event.num_decode)
        self.num_steps += 1
        self.num_overtaken += event.step_id < self.latest
        self.latest = max(self.latest, event.step_id)
        assert not event.failed, f"step {event.step_id} failed"

    def on_request(self, event: RequestEvent) -> None:
        assert not event.error, f"request {event.request_id} failed: {event.error}"

    def on_image(self, event: ImageEvent) -> None:
        assert not event.error, f"a picture failed: {event.error}"


@dataclass
class Mix:
    """Requests in their order; each joins after its delay; some are given up after their number of updates."""

    asks: Sequence[Ask]
    delays_s: Sequence[float]
    given_up: Mapping[int, int] = field(default_factory=dict)


def random_mix(rng: random.Random, asks: Sequence[Ask], count: int) -> Mix:
    chosen = [rng.choice(asks) for _ in range(count)]
    pace = rng.choice([0.0, 0.02, 0.1])
    given_up = {i: rng.randrange(4) for i in range(count) if rng.random() < 0.2}
    return Mix(chosen, [rng.random() * pace * count / 4 for _ in chosen], given_up)


def random_settings(rng: random.Random, model: Model) -> dict[str, Any]:
    size = rng.choice(model.pages)
    fitting = -(-(model.prefix + 130) // size)
    return {
        "max_batch_size": rng.choice([1, 2, 4, 8, 8]),
        "step_prefill_positions": rng.choice([3, 20, 200, 768]),
        "step_crops": rng.choice([1, 2, 5]),
        "step_pause": rng.choice([0.0, 1.5, 4.0]),
        "decode_beside": rng.choice(["auto", "slices"]),
        "steps_out": rng.choice([1, 2, 3, 4]),
        "prefix_cache": rng.random() < 0.6,
        "page_size": size,
        "kv_cache_pages": fitting * rng.choice([1, 2, 3, 5]),
        "embedding_cache_bytes": rng.choice([0, 1 << 18, None]),
        "image_cache_bytes": rng.choice([0, 2**28]),
    }


async def run_mix(
    model: Model, settings: Mapping[str, Any], mix: Mix, images: Path, seen: Seen | None = None
) -> list[EngineResult]:
    """The results in the mix's order. The engine runs on the CPU, unless the model's config names a device."""
    on_cpu = {"device": "cpu", "cpu_threads": 1}
    config = RuntimeConfig(**{**on_cpu, **model.config, **settings}, dtype="float32")
    async with await InferenceEngine.create(config, observer=seen) as engine:

        async def one(index: int) -> EngineResult:
            await asyncio.sleep(mix.delays_s[index])
            wanted = mix.asks[index]
            names = (wanted.image,) if isinstance(wanted.image, str) else wanted.image or ()
            image = [next(images.glob(f"{name}.*")) for name in names]
            stream = await engine.submit(
                wanted.skill, image, dict(wanted.arguments), dict(wanted.settings)
            )
            async with stream:
                limit = mix.given_up.get(index)
                if limit is None:
                    return await stream.result()
                if limit:
                    async for _ in stream:
                        limit -= 1
                        if not limit:
                            break
                await stream.aclose()
                return await stream.result()

        return await asyncio.gather(*(one(i) for i in range(len(mix.asks))))


class Alone:
    """Results of requests each run by itself: batch of one, no prefix cache, no budget that would cut it. Each image is
    encoded once, alone. Kept by model."""

    def __init__(self, images: Path) -> None:
        self._images = images
        self._results: dict[tuple[str, Ask], EngineResult] = {}

    async def of(self, model: Model, asks: Sequence[Ask]) -> list[EngineResult]:
        missing = [a for a in dict.fromkeys(asks) if (model.name, a) not in self._results]
        settings = {
            "max_batch_size": 1,
            "prefix_cache": False,
            "embedding_cache_bytes": None,
            "step_prefill_positions": 10**6,
            "step_crops": 10**3,
            "kv_cache_pages": 1 + (2 * model.prefix + 300) // model.pages[-1],
            "page_size": model.pages[-1],
        }
        # One at a time: with a batch of one, in order of arrival, none shares a step with another.
        mix = Mix(missing, [0.0] * len(missing))
        if missing:
            results = await run_mix(model, settings, mix, self._images)
            self._results |= {(model.name, a): r for a, r in zip(missing, results, strict=True)}
        return [self._results[model.name, a] for a in asks]


def assert_equal(
    mix: Mix, together: Sequence[EngineResult], alone: Sequence[EngineResult], of: Any
) -> None:
    """Tokens, outputs and ends; what was given up has a beginning of its tokens. ``of``: what to print."""
    for index, (have, want) in enumerate(zip(together, alone, strict=True)):
        where = f"request {index}, {mix.asks[index]}, of {json.dumps(of, default=str)}"
        if have.finish_reason == "cancelled":
            assert index in mix.given_up, where
            assert have.token_ids == want.token_ids[: len(have.token_ids)], where
            continue
        assert have.token_ids == want.token_ids, where
        assert have.finish_reason == want.finish_reason, where
        assert plain(have.output) == plain(want.output), where
        assert scores(have.output) == pytest.approx(scores(want.output), abs=1e-3), where


def scores(output: Any) -> list[float]:
    """All scores of an output in their order. They are probabilities, so they differ as far as logits do."""
    if isinstance(output, (list, tuple)):
        return [score for value in output for score in scores(value)]
    if not isinstance(output, Mapping):
        return []
    own = [output["score"]] if "score" in output else []
    return own + [score for value in output.values() for score in scores(value)]


def plain(output: Any) -> Any:
    """An output without scores, numbers to six places: a coordinate is a bin, but a box's corner is a difference of
    floats."""
    if isinstance(output, Mapping):
        return {key: plain(value) for key, value in output.items() if key != "score"}
    if isinstance(output, (list, tuple)):
        return [plain(value) for value in output]
    return round(output, 6) if isinstance(output, float) else output
