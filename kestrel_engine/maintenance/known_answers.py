"""Answers that are known beforehand, and whether a model gives them: the one check that takes all of it together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.catalog import BUNDLED
from ..config import RuntimeConfig
from ..engine import InferenceEngine
from .finding import Finding

if TYPE_CHECKING:
    from ..checkpoint.progress import Progress

TOLERANCE = 4 / 1024
"""Between places. Positions come in steps of 1/1024; narrow dtypes and decoders of JPEG may move one by a few."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What ``skill`` says of an image. ``image``: where it is, if it is at hand; ``described``: else, in words."""

    skill: str
    arguments: Mapping[str, str]
    output: Mapping[str, Any]
    described: str
    image: Path | None = None


_SAMPLE = BUNDLED / "kestrel_tiny" / "sample.jpg"
_SIGN = "the image of a stop sign among vLLM's test assets (stop_sign.jpg)"

KNOWN_ANSWERS: dict[str, tuple[KnownAnswer, ...]] = {
    "kestrel-tiny": (
        KnownAnswer(
            "query",
            {"question": "How many red circles are there?"},
            {"answer": "3"},
            "the bundled sample",
            _SAMPLE,
        ),
        KnownAnswer(
            "detect",
            {"object": "square"},
            {
                "objects": [
                    {
                        "x_min": 0.5709505439443281,
                        "y_min": 0.07647939330932198,
                        "x_max": 0.7415494560556719,
                        "y_max": 0.30633310669067804,
                    }
                ]
            },
            "the bundled sample",
            _SAMPLE,
        ),
    ),
    "moondream3-preview": (
        KnownAnswer(
            "point", {"object": "sign"}, {"points": [{"x": 289 / 1024, "y": 326 / 1024}]}, _SIGN
        ),
        KnownAnswer(
            "detect",
            {"object": "sign"},
            {
                "objects": [
                    {
                        "x_min": 0.16633163392543793,
                        "y_min": 0.1345907300710678,
                        "x_max": 0.3590589910745621,
                        "y_max": 0.4200967699289322,
                    }
                ]
            },
            _SIGN,
        ),
    ),
}
"""By the model's name. Moondream 3's are those of its own code (revision 1dae073c)."""


async def answer(
    config: RuntimeConfig, image: str | None = None, *, progress: Progress | None = None
) -> Finding:
    """Loads the model and asks it. ``image``: the file to ask about, where it isn't at hand. Raises KestrelError."""
    known = _known(config)
    if isinstance(known, Finding):
        return known
    missing = next((k for k in known if k.image is None), None)
    if image is None and missing is not None:
        told = f"not asked: the answer is known of {missing.described}, which isn't here"
        return Finding("answer", "warn", told, "give the image with --image")
    async with await InferenceEngine.create(config, progress=progress) as engine:
        results = await asyncio.gather(*(_ask(engine, k, image or str(k.image)) for k in known))
        info = engine.info
    where = f"{info.device}, {info.dtype}"
    for one, output in zip(known, results, strict=True):
        if _distance(one.output, output) > TOLERANCE:
            asked = f"{one.skill} {next(iter(one.arguments.values()))!r}"
            told = f"{asked} on {where}: {_short(output)} instead of {_short(one.output)}"
            return Finding(
                "answer", "fail", told, f"is the image {one.described}? If so, report it"
            )
    furthest = max(_distance(k.output, output) for k, output in zip(known, results, strict=True))
    exact = "exactly" if furthest == 0 else f"within {furthest:.4f} of the image"
    return Finding("answer", "ok", f"{len(known)} known answers on {where}, {exact}")


def _known(config: RuntimeConfig) -> tuple[KnownAnswer, ...] | Finding:
    """By the name the user gives, which must say what weights of a path are."""
    name = config.model.strip().lower().partition("@")[0].partition(":")[0]
    if name == "kestrel-tiny" and config.model_path is not None:
        name = ""
    if name not in KNOWN_ANSWERS:
        named = ", ".join(KNOWN_ANSWERS)
        told = (
            f"not asked: no answer is known of {config.model_path or config.model}, only of {named}"
        )
        return Finding("answer", "warn", told, "if it is one of them, say so with --model")
    return KNOWN_ANSWERS[name]


async def _ask(engine: InferenceEngine, known: KnownAnswer, image: str) -> Mapping[str, Any]:
    settings = {"temperature": 0.0} if known.skill == "query" else {}
    stream = await engine.submit(known.skill, image, dict(known.arguments), settings)
    async with stream:
        result = await stream.result()
    return {name: result.output[name] for name in known.output}


def _distance(expected: object, found: object) -> float:
    """The largest between numbers at the same place; infinite where there is something else."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if expected.keys() != found.keys():
            return float("inf")
        return max((_distance(expected[key], found[key]) for key in expected), default=0.0)
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return float("inf")
        return max((_distance(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)
    if isinstance(expected, float) and isinstance(found, float):
        return abs(expected - found)
    return 0.0 if expected == found else float("inf")


def _short(output: object) -> str:
    if isinstance(output, float):
        return f"{output:.4f}"
    if isinstance(output, Mapping):
        return ", ".join(f"{key} {_short(value)}" for key, value in output.items())
    if isinstance(output, list):
        return f"[{'; '.join(map(_short, output))}]"
    return repr(output)
