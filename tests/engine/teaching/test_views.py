"""Views: pixels and labels are moved alike, and lessons that are no longer true are left out."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kestrel_engine import ConfigError, ImageLimits
from kestrel_engine.teaching import TeachingSettings
from kestrel_engine.teaching.data.lessons import Lesson
from kestrel_engine.teaching.data.views import View, Views
from kestrel_engine.teaching.learning.fitting import Fitting, ImageLessons
from kestrel_engine.teaching.learning.image_embeddings import ImageEmbeddings
from kestrel_engine.teaching.learning.parameters import Parameters
from kestrel_engine.types.requests import Coord, Size
from tests.engine.models import small
from tests.engine.teaching.lessons import spoken

HEIGHT, WIDTH = 100, 200


def located(*objects: tuple[float, ...]) -> Lesson:
    """A lesson of points (x, y), or of boxes (x, y, width, height)."""
    lesson = Lesson([1, 30, 3], weight=2.0)
    for x, y, *size in objects:
        lesson.add_end(is_end=False, is_pair=bool(lesson.ends))
        lesson.tokens += (Coord(x), Coord(y), *([Size(*size)] if size else []))
    lesson.add_end(is_end=True, is_pair=bool(lesson.ends))
    return lesson


def coords(lesson: Lesson) -> list[float]:
    return [token.value for token in lesson.tokens if isinstance(token, Coord)]


@pytest.mark.parametrize(
    "view",
    [
        View(0, 0, 1, 1),
        View(0, 0, 1, 1, is_mirrored=True),
        View(0.25, 0.2, 0.5, 0.6),
        View(-0.4, -0.1, 1.6, 1.25, is_mirrored=True),
    ],
    ids=["whole", "mirrored", "enlarged", "reduced"],
)
def test_a_box_is_where_its_pixels_are(view: View) -> None:
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[40:60, 100:140] = 255
    seen = view.of_lesson(located((0.6, 0.5, 0.2, 0.2)))
    assert seen is not None
    x, y = coords(seen)
    (size,) = (token for token in seen.tokens if isinstance(token, Size))
    width, height = size.width, size.height
    moved = view.of_pixels(pixels)
    assert moved.shape == pixels.shape and moved.dtype == np.uint8
    rows, columns = np.nonzero(moved[..., 0] > 127)
    found = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    edges = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    expected = [
        edge * side for edge, side in zip(edges, (WIDTH, HEIGHT, WIDTH, HEIGHT), strict=True)
    ]
    np.testing.assert_allclose(found, expected, atol=1.01)
    assert seen.tokens[3:] == [Coord(x), Coord(y), Size(width, height)]


def test_the_edges_continue_beyond_the_image() -> None:
    pixels = np.full((HEIGHT, WIDTH, 3), (10, 20, 30), np.uint8)
    assert (View(-0.5, -0.5, 2, 2).of_pixels(pixels) == pixels).all()


def test_objects_stay_in_order_from_left_to_right() -> None:
    lesson = located((0.2, 0.3), (0.4, 0.1))
    mirrored = View(0, 0, 1, 1, is_mirrored=True).of_lesson(lesson)
    assert mirrored is not None
    assert coords(mirrored) == pytest.approx([0.6, 0.1, 0.8, 0.3])
    assert mirrored.ends == lesson.ends and mirrored.weight == lesson.weight
    assert [type(token) for token in mirrored.tokens] == [type(token) for token in lesson.tokens]


def test_a_lesson_about_an_object_outside_the_view_is_left_out() -> None:
    view = View(0.3, 0, 0.7, 1)
    assert view.of_lesson(located((0.2, 0.3))) is None
    assert view.of_lesson(located((0.35, 0.3, 0.2, 0.1))) is None, "cut off"
    assert view.of_lesson(located((0.35, 0.3, 0.08, 0.1))) is not None
    none, said = located(), spoken([1], [2])
    assert view.of_lesson(none) is none and view.of_lesson(said) is said


def test_views_are_drawn_within_their_limits() -> None:
    views = Views(0.2, True, random.Random(0))
    drawn = [views.draw() for _ in range(300)]
    some = [view for view in drawn if view is not None]
    assert 60 < len(drawn) - len(some) < 140
    assert 60 < sum(view.is_mirrored for view in some) < 140
    for view in some:
        assert 0.75 < view.width < 1.27 and 0.75 < view.height < 1.27
        for at, side in ((view.left, view.width), (view.top, view.height)):
            assert min(0, 1 - side) <= at <= max(0, 1 - side)
    assert Views(0.0, False, random.Random(0)).draw() is None


def test_an_epoch_shows_views_with_lessons_that_are_true_of_them() -> None:
    model = small.small_model("moondream2")
    settings = TeachingSettings(rank=4, vary=0.2, mirror=True)
    fitting = Fitting(model, Parameters(model.config, settings), None, settings)  # type: ignore[arg-type]
    taught, said, replayed = located((0.3, 0.5, 0.4, 0.9)), spoken([1], [2]), spoken([1], [3])
    image = ImageLessons(Path("image"), (taught, said), (replayed,))
    kinds = set()
    for _ in range(40):
        ((row,),) = fitting.batches([image])
        assert said in row.lessons
        is_mirrored = row.view is not None and row.view.is_mirrored
        assert (replayed in row.lessons) == (not is_mirrored)
        assert (taught in row.lessons) == (row.view is None)
        assert sum(bool(coords(lesson)) for lesson in row.lessons) == 1
        kinds.add("none" if row.view is None else "mirrored" if is_mirrored else "plain")
    assert kinds == {"none", "plain", "mirrored"}
    plain = Fitting(
        model, Parameters(model.config, settings), None, replace(settings, vary=0.0, mirror=False)  # type: ignore[arg-type]
    )  # fmt: skip
    assert all(row.view is None for _ in range(10) for (row,) in plain.batches([image]))


def test_a_view_is_encoded_as_an_image_of_its_pixels(tmp_path: Path) -> None:
    pyvips = pytest.importorskip("pyvips")
    pixels = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    view, paths = View(-0.1, 0.1, 1.1, 0.8), [tmp_path / "a.png", tmp_path / "b.png"]
    for path, some in zip(paths, (pixels, view.of_pixels(pixels)), strict=True):
        image = pyvips.Image.new_from_array(some).copy(interpretation="srgb")
        image.write_to_file(str(path))
    images = ImageEmbeddings(small.small_model("moondream2"), ImageLimits(), 1 << 20)
    seen, plain = images.of([paths[0], paths[0]], views=[view, None])
    assert torch.equal(seen, images.of(paths[1:])[0])
    assert torch.equal(plain, images.of(paths[:1])[0]) and not torch.equal(seen, plain)


def test_wrong_settings_of_views_are_named() -> None:
    with pytest.raises(ConfigError, match=r"vary=0\.6: must be a finite number from 0 to 0\.5"):
        TeachingSettings(vary=0.6)
    with pytest.raises(ConfigError, match="mirror=True: needs views; set --vary above 0"):
        TeachingSettings(mirror=True)
