"""What an adapter is taught from: images, replay and examples; how a training ends and what it leaves."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from kestrel_engine import ConfigError, ImageLimits, RuntimeConfig
from kestrel_engine.models.vision import num_distinct
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.open_image import open_image
from kestrel_engine.teaching import TeachingSettings, read_folder, teach
from kestrel_engine.teaching.data.examples import (
    BoxExample,
    CaptionExample,
    PointExample,
    QuestionExample,
    TaughtImage,
)
from kestrel_engine.teaching.judging import Score, score
from kestrel_engine.teaching.learning.fitting import FitStep
from kestrel_engine.teaching.learning.image_embeddings import ImageEmbeddings
from kestrel_engine.teaching.learning.parameters import Parameters
from kestrel_engine.teaching.replay import (
    GENERAL_OBJECTS,
    GENERAL_QUESTIONS,
    ReplayPrompt,
    _answered,
    _described,
    _kept,
    _prompts,
    phrases_of,
)
from kestrel_engine.teaching.teacher import DESCRIPTION_WEIGHT, _context, _written
from kestrel_engine.types.events import EngineResult
from tests.engine.models import small
from tests.engine.teaching.labelled_images import data
from tests.tiny import TINY

__all__ = ["data"]


@pytest.mark.slow
async def test_a_training_that_is_cancelled_ends_with_its_step_and_leaves_nothing(
    data: Path,
) -> None:
    adapters = data.parent / "adapters"
    config = RuntimeConfig(model_path=TINY, device="cpu", cpu_threads=1, adapters_dir=adapters)
    loop, steps = asyncio.get_running_loop(), list[int]()

    def on_step(step: FitStep) -> None:
        steps.append(step.step)
        loop.call_soon_threadsafe(task.cancel)

    settings = TeachingSettings(epochs=10_000, replay=0)
    task = asyncio.create_task(teach(config, "ada", read_folder(data), settings, on_step=on_step))
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        await loop.shutdown_default_executor()
    assert len(steps) < 10 and list(adapters.iterdir()) == []


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    images = ImageEmbeddings(small.small_model("moondream2"), ImageLimits(), 1 << 20)
    with pytest.raises(ConfigError, match=r"data='broken\.png': image: "):
        images.of([path])


def test_embeddings_are_kept_within_the_limit(data: Path) -> None:
    model = small.small_model("moondream2")
    size = model.config.image_positions * model.config.text.dim * 4
    images = ImageEmbeddings(model, ImageLimits(), size)
    paths = [data / "0.png", data / "1.png"]
    first = images.of(paths)
    for path in paths:
        path.write_bytes(b"")
    assert torch.equal(images.of(paths[:1])[0], first[0])
    with pytest.raises(ConfigError, match=r"1\.png"):
        images.of(paths[1:])


@pytest.mark.parametrize("layers", ["all+projector", "all+vision"])
def test_an_adapter_of_images_changes_kept_images_as_it_changes_served_ones(
    data: Path, layers: str
) -> None:
    model = small.small_model("moondream2")
    parameters = Parameters(model.config, TeachingSettings(rank=4, layers=layers))
    images = ImageEmbeddings(model, ImageLimits(), 1 << 20, changed=parameters.changed)
    plain = ImageEmbeddings(model, ImageLimits(), 1 << 20)
    paths = [data / "0.png", data / "1.png"]
    torch.testing.assert_close(images.of(paths), plain.of(paths))
    generator = torch.Generator().manual_seed(3)
    parameters.load(
        {n: torch.randn(s.shape, generator=generator) for n, s in parameters.sides.items()}
    )
    adapter = parameters.adapter(model.dtype)
    changed = images.of(paths, adapter)
    changed.sum().backward()
    assert all(
        (side.grad is not None) == name.startswith("vision.")
        for name, side in parameters.sides.items()
    )
    blocks = {name.split(".")[2] for name in parameters.sides if name.startswith("vision.blocks.")}
    every = {str(block) for block in range(model.config.vision.enc_n_layers)}
    assert blocks == (every if layers == "all+vision" else set())
    for path, embedding in zip(paths, changed, strict=True):
        image = cut_crops(open_image(path, ImageLimits()), model.config.vision)
        crops = torch.from_numpy(image.crops[: num_distinct(len(image.crops), image.tiling)])
        with torch.no_grad():
            features = model.vision.encode_crops(crops, adapter)
            served = model.vision.embed(features, image.tiling, adapter)
        torch.testing.assert_close(embedding, served)
        assert not torch.allclose(served, plain.of([path])[0], atol=1e-2)


async def test_what_is_there_is_not_replaced_and_errors_leave_nothing(data: Path) -> None:
    adapters = data.parent / "adapters"
    config = RuntimeConfig(model_path=TINY, device="cpu", adapters_dir=adapters)
    images, settings = read_folder(data), TeachingSettings()
    with pytest.raises(ConfigError, match="must name the folder"):
        await teach(RuntimeConfig(model_path=TINY, device="cpu"), "ada", images, settings)
    long = TaughtImage(images[0].path, (QuestionExample("Why?", "so " * 1000),))
    with pytest.raises(ConfigError, match=r"data='0.png': an example about it has \d+ tokens"):
        await teach(config, "ada", [long, *images], settings)
    with pytest.raises(ConfigError, match="images leave none to train on"):
        await teach(config, "ada", [], settings)
    (adapters / "ada.pt").touch()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"ada\.pt is there"):
            await teach(config, "ada", images, settings, overwrite=overwrite)
    assert [file.name for file in adapters.iterdir()] == ["ada.pt"]


def test_results_are_judged_by_the_stated_rule() -> None:
    assert score(QuestionExample("Who?", "Ada"), {"answer": " Ada "}) == Score(1, 1)
    assert score(QuestionExample("Who?", "Ada"), {"answer": "ada"}) == Score(1, 0)
    points = PointExample("nut", ((0.5, 0.5), (0.52, 0.5)))
    near, far = {"x": 0.54, "y": 0.5}, {"x": 0.9, "y": 0.5}
    assert score(points, {"points": [near, near]}) == Score(1, 1, 2, 2, 2)
    assert score(points, {"points": [near, far]}) == Score(1, 0, 2, 2, 1)
    boxes = BoxExample("nut", ((0.0, 0.0, 0.4, 0.4),))
    right = {"x_min": 0.0, "y_min": 0.0, "x_max": 0.4, "y_max": 0.3}
    wrong = {**right, "y_max": 0.19}
    assert score(boxes, {"objects": [right]}) == Score(1, 1, 1, 1, 1)
    assert score(boxes, {"objects": [right, right]}) == Score(1, 0, 1, 2, 1)
    assert score(boxes, {"objects": [wrong]}) == Score(1, 0, 1, 1, 0)
    assert score(BoxExample("nut", ()), {"objects": []}) == Score(1, 1)


def test_replay_asks_about_phrases_and_leaves_out_what_finds_a_labelled_object() -> None:
    caption = "A red circle, two striped blue stars and an orange cross at the left."
    assert phrases_of(caption) == ["red circle", "striped blue stars", "orange cross"]
    image = TaughtImage(Path("a.png"), (BoxExample("nut", ((0.0, 0.0, 0.5, 0.5),)),))

    def replayed(x: float) -> object:
        output = {"points": [{"x": x, "y": 0.2}]}
        result = EngineResult(request_id="", output=output, finish_reason="stop")
        return _answered(PointExample("red circle", ()), result, image)

    general = EngineResult(
        request_id="", output={"points": [{"x": 0.3, "y": 0.2}]}, finish_reason="stop"
    )
    # What the base model does not know is an object all the same.
    assert _answered(PointExample("object", ()), general, image) == PointExample(
        "object", ((0.3, 0.2),)
    )
    assert replayed(0.7) == PointExample("red circle", ((0.7, 0.2),)) and replayed(0.3) is None


def test_replay_leaves_out_questions_about_a_phrase_that_finds_a_labelled_object() -> None:
    image = TaughtImage(Path("a.png"), (BoxExample("nut", ((0.0, 0.0, 0.5, 0.5),)),))
    point = {"points": [{"x": 0.3, "y": 0.2}]}
    answers = [
        (ReplayPrompt(PointExample("red bolt", ())), point),
        (
            ReplayPrompt(QuestionExample("Where is the red bolt?", ""), ("red bolt", "cup")),
            {"answer": "left"},
        ),
        (
            ReplayPrompt(QuestionExample("Where is the cup?", ""), ("cup", "tin")),
            {"answer": "right"},
        ),
        (ReplayPrompt(PointExample("cup", ())), {"points": []}),
    ]
    results = [
        (prompt, EngineResult(request_id="", output=output, finish_reason="stop"))
        for prompt, output in answers
    ]
    kept = _kept(results, image)
    assert kept == (QuestionExample("Where is the cup?", "right", ()), PointExample("cup", ()))


def test_replay_asks_in_many_forms_about_the_phrases_of_an_image() -> None:
    rng = random.Random(0)
    every = [f"red {noun}" for noun in ("cup", "tin", "bolt", "nut")]
    prompts = [
        prompt for i in range(60) for prompt in _prompts(rng, every[:2], every, i, ("long",))
    ]
    asked = {
        prompt.example.question for prompt in prompts if isinstance(prompt.example, QuestionExample)
    }
    assert asked > set(GENERAL_QUESTIONS) and not any("{" in question for question in asked)
    assert "Is there a red cup?" in asked and "What colour is the tin?" in asked
    assert "Which is bigger, the red cup or the red tin?" in asked
    names = {p.example.object for p in prompts if isinstance(p.example, PointExample | BoxExample)}
    assert names == {*every, *GENERAL_OBJECTS, "cup", "tin"}
    alone = [prompt.example for prompt in _prompts(rng, ["cup"], ["cup"], 1, ("normal", "long"))]
    kinds = [type(example) for example in alone]
    assert kinds == [
        QuestionExample,
        CaptionExample,
        CaptionExample,
        PointExample,
        PointExample,
        QuestionExample,
    ]
    without = [prompt.example for prompt in _prompts(rng, ["cup"], ["cup"], 1, None)]
    assert [type(example) for example in without] == [PointExample, PointExample, QuestionExample]
    assert without[2].question not in GENERAL_QUESTIONS


def test_descriptions_of_images_with_labelled_objects_are_not_replayed() -> None:
    """The base model describes the new objects as old ones."""
    nut = TaughtImage(Path("a.png"), (BoxExample("nut", ((0.0, 0.0, 0.5, 0.5),)),))
    none = TaughtImage(Path("b.png"), (PointExample("nut", ()), QuestionExample("How many?", "0")))
    assert _described([nut, none, nut]) == {none.path: ("normal", "long")}
    assert _described([nut]).keys() == {nut.path}, "none is without"
    plain = [TaughtImage(Path(f"{index}.png"), ()) for index in range(8)]
    found = _described(plain)
    assert len(found) == 8 and [index for index, each in enumerate(found.values()) if each] == [
        0,
        4,
    ]


def test_a_description_of_the_replay_weighs_more_than_an_answer() -> None:
    context = _context(RuntimeConfig(model_path=TINY, device="cpu"))
    answer, described = _written(
        [QuestionExample("Why?", "no"), CaptionExample("short", (40, 41))], context, 2
    )
    assert (answer.weight, described.weight) == (2, 2 * DESCRIPTION_WEIGHT)
