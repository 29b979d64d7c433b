"""What the domains of kestrel-small draw is what their answers say."""

import os
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from training.camera import turn
from training.domains.charts import questions as charts
from training.domains.charts.draw import _scale_among
from training.domains.charts.sketched import sketch
from training.domains.charts.tables import make_table
from training.domains.drawn import Place
from training.domains.photos import draw as photos
from training.domains.phrasing import absent_object, off_topic, vary
from training.domains.picture import NOT_SHOWN, SAME_COLUMN, Ask, Mark, Picture, find, in_order
from training.domains.screens import draw as screens
from training.domains.shapes.draw import _caption, _grid_scene, draw_with_pillow, turned
from training.domains.text.documents import receipt
from training.domains.text.page import Page
from training.mixture import draw_picture
from training.scenes.captions import named_objects, objects_of
from training.scenes.scenes import MIN_CONTRAST, contrast, draw_scene
from training.scenes.vocabulary import HELD_OUT, NUMBER_WORDS

OWN = ("shapes", "text", "charts", "icons", "photos", "emoji")  # drawn without a browser's archive


@pytest.fixture(params=OWN)
def domain(request: pytest.FixtureRequest, sources: Path) -> str:
    return str(request.param)


@pytest.fixture
def pictures(domain: str) -> list[Picture]:
    return drawn(domain)


@cache
def drawn(domain: str) -> list[Picture]:
    sizes = ((420, 300), (300, 420), (640, 480))
    return [draw_picture(random.Random(f"{domain}/{i}"), domain, sizes[i % 3]) for i in range(9)]


def test_pictures_and_questions_are_well_formed(pictures: list[Picture]) -> None:
    for picture in pictures:
        height, width = picture.pixels.shape[:2]
        assert picture.pixels.dtype == np.uint8 and len(picture.asks) >= 3
        for ask in picture.asks:
            assert ask.text.strip()
            if ask.skill in ("query", "reasoning", "caption"):
                assert bool(ask.steps) == (ask.skill == "reasoning")
                assert ask.answer and not ask.boxes
            for x0, y0, x1, y1 in ask.boxes:
                assert -2 <= x0 < x1 <= width + 2 and -2 <= y0 < y1 <= height + 2
            if ask.kind == "shapes count reasoned":
                assert sum(len(points) for _, points in ask.steps) == int(ask.answer)
            if ask.skill == "point":
                assert len(ask.points) == len(ask.boxes)
                for (x, y), box in zip(ask.points, ask.boxes, strict=True):
                    assert box[0] <= x <= box[2] and box[1] <= y <= box[3]


def test_marks_lie_on_ink(pictures: list[Picture]) -> None:
    marks = shown = 0
    for picture in pictures:
        pie = any(mark.label == "pie" for mark in picture.marks)  # a slice has one colour
        for mark in () if pie else picture.marks:
            x0, y0, x1, y1 = (round(v) for v in mark.box)
            inside = picture.pixels[max(y0 - 3, 0) : y1 + 3, max(x0 - 3, 0) : x1 + 3].astype(float)
            marks += 1
            shown += inside.reshape(-1, 3).std(0).max() > 4
    assert shown >= 0.97 * marks


def test_a_picture_is_a_pure_function_of_its_seed(domain: str) -> None:
    first, again = (draw_picture(random.Random(5), domain, (400, 300)) for _ in range(2))
    assert np.array_equal(first.pixels, again.pixels) and first.asks == again.asks


def test_a_chart_does_not_depend_on_the_hashes_of_its_process(sources: Path) -> None:
    program = (
        "import random; from training.domains.charts.tables import make_table\n"
        "print([make_table(random.Random(seed)) for seed in range(9)])"
    )
    first, other = (
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True,
        ).stdout
        for seed in "12"
    )  # fmt: skip
    assert first == other


def test_text_stands_where_its_boxes_say(sources: Path) -> None:
    page = Page(Image.new("RGB", (400, 100), (255, 255, 255)))
    line = page.put(20, 60, "Total: 12.50", "train/plain-400-normal.ttf", 28, (0, 0, 0))
    rows, columns = np.nonzero(np.asarray(page.image)[..., 0] < 128)
    found = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    assert np.allclose(found, line.box, atol=1.6)
    assert [word.text for word in line.words] == ["Total:", "12.50"]
    assert "".join(c for _, _, c in page.characters) == "Total:12.50"
    for word in line.words:
        inside = [c for x, y, c in page.characters if word.box[0] < x < word.box[2]]
        assert "".join(inside) == word.text


def test_shapes_of_the_second_renderer_lie_in_their_boxes() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        scene = draw_scene(rng, 480, 360, count=3)
        pixels = draw_with_pillow(rng, scene)
        for shape in scene.shapes:
            x, y = shape.anchor
            if shape.style == 0:
                wanted = np.array(shape.rgb) * 255
                assert np.abs(pixels[round(y), round(x)] - wanted).max() < 3


def test_equal_shapes_in_columns_have_one_order() -> None:
    places = [(100.2, 50.0), (100.0, 20.0), (40.0, 70.0), (99.9, 90.0)]
    wanted = [(40.0, 70.0), (100.0, 20.0), (100.2, 50.0), (99.9, 90.0)]
    assert in_order(places, 640, lambda p: p) == wanted


@pytest.mark.parametrize("degrees", [5.0, -5.0])
def test_what_is_known_turns_with_the_picture(degrees: float) -> None:
    pixels = np.full((300, 400, 3), 255, np.uint8)
    pixels[60:100, 250:310] = 0
    box = (250.0, 60.0, 310.0, 100.0)
    ask = Ask("point", "x", "it", boxes=(box,), points=((280.0, 80.0),), refs=(box, (280.0, 80.0)))
    found = turn(Picture(pixels, [ask], [Mark(box, "bar")], [(280.0, 80.0, "a")]), degrees)
    rows, columns = np.nonzero(found.pixels[..., 0] < 128)
    (moved,) = found.asks
    wanted = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    assert moved.boxes[0] == moved.refs[0] == found.marks[0].box == pytest.approx(wanted, abs=2)
    assert moved.points[0] == moved.refs[1] == found.characters[0][:2]
    assert moved.points[0] == pytest.approx((columns.mean(), rows.mean()), abs=1)


def test_boxes_of_a_turned_picture_have_the_order_of_their_new_places() -> None:
    boxes = (190.0, 20.0, 210.0, 40.0), (190.0, 250.0, 210.0, 270.0)
    picture = Picture(np.zeros((300, 400, 3), np.uint8), [find("point", "x", "all", boxes)])
    for degrees, heights in ((6, [40, 260]), (-6, [260, 40])):
        (ask,) = turn(picture, degrees).asks
        found = [(x, y) for x, y in ask.points]
        assert found == sorted(found) and [y for _, y in found] == pytest.approx(heights, abs=15)
    assert not turn(picture, -1).asks  # neither one above the other nor well apart


def test_a_turned_scene_is_what_a_turned_picture_shows() -> None:
    shown = 0
    for seed in range(12):
        scene = draw_scene(random.Random(seed), 480, 360, 3)
        leaning = turned(scene, 6)
        pixels = np.asarray(Image.fromarray(draw_with_pillow(random.Random(1), scene)).rotate(6))
        for shape in leaning.shapes if leaning is not scene else ():
            x, y = shape.anchor
            shown += shape.style == 0
            off = np.abs(pixels[round(y), round(x)] - np.array(shape.rgb) * 255).max()
            assert shape.style or off < 4
    assert shown > 5


def test_two_photographs_at_once_are_of_two_things(monkeypatch: pytest.MonkeyPatch) -> None:
    colours = {"apple": Image.new("RGB", (8, 8), "red"), "hat": Image.new("RGB", (8, 8), "blue")}
    files: photos.Files = {name: [("", "", name.encode())] for name in colours}
    monkeypatch.setattr(photos, "_open", lambda data: colours[data.decode()])
    monkeypatch.setattr(photos, "_look", lambda rng, image, *_: image)
    monkeypatch.setattr(photos, "_groups", lambda noun: {})
    seeds = [seed for seed in range(60) if 0.5 <= random.Random(seed).random() < 0.7]
    for seed in seeds:
        red, _, blue = photos._strange(random.Random(seed), files).getpixel((0, 0))  # type: ignore[misc]
        assert min(red, blue) > 90
    assert len(seeds) > 5


def test_a_grid_is_told_column_by_column() -> None:
    for seed in range(40):
        scene = _grid_scene(random.Random(seed), 640, 480, held=False)
        shapes = scene.shapes
        assert all(max(s.box[2] - s.box[0], s.box[3] - s.box[1]) > 14 for s in shapes)
        assert all(contrast(s.rgb, scene.background) > MIN_CONTRAST for s in shapes)
        assert list(shapes) == in_order(shapes, 640, lambda s: s.centre)
        gaps = np.diff([s.centre[0] / 640 for s in shapes])
        assert ((abs(gaps) < 1e-6) | (gaps > 1.4 * SAME_COLUMN)).all()
        assert not HELD_OUT & {(s.colour, s.kind) for s in shapes}


def test_a_short_caption_begins_with_the_number_of_different_shapes() -> None:
    for seed in range(20):
        scene = draw_scene(random.Random(seed), 640, 480)
        said, count = _caption(scene, "short"), f"There are {NUMBER_WORDS[len(scene.shapes)]} "
        assert said.startswith(count) == (len(objects_of(scene)) > 1)
        assert named_objects(said) == objects_of(scene)


@pytest.mark.parametrize("values", [(5.0, 9.0, 7.0, 7.1), (8.0, 7.9, 2.0, 3.0)])
def test_an_extreme_stands_out(values: tuple[float, ...]) -> None:
    high, low = charts.extremes(values)
    assert high == (1 if values[1] == 9 else None) and low == (0 if values[0] == 5 else 2)
    assert charts.extremes((7.0, 5.0, 4.6), pie=True) == (0, None)


def test_phrasing_keeps_quoted_words() -> None:
    rng = random.Random(3)
    texts = {vary(rng, 'Is "{t}" written here?', t="ToTaL") for _ in range(300)}
    assert all('"ToTaL"' in text for text in texts) and len(texts) > 4
    assert off_topic(rng).answer == NOT_SHOWN


@pytest.mark.slow_with(4, 5, 6, 7)
@pytest.mark.parametrize("seed", range(8))
def test_bars_of_a_chart_are_as_long_as_their_values(seed: int, sources: Path) -> None:
    table = {**make_table(random.Random(seed)), "kind": "bar", "numbers": False}
    shown = sketch(random.Random(seed), table, 560, 420)
    assert shown.pixels.shape == (420, 560, 3) and charts.labels_are_shown(table)
    long = 2 if table["lying"] else 3
    scales = [
        (box[long] - box[long - 2]) / value
        for row, series in zip(shown.boxes, table["series"], strict=True)
        for box, value in zip(row, series["values"], strict=True)
    ]
    assert np.allclose(scales, scales[0], rtol=1e-3)
    (low, here), (high, there) = (
        (float(text.strip("$%").replace(",", "").replace("k", "e3")), point[long - 2])
        for text, point in (shown.scale[0], shown.scale[-1])
    )
    at = shown.boxes[0][0][long if table["lying"] else 1]
    found = low + (at - here) / (there - here) * (high - low)
    assert found == pytest.approx(table["series"][0]["values"][0], rel=0.02)


@pytest.mark.parametrize("kind", ["pie", "line", "bar"])
def test_what_a_chart_shows_is_known(kind: str, sources: Path) -> None:
    table = {**make_table(random.Random(2)), "kind": kind, "hole": False, "lying": False}
    table["series"] = table["series"][:1]
    shown = sketch(random.Random(3), table, 900, 500)
    assert len(shown.boxes[0]) == len(table["labels"]) and bool(shown.scale) == (kind != "pie")
    told = "".join(c for _, _, c in shown.characters)
    assert table["title"].replace(" ", "") in told and all(text in told for text, _ in shown.scale)
    for x, y, _ in shown.characters:
        around = shown.pixels[round(y) - 9 : round(y) + 9, round(x) - 9 : round(x) + 9]
        assert np.ptp(around.reshape(-1, 3), axis=0).max() > 60


def test_numbers_beside_the_axis_are_found_among_the_texts_of_a_page() -> None:
    at = [("0", 90.0), ("50", 60.0), ("100", 30.0)]
    written = [(text, [(28.0 - 8 * len(text), y), (20.0, y)]) for text, y in at]
    written += [("50", [(70.0, 20.0), (78.0, 20.0)]), ("2019", [(60.0, 99.0), (90.0, 99.0)])]
    scale = _scale_among(written, 1)
    assert [(text, y) for text, (_, y) in scale] == at


def test_questions_about_a_page() -> None:
    elements = [
        {"role": "button", "name": "Save", "box": [10, 10, 60, 30], "state": "disabled"},
        {"role": "checkbox", "name": "Sound", "box": [10, 50, 30, 70], "state": "on"},
        {"role": "input", "name": "City", "box": [10, 90, 90, 110], "value": "Oslo"},
    ]
    asks = screens.ask_about(random.Random(1), elements, Place(0.5, 4, 2), 200)
    clicks = {ask.boxes[0] for ask in asks if ask.kind == "screens click"}
    assert clicks == {(9, 7, 34, 17), (9, 27, 19, 37), (9, 47, 49, 57)}
    assert {a.answer for a in asks if a.kind == "screens field"} == {"Oslo"}
    assert {a.answer for a in asks if a.kind == "screens state"} == {"yes"}


def test_questions_about_a_table(sources: Path) -> None:
    values = 0
    for seed in range(20):
        table = make_table(random.Random(seed))
        shown = {charts.number(v) for s in table["series"] for v in s["values"]}
        for ask in charts.ask_about(random.Random(seed), table, "webcharts", exact=True):
            if ask.kind.startswith("webcharts value"):
                values += 1
                assert ask.answer in shown
    assert values > 20


def test_what_is_absent_is_asked_for_in_the_words_of_what_is_there(sources: Path) -> None:
    """A way to ask that only one of the two had would tell the answer."""
    openings: dict[str, set[str]] = {"absent": set(), "text receipt price": set()}
    for seed in range(60):
        for ask in receipt(random.Random(seed), 500, 400, False)[1]:
            openings.setdefault(ask.kind, set()).add(ask.text.lower().partition(" of ")[0])
    ways = {"what is the price", "price"}
    assert ways <= openings["absent"] and ways <= openings["text receipt price"]
    series = [{"name": "Plan"}, {"name": "Actual"}]
    table = {"title": "Sales in 1999", "labels": ["Oslo", "Rome", "Paris"], "series": series}
    asks = [charts._absent(random.Random(seed), table) for seed in range(60)]
    said = {ask.answer.removeprefix("There is no ") for ask in asks}
    asks += [absent_object(random.Random(seed)) for seed in range(60)]
    for ask in (ask for ask in asks if ask.answer.startswith("There is no ")):
        named = ask.answer.removeprefix("There is no ").rstrip(".")  # perhaps with a typing error
        assert not Counter(named.lower()) - Counter(ask.text.lower())
    assert "Berlin." in said and not said & {"Oslo.", "Rome.", "Paris.", "Plan.", "Actual."}


def test_a_value_is_rounded_as_it_can_be_read() -> None:
    exact, read = (6078, 87, 0.5, 1.03, 11.9, 2.13, 0), [6100, 87, 0.5, 1.04, 12, 2.15, 0]
    assert [charts.readable(v) for v in exact] == read
    assert all(abs(charts.readable(v) - v) <= 0.0126 * v for v in range(1, 3000))
