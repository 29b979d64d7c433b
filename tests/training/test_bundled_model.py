"""The files of both models: size, names, and the engine against the plain reference, token for token."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kestrel_engine import RuntimeConfig, maintenance
from kestrel_engine.building.files import read_calibration
from kestrel_engine.checkpoint.catalog import BUNDLED
from kestrel_engine.checkpoint.checksums import checksum, read_sums
from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.types.calibration import CURVES, FILE_NAME
from kestrel_engine.types.model_config import parse_model_config
from tests.tiny import TINY
from training.learning.model import Learner, prompt_mask
from training.prompts import COORD, SIZE, Prompt, PromptWriter
from training.scenes.evaluation_set import encode, example
from training.scenes.scenes import TINY as VISION

SMALL = BUNDLED / "kestrel_small"
PAGE = 5
GREEDY = {"temperature": 0.0}


PREFIX = 1 + VISION.grid**2


def _load_exported(folder: Path) -> Learner:
    """The bfloat16 weights in a float32 model."""
    tensors = load_file(folder / "model.safetensors")
    config = parse_model_config(json.loads((folder / "config.json").read_text()))
    return Learner(config, {name.removeprefix("model."): t.float() for name, t in tensors.items()})


@pytest.mark.parametrize(
    ("folder", "largest", "shape"),
    [(TINY, 22_000_000, [8, 256, 256]), (SMALL, 60_000_000, [1536, 384])],
    ids=["kestrel-tiny", "kestrel-small"],
)
def test_the_files_have_their_checksums_and_fit_the_package(
    folder: Path, largest: int, shape: list[int]
) -> None:
    """The tensors are bfloat16 under the released names."""
    for file, known in read_sums(folder).items():
        assert checksum(folder / file) == known, file
    assert (folder / "model.safetensors").stat().st_size <= largest
    assert (folder / "sample.jpg").stat().st_size < 100_000
    config = parse_model_config(json.loads((folder / "config.json").read_text()))
    wanted = {f"model.{name}" for name in expected_tensors(config)}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == wanted
        assert file.get_slice("model.text.blocks.1.mlp.fc1.weight").get_shape() == shape
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}


@pytest.mark.slow
async def test_verify_of_kestrel_small_finds_the_known_answers() -> None:
    config = RuntimeConfig(model="kestrel-small", device="cpu", cpu_threads=1)
    found = [each async for each in maintenance.accept(config)]
    assert [each.status for each in found if each.check == "answer"] == ["ok", "ok"]


@torch.no_grad()
def _seen(model: Learner, data: bytes) -> torch.Tensor:
    """The embedding of an encoded file's image, whose crops libvips alone makes."""
    import pyvips

    image = pyvips.Image.new_from_buffer(data, "")[:3]
    rows, columns = select_tiling(image.width, image.height, VISION)
    side, window = VISION.crop_size, VISION.crop_window

    def stretched(width: int, height: int) -> np.ndarray:
        return np.asarray(image.resize(width / image.width, vscale=height / image.height).numpy())

    found = [stretched(side, side)]
    if rows * columns > 1:
        whole = stretched(window * (columns - 1) + side, window * (rows - 1) + side)
        for y in range(0, rows * window, window):
            found += [whole[y : y + side, x : x + side] for x in range(0, columns * window, window)]
    return model.embed_images(torch.from_numpy(np.stack(found))[None], (rows, columns))


@torch.no_grad()
def _follow(
    model: Learner, image: torch.Tensor, prompt: Prompt
) -> tuple[list[int], list[int], list[list[int]], list[float]]:
    """What the reference would say at each generated position of a finished prompt: ids, coordinates, sizes; and the
    log-probabilities that it gives to the prompt's own ids there."""
    ids, values = torch.tensor([prompt.ids]), torch.tensor([prompt.values])
    position = torch.arange(PREFIX, PREFIX + ids.shape[1])[None]
    mask = prompt_mask(torch.zeros_like(ids), PREFIX)
    hidden = model.decode(image, ids, values, position, mask)
    before = hidden[0, prompt.start - 1 : -1]
    logits = model.text.logits(before)
    said = logits.log_softmax(-1).gather(1, ids[0, prompt.start :, None])
    return (
        logits.argmax(-1).tolist(),
        model.region.coord_logits(before).argmax(-1).tolist(),
        model.region.size_logits(before).argmax(-1).tolist(),
        said.flatten().tolist(),
    )


@torch.no_grad()
def _box_scores(model: Learner, image: torch.Tensor, prompt: Prompt) -> list[float]:
    """The raw scores of a finished prompt's boxes by the reference, as docs/use/scores.md defines them."""
    ids, values = torch.tensor([prompt.ids]), torch.tensor([prompt.values])
    position = torch.arange(PREFIX, PREFIX + ids.shape[1])[None]
    hidden = model.decode(image, ids, values, position, prompt_mask(torch.zeros_like(ids), PREFIX))
    before = hidden[0, prompt.start - 1 : -1]

    def near(logits: torch.Tensor) -> float:
        probabilities = logits.softmax(-1).tolist()
        best = probabilities.index(max(probabilities))
        return float(sum(probabilities[max(0, best - 16) : best + 17]))

    logits = model.text.logits(before)
    coords, sizes = model.region.coord_logits(before), model.region.size_logits(before)
    scores = []
    for first in range(0, len(before) - 1, 3):
        # The first decision is over the whole vocabulary, later ones are between one more box and the end.
        end = (
            logits[first].softmax(-1)[0] if first == 0 else logits[first, [0, COORD]].softmax(-1)[0]
        )
        places = [near(coords[first]), near(coords[first + 1])]
        scores.append(float(1 - end) * math.prod([*places, *map(near, sizes[first + 2])]))
    return scores


@pytest.mark.parametrize("index", [3, pytest.param(18, marks=pytest.mark.slow)])
async def test_the_engine_says_what_the_reference_says(writer: PromptWriter, index: int) -> None:
    pytest.importorskip("pyvips")
    from kestrel_engine import InferenceEngine

    model = _load_exported(TINY)
    scored = {**GREEDY, "logprobs": True}
    config = RuntimeConfig(model_path=TINY, device="cpu", cpu_threads=1, calibration="off")
    async with await InferenceEngine.create(config) as engine:
        data = encode(example("seen", index))
        image = _seen(model, data)
        question = "How many shapes are there?"
        texts: list[tuple[Prompt, Any]] = [
            (writer.open("query", question), await engine.query(data, question, settings=scored)),
            (
                writer.open("caption", "normal"),
                await engine.caption(data, "normal", settings=scored),
            ),
        ]
        for prompt, result in texts:
            said = list(result.token_ids)
            prompt.text(said)
            ids, *_, logprobs = _follow(model, image, prompt)
            assert ids == said
            assert result.logprobs is not None
            assert [token.logprob for token in result.logprobs] == pytest.approx(logprobs, abs=1e-4)
        found = await engine.detect(data, "shapes", settings=GREEDY)
        prompt = writer.open("detect", "shapes")
        for box in found.output["objects"]:
            prompt.reference((box["x_min"], box["y_min"], box["x_max"], box["y_max"]))
        prompt.text([0])
        ids, coords, sizes, _ = _follow(model, image, prompt)
        said = prompt.ids[prompt.start :]
        assert len(found.output["objects"]) > 1
        scores = [box["score"] for box in found.output["objects"]]
        assert scores == pytest.approx(_box_scores(model, image, prompt), abs=1e-4)
        assert min(scores) > 0.5 and found.absence < 0.01
        for step, token in enumerate(said):
            value = prompt.values[prompt.start + step]
            if step % 3 == 0:
                assert ids[step] == token
            if token == COORD:
                assert coords[step] == round(value[0] * 1024)
            elif token == SIZE:
                assert [2 ** (10 * b / 1023 - 10) for b in sizes[step]] == pytest.approx(
                    value, rel=1e-4
                )


@torch.no_grad()
def _continue(model: Learner, image: torch.Tensor, ids: list[int], most: int) -> list[int]:
    """The greedy continuation of a prompt by the reference, without its end token, by whole passes."""
    said: list[int] = []
    while len(said) < most:
        prompt = Prompt()
        prompt.text([*ids, *said, 0])
        prompt.start = len(ids) + len(said)
        (token,) = _follow(model, image, prompt)[0]
        if token == 0:
            break
        said.append(token)
    return said


@pytest.mark.slow
async def test_a_conversation_goes_on_as_the_reference_goes_on(writer: PromptWriter) -> None:
    """Each turn is computed on the pages of the turns before it; the reference computes all of them anew."""
    pytest.importorskip("pyvips")
    from kestrel_engine import InferenceEngine

    model = _load_exported(TINY)
    config = RuntimeConfig(model_path=TINY, device="cpu", cpu_threads=1, page_size=PAGE)
    data = encode(example("seen", 3))
    image = _seen(model, data)
    questions = [
        "How many shapes are there?",
        "What colours are there?",
        "Describe the largest shape.",
        "How many shapes are there?",
    ]
    async with await InferenceEngine.create(config) as engine:
        history: list[tuple[str, str]] = []
        ids: list[int] = []
        cached = 0
        for text in questions:
            arguments = {"question": text, "history": history}
            stream = await engine.submit("query", data, arguments, {**GREEDY, "max_tokens": 40})
            result = await stream.result()
            ids += writer.open("query", text).ids
            assert list(result.token_ids) == _continue(model, image, ids, 40)
            assert result.metrics.input_tokens == PREFIX + len(ids)
            # All of the turn before is reused, but its last positions, which fill no page.
            assert cached <= result.metrics.cached_tokens < result.metrics.input_tokens
            cached = result.metrics.input_tokens // PAGE * PAGE
            answer = result.output["answer"]
            ids += writer.encode(answer)
            history.append((text, answer))


@pytest.mark.parametrize(
    ("folder", "least"), [(TINY, 1000), (SMALL, 150)], ids=["kestrel-tiny", "kestrel-small"]
)
def test_the_calibration_is_that_of_the_weights(folder: Path, least: int) -> None:
    stored = json.loads((folder / FILE_NAME).read_text())
    weights = [folder / "model.safetensors"]
    assert read_calibration("auto", weights, stored["weights"]).names == CURVES
    for curve, facts in stored["fitted"]["curves"].items():
        assert facts["results"] > least and facts["error"] <= 0.03, curve
