"""Known answers of released models, and the check that a model gives them. It tests all parts of the engine at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.catalog import BUNDLED
from ..config.runtime import RuntimeConfig
from ..engine import InferenceEngine
from .finding import Finding

if TYPE_CHECKING:
    from ..types.progress import Progress

TOLERANCE = 4 / 1024
"""Largest allowed difference of a coordinate. Coordinates are multiples of 1/1024. Half-precision dtypes and other JPEG
decoders may shift one by a few of these steps."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The output of ``skill`` for an image. ``image``: its path, if bundled. ``described``: the image in words."""

    skill: str
    arguments: Mapping[str, str]
    output: Mapping[str, Any]
    described: str
    image: Path | None = None


_SAMPLE = BUNDLED / "kestrel_tiny" / "sample.jpg"
_SIGN = "the stop sign among vLLM's test assets (stop_sign.jpg)"

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
"""The known answers by model name. Those of Moondream 3 come from its own code (revision 1dae073c)."""


async def answer(
    config: RuntimeConfig, image: str | None = None, *, progress: Progress | None = None
) -> Finding:
    """Loads the model and compares its answers with the known ones.

    ``image``: path of the image, if it is not bundled. Raises KestrelError.
    """
    known = _known(config)
    if isinstance(known, Finding):
        return known
    missing = next((k for k in known if k.image is None), None)
    if image is None and missing is not None:
        message = f"not checked: the known answer is about {missing.described}, which isn't bundled"
        return Finding("answer", "warn", message, "name the image with --image")
    async with await InferenceEngine.create(config, progress=progress) as engine:
        results = await asyncio.gather(*(_ask(engine, k, image or str(k.image)) for k in known))
        info = engine.info
    where = f"{info.device}, {info.dtype}"
    for one, output in zip(known, results, strict=True):
        if _distance(one.output, output) > TOLERANCE:
            asked = f"{one.skill} {next(iter(one.arguments.values()))!r}"
            message = f"{asked} on {where}: {_short(output)} instead of {_short(one.output)}"
            remedy = f"check that the image is {one.described}; if it is, report the difference"
            return Finding("answer", "fail", message, remedy)
    furthest = max(_distance(k.output, output) for k, output in zip(known, results, strict=True))
    exact = "exactly" if furthest == 0 else f"within {furthest:.4f} of the image"
    return Finding("answer", "ok", f"{len(known)} known answers on {where}, {exact}")


def _known(config: RuntimeConfig) -> tuple[KnownAnswer, ...] | Finding:
    """Returns the known answers of the model that ``config.model`` names, or a finding if there are none.

    For weights that are given by path, only ``config.model`` says which model they are.
    """
    name = config.model.strip().lower().partition("@")[0].partition(":")[0]
    if name == "kestrel-tiny" and config.model_path is not None:
        name = ""
    if name not in KNOWN_ANSWERS:
        names = ", ".join(KNOWN_ANSWERS)
        model = config.model_path or config.model
        message = f"not checked: no answer is known for {model}, only for {names}"
        return Finding("answer", "warn", message, "if it is one of these models, name it: --model")
    return KNOWN_ANSWERS[name]


async def _ask(engine: InferenceEngine, known: KnownAnswer, image: str) -> Mapping[str, Any]:
    settings = {"temperature": 0.0} if known.skill == "query" else {}
    stream = await engine.submit(known.skill, image, dict(known.arguments), settings)
    async with stream:
        result = await stream.result()
    return {name: result.output[name] for name in known.output}


def _distance(expected: object, found: object) -> float:
    """Returns the largest difference between corresponding numbers; infinity if anything else differs.

    ``found`` may have more keys, such as scores.
    """
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if not expected.keys() <= found.keys():
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
