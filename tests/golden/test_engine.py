"""Every golden case through the public engine, from encoded images, all of a model's cases in one mixed batch.

The references ran each case alone, so equality also shows that batching changes nothing.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kestrel_engine import EngineResult, InferenceEngine, RuntimeConfig
from tests.golden.checkpoint import DATA

pytestmark = pytest.mark.golden


def cases(model: str) -> list[dict[str, Any]]:
    return json.loads((DATA / model / "expected.json").read_text())["cases"]


async def run(engine: InferenceEngine, case: dict[str, Any], images: Path) -> EngineResult:
    image = next(images.glob(f"{case['image']}.*")) if "image" in case else None
    settings = {"temperature": 0.0}
    settings |= {key: case[key] for key in ("max_tokens", "max_objects") if key in case}
    skill, refs = case["skill"], case.get("spatial_refs")
    if skill.startswith("query"):
        reasoning = skill == "query_reasoning"
        return await engine.query(
            image, case["question"], reasoning=reasoning, spatial_refs=refs, settings=settings
        )
    if skill == "caption":
        return await engine.caption(image, case["length"], settings=settings)
    if skill == "segment":
        return await engine.segment(image, case["object"], spatial_refs=refs, settings=settings)
    return await getattr(engine, skill)(image, case["object"], settings=settings)


def check_text(case: dict[str, Any], result: EngineResult) -> None:
    (text,) = result.output.values()
    assert list(result.token_ids) == case["ids"]
    assert text == case["decode_all"]
    # The reference looks one decision beyond max_tokens; we end at the limit.
    at_limit = len(case["ids"]) == case["max_tokens"]
    assert result.finish_reason == ("length" if at_limit else "stop")
    assert at_limit or case["stop"] == "eos"


def check_reasoning(case: dict[str, Any], result: EngineResult) -> None:
    assert list(result.token_ids) == case["reasoning_ids"] + case["answer"]["ids"]
    was_cut = case["reasoning_stop"] == "max_tokens" or case["answer"]["stop"] == "max_tokens"
    assert result.finish_reason == ("length" if was_cut else "stop")
    reasoning = result.output["reasoning"]
    assert reasoning["text"] == case["reasoning_text"]
    grounding = [{**g, "points": [list(p) for p in g["points"]]} for g in reasoning["grounding"]]
    assert grounding == case["grounding"]


def check_objects(case: dict[str, Any], result: EngineResult) -> None:
    (found,) = result.output.values()
    assert len(found) == len(case["objects"])
    for have, want in zip(found, case["objects"], strict=True):
        place = {name: value for name, value in have.items() if name != "score"}
        assert place == pytest.approx(want, abs=1e-6) and 0 <= have["score"] <= 1
    assert result.finish_reason == ("stop" if case["stop"] == "eos" else "length")


def check_segment(case: dict[str, Any], result: EngineResult) -> None:
    assert list(result.token_ids) == [token["id"] for token in case["tokens"]]
    (segment,) = result.output["segments"]
    coords = [t["value"] for t in case["tokens"] if t["type"] == "coord"]
    flat = [v for point in segment["points"] for v in (point["x"], point["y"])]
    assert flat == pytest.approx(coords[: len(coords) // 2 * 2], abs=1e-6)
    sizes = [t["value"] for t in case["tokens"] if t["type"] == "size"]
    have = [[s["width"], s["height"]] for s in segment.get("sizes", [])]
    assert have == [pytest.approx(size, abs=1e-6) for size in sizes]


CHECKS = {
    "query_reasoning": check_reasoning,
    "point": check_objects,
    "detect": check_objects,
    "segment": check_segment,
}


async def check_cases(engine: InferenceEngine, model: str, images: Path) -> None:
    """Asks all cases of ``model`` at once."""
    todo = cases(model)
    results = await asyncio.gather(*(run(engine, case, images) for case in todo))
    for case, result in zip(todo, results, strict=True):
        CHECKS.get(case["skill"], check_text)(case, result)


@pytest.mark.slow  # tests/service/clients/test_sdk.py asks some of the cases in make test.
@pytest.mark.parametrize("model", ["md2", "md3"])
async def test_every_case_in_one_mixed_batch(model, golden_folder, golden_images):
    config = RuntimeConfig(
        model_path=golden_folder(model), device="cpu", dtype="float32", max_batch_size=8
    )
    async with await InferenceEngine.create(config) as engine:
        await check_cases(engine, model, golden_images)
