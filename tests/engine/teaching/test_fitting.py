"""Fitting: the decoder with gradients computes what the runtime serves, and a few steps lower the loss."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor

from kestrel_engine import ConfigError, RuntimeFailure
from kestrel_engine.adapters import files
from kestrel_engine.adapters.targets import targets
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.teaching import TeachingSettings
from kestrel_engine.teaching.learning.fitting import FitStep, Fitting, ImageLessons, hidden
from kestrel_engine.teaching.learning.losses import loss_of
from kestrel_engine.teaching.learning.packing import (
    MOST_TEXT,
    RowPlan,
    coord_bin,
    pack,
    rows_of,
    size_bin,
)
from kestrel_engine.teaching.learning.parameters import PROJECTOR_RATE, Parameters
from kestrel_engine.types.adapter import Adapter
from kestrel_engine.types.model_config import Family
from kestrel_engine.types.requests import Coord, ImageBlock, Size
from kestrel_engine.types.step import Row
from tests.engine.models import small
from tests.engine.teaching.lessons import boxed, spoken

SETTINGS = TeachingSettings(rank=4, layers="all", epochs=3, rows=2, learning_rate=0.02)
LESSONS = (boxed([1, 30, 3]), spoken([1, 31, 2, 33, 3], [40, 41]))
IMAGE, OTHER = Path("image"), Path("other")


class Embeddings:
    """Random embeddings in place of files."""

    def __init__(self, model: Moondream) -> None:
        self._model = model

    def of(self, paths: Sequence[Path], adapters: object = None, views: object = None) -> Tensor:
        config = self._model.config
        shape = config.image_positions, config.text.dim
        return torch.stack(
            [
                torch.randn(shape, generator=torch.Generator().manual_seed(len(path.name)))
                for path in paths
            ]
        )


def fitted(parameters: Parameters) -> Parameters:
    """With random B, as after a training."""
    generator = torch.Generator().manual_seed(3)
    state = parameters.state()
    for name, side in state.items():
        if name.endswith(".B"):
            state[name] = torch.randn(side.shape, generator=generator) * 0.2
    parameters.load(state)
    return parameters


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_the_written_adapter_serves_what_the_training_computes(
    family: Family, tmp_path: Path
) -> None:
    model = small.small_model(family)
    config = model.config
    parameters = fitted(Parameters(config, replace(SETTINGS, alpha=8.0)))
    rows = [RowPlan(IMAGE, LESSONS), RowPlan(OTHER, LESSONS[1:])]
    batch = pack(rows, model)
    images = Embeddings(model)
    with torch.no_grad():
        stream = hidden(model, images.of([IMAGE, OTHER]), batch, parameters.adapter(model.dtype))
    parameters.write(tmp_path / "new.safetensors", {"model": "small"})
    checked = files.check(files.find(tmp_path, "new"), targets(config), config.text)
    adapter = files.read(checked, torch.float32)
    length = batch.text.shape[1]
    assert length == sum(map(len, LESSONS))
    places = [
        (IMAGE, LESSONS[0], 0),
        (IMAGE, LESSONS[1], len(LESSONS[0])),
        (OTHER, LESSONS[1], length),
    ]
    for path, lesson, begin in places:
        served = last_hidden(model, images.of([path])[0], lesson.tokens, adapter)
        torch.testing.assert_close(stream[begin + len(lesson) - 1], served, rtol=2e-4, atol=2e-4)
        without = last_hidden(model, images.of([path])[0], lesson.tokens, None)
        assert not torch.allclose(served, without, atol=1e-2)


def last_hidden(
    model: Moondream,
    image: Tensor,
    tokens: list[int | Coord | Size | ImageBlock],
    adapter: Adapter | None,
) -> Tensor:
    """The hidden state after ``tokens``, as a runtime computes it. Values are rounded to bins, as served ones are."""
    bins = model.config.region.coord_out_dim, model.config.region.size_out_dim // 2
    rounded = [
        Coord(round(coord_bin(t.value, bins[0])) / bins[0]) if isinstance(t, Coord)
        else Size(*(2 ** (10 * round(size_bin(v, bins[1])) / (bins[1] - 1) - 10) for v in (t.width, t.height)))
        if isinstance(t, Size) else t
        for t in tokens
    ]  # fmt: skip
    runtime = TorchRuntime(
        model, model.config, device="cpu", dtype=torch.float32,
        num_pages=30, page_size=4, max_batch_size=8, max_seq_length=100,
    )  # fmt: skip
    try:
        runtime.images["key"] = image
        prompt = (0, ImageBlock("key", len(image)), *rounded)
        return runtime.hidden([Row(0, prompt, 0, tuple(range(20)), None, adapter)])[0]
    finally:
        runtime.close()


def test_a_lesson_does_not_see_the_others_of_its_row() -> None:
    model = small.small_model("moondream3")
    images = Embeddings(model).of([IMAGE])
    with torch.no_grad():
        together = hidden(model, images, pack([RowPlan(IMAGE, LESSONS)], model), None)
        alone = hidden(model, images, pack([RowPlan(IMAGE, LESSONS[1:])], model), None)
    torch.testing.assert_close(together[len(LESSONS[0]) :], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_few_steps_lower_the_loss_and_leave_the_weights(checkpointing: bool) -> None:
    tensors = small.random_tensors(small.small_config("moondream3"))
    model = Moondream(small.small_config("moondream3"), tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    settings = replace(SETTINGS, epochs=8, checkpointing=checkpointing)
    steps: list[FitStep] = []
    fitting = Fitting(
        model, Parameters(model.config, settings), Embeddings(model), settings, steps.append  # type: ignore[arg-type]
    )  # fmt: skip
    images = [ImageLessons(IMAGE, LESSONS), ImageLessons(OTHER, LESSONS)]
    done = fitting.run(images, [])
    assert done.best_loss < 0.8 * done.first_loss and done.ended == "epochs"
    assert [step.step for step in steps] == list(range(1, 9)) and steps[-1].num_steps == 8
    assert all(torch.equal(before[name], tensors[name]) for name in tensors)


def test_rows_of_similar_length_share_a_batch() -> None:
    model = small.small_model("moondream2")
    settings = replace(SETTINGS, rows=4)
    fitting = Fitting(model, Parameters(model.config, settings), Embeddings(model), settings)  # type: ignore[arg-type]
    images = [
        ImageLessons(Path(str(index)), (spoken([1] * (1 + index), [2]),)) for index in range(64)
    ]
    batches = fitting.batches(images)
    paths = [row.path for rows in batches for row in rows]
    assert sorted(paths) == sorted(image.path for image in images)
    assert {len(rows) for rows in batches} == {4}
    spread = [max(lengths) - min(lengths) for lengths in map(lengths_of, batches)]
    assert sum(spread) / len(spread) < 16, "random batches of 4 of 64 have a spread of 39"
    assert fitting.batches(images) != batches


def lengths_of(rows: list[RowPlan]) -> list[int]:
    return [sum(map(len, row.lessons)) for row in rows]


def test_the_projector_learns_faster() -> None:
    config = small.small_config("moondream2")
    for layers, factors in (("mlp", [1.0]), ("all+projector", [1.0, PROJECTOR_RATE])):
        parameters = Parameters(config, replace(SETTINGS, layers=layers))
        groups = parameters.groups
        assert [group["factor"] for group in groups] == factors
        assert sum(len(group["params"]) for group in groups) == len(parameters.tensors)
    assert len(groups[1]["params"]) == 4


def test_checkpointing_changes_no_gradient() -> None:
    model = small.small_model("moondream3")
    batch, images = pack([RowPlan(IMAGE, LESSONS)], model), Embeddings(model).of([IMAGE])
    found = []
    for checkpointing in (False, True):
        parameters = fitted(Parameters(model.config, SETTINGS))
        adapter = parameters.adapter(model.dtype)
        stream = hidden(model, images, batch, adapter, checkpointing=checkpointing)
        loss_of(model, stream, batch).total.backward()
        found.append([side.grad for side in parameters.tensors])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ([[3.0, 3.0, 3.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.1]], 2),
        ([[3.0, 3.0, 3.0], [1.0, 2.0, 1.0], [1.5, 2.4, 1.6]], 1),
        ([[3.0], [1.0], [1.1]], 2),
    ],
    ids=["chance", "sure", "one image"],
)
def test_the_last_parameters_are_kept_unless_earlier_ones_are_surely_better(
    losses: list[list[float]], kept: int
) -> None:
    states = []

    class Scripted(Fitting):
        def losses(self, images: Sequence[ImageLessons]) -> list[float]:
            states.append(parameters.state())
            return losses[len(states) - 1]

    model = small.small_model("moondream2")
    settings = replace(SETTINGS, epochs=2)
    parameters = Parameters(model.config, settings)
    images = [ImageLessons(IMAGE, LESSONS)]
    done = Scripted(model, parameters, Embeddings(model), settings).run(images, images)  # type: ignore[arg-type]
    assert done.best_loss == fmean(losses[kept]) and done.first_loss == 3.0
    for name, side in parameters.state().items():
        assert torch.equal(side, states[kept][name])


def test_the_best_validated_parameters_are_kept_and_the_training_ends_early() -> None:
    """A held-out image that asks for the opposite gets worse with every epoch."""
    model = small.small_model("moondream2")
    settings = replace(SETTINGS, epochs=50, patience=2)
    parameters = Parameters(model.config, settings)
    fitting = Fitting(model, parameters, Embeddings(model), settings)  # type: ignore[arg-type]
    training = [ImageLessons(IMAGE, (spoken([1, 3], [40]),))]
    opposite = [ImageLessons(IMAGE, (spoken([1, 3], [50]),))]
    first = fmean(fitting.losses(opposite))
    done = fitting.run(training, opposite)
    assert done.ended == "patience" and done.epochs < 50
    assert done.first_loss == first
    assert fmean(fitting.losses(opposite)) == pytest.approx(done.best_loss)


def test_a_limit_of_time_ends_the_training() -> None:
    model = small.small_model("moondream2")
    settings = replace(SETTINGS, epochs=100_000, minutes=1e-4)
    fitting = Fitting(model, Parameters(model.config, settings), Embeddings(model), settings)  # type: ignore[arg-type]
    done = fitting.run([ImageLessons(IMAGE, LESSONS)], [])
    assert done.ended == "minutes" and done.seconds < 60


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    model = small.small_model("moondream2")
    model.text.lm_head.weight.fill_(torch.nan)
    fitting = Fitting(model, Parameters(model.config, SETTINGS), Embeddings(model), SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(RuntimeFailure, match=r"set a smaller learning rate than 0\.02"):
        fitting.run([ImageLessons(IMAGE, LESSONS)], [])


def test_the_rank_of_experts_and_the_layers_are_chosen() -> None:
    model = small.small_config("moondream3")
    with pytest.raises(ConfigError, match="rank=3: must be divisible by 2"):
        Parameters(model, replace(SETTINGS, rank=3))
    sides = Parameters(model, replace(SETTINGS, layers="mlp")).sides
    assert sides["text.blocks.2.mlp.fc1.A"].shape == (6, 2, 32)
    assert not any(".attn." in name for name in sides)
    only = Parameters(model, replace(SETTINGS, layers="attention")).sides
    assert only and all(".attn." in name for name in only)
    every = set(Parameters(model, replace(SETTINGS, layers="all")).sides)
    more = set(Parameters(model, replace(SETTINGS, layers="all+projector")).sides)
    assert all(name.startswith("text.") for name in every)
    assert more - every == {
        f"vision.proj_mlp.{fc}.{side}" for fc in ("fc1", "fc2") for side in "AB"
    }
    tower = set(Parameters(model, replace(SETTINGS, layers="all+vision")).sides) - more
    assert {int(name.split(".")[2]) for name in tower} == set(range(model.vision.enc_n_layers))


def test_lessons_are_distributed_over_rows() -> None:
    lessons = [spoken([1] * 200, [2] * 100)] * 3
    assert [len(row.lessons) for row in rows_of(IMAGE, lessons)] == [1, 1, 1]
    assert [len(row.lessons) for row in rows_of(IMAGE, LESSONS * 9)] == [18]
    assert rows_of(IMAGE, []) == [] and MOST_TEXT == 512
