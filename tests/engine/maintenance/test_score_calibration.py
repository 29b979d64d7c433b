"""Fitting a calibration of scores: curves, errors, judging by labels, labelled images, the file."""

import json
import math
import random
from pathlib import Path

import pytest

from kestrel_engine import ConfigError
from kestrel_engine.building.files import read_calibration
from kestrel_engine.maintenance import read_labelled_images
from kestrel_engine.maintenance.scores.fit import calibration_error, fit
from kestrel_engine.maintenance.scores.judged_results import judge
from kestrel_engine.maintenance.scores.labelled_images import Question
from kestrel_engine.types.calibration import (
    FILE_NAME,
    UNCALIBRATED,
    Calibration,
    Curve,
    from_text,
    to_text,
)

CURVE = Curve((0.25, 0.5, 1.0), (0.125, 0.5, 0.75))


def results(count, seed):
    """Raw scores whose share of correct results is their third power."""
    rng = random.Random(seed)
    drawn = [rng.random() for _ in range(count)]
    return [(raw, rng.random() < raw**3) for raw in drawn]


def test_a_fitted_curve_makes_scores_shares_of_correct_results():
    curve = fit(results(6000, 1))
    held_out = results(6000, 2)
    assert calibration_error(held_out) > 0.2
    assert calibration_error([(curve(raw), correct) for raw, correct in held_out]) < 0.02
    values = [curve(raw / 100) for raw in range(101)]
    assert values == sorted(values) and values[0] == 0 and values[-1] <= 1


@pytest.mark.parametrize(
    ("given", "at_half"),
    [([(0.5, True)], 1.0), ([(0.5, False)] * 3, 0.0), ([(0.0, True), (1.0, False)], 0.5)],
)
def test_few_results_give_a_curve_too(given, at_half):
    curve = fit(given)
    assert 0 <= curve(0) <= curve(0.5) <= curve(1) <= 1
    assert curve(0.5) == pytest.approx(at_half)


def test_the_error_is_the_mean_difference_weighted_by_count():
    judged = [(0.91, True), (0.93, True), (0.95, False), (0.95, True), (0.1, False)]
    high = abs((0.91 + 0.93 + 0.95 + 0.95) / 4 - 0.75)
    assert calibration_error(judged, bins=5) == pytest.approx((4 * high + 0.1) / 5)
    assert calibration_error([]) == 0 and calibration_error([(1.0, True)]) == 0


def test_a_curve_is_straight_between_its_points():
    expected = {0.0: 0.125, 0.25: 0.125, 0.375: 0.3125, 0.5: 0.5, 0.75: 0.625, 1.0: 0.75}
    assert {raw: CURVE(raw) for raw in expected} == expected
    calibration = Calibration({"detect": CURVE})
    assert calibration.score("detect", 0.5) == 0.5 and calibration.score("point", 0.5) == 0.5
    assert calibration.score("detect", 1.0) == 0.75 and calibration.score("point", 1.0) == 1.0


def test_a_file_keeps_the_curves(tmp_path):
    calibration = Calibration({"detect": CURVE, "absence": CURVE})
    path = tmp_path / FILE_NAME
    path.write_text(to_text(calibration, "f", {"images": 3}))
    weights = [tmp_path / "model.safetensors"]
    assert read_calibration("auto", weights, "f") == calibration
    assert read_calibration(path, [], "f") == calibration
    assert read_calibration("off", weights, "f") is UNCALIBRATED
    assert read_calibration("auto", [], "f") is UNCALIBRATED
    path.unlink()
    assert read_calibration("auto", weights, "f") is UNCALIBRATED
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(path, weights, "f")


GOOD = json.loads(to_text(Calibration({"detect": CURVE}), "f", {}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, 'needs "format": 1'),
        ({"weights": "g"}, "is for weights 'g'"),
        ({"curves": []}, "must hold curves of"),
        ({"curves": {"query": [[0, 0]]}}, "must hold curves of"),
        ({"curves": {"detect": []}}, "detect: needs 1 to"),
        ({"curves": {"detect": [[0, 0], [0, 1]]}}, "raw must rise"),
        ({"curves": {"detect": [[0, 1], [1, 0]]}}, "must not fall"),
        ({"curves": {"detect": [[0, 0], [1, 2]]}}, "in [0, 1]"),
        ({"curves": {"detect": [[0, math.nan]]}}, "in [0, 1]"),
        ({"curves": {"detect": [[0, "1"]]}}, "in [0, 1]"),
        ({"curves": {"detect": [[0]]}}, "needs 1 to"),
        ({"curves": {"detect": [[n / 2000, 0] for n in range(1001)]}}, "needs 1 to 1000"),
    ],
)
def test_an_invalid_file_is_refused_with_its_place(change, words):
    with pytest.raises(ConfigError) as caught:
        from_text(json.dumps(GOOD | change), "here.json", "f")
    assert caught.value.field == "calibration"
    assert words in str(caught.value) and "here.json" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_another_file_is_refused(text):
    with pytest.raises(ConfigError):
        from_text(text, "here.json", "f")


def box(x_min, y_min, x_max, y_max, score):
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max, "score": score}


def test_boxes_are_correct_if_they_overlap_an_object_of_their_own():
    truth = [(0.0, 0.0, 0.5, 0.5)]
    found = [box(0, 0, 0.5, 0.4, 0.3), box(0, 0, 0.5, 0.5, 0.9), box(0.3, 0, 0.8, 0.5, 0.6)]
    assert judge(found, truth) == [(0.9, True), (0.6, False), (0.3, False)]
    assert judge(found[:1], truth) == [(0.3, True)] and judge(found[:1], []) == [(0.3, False)]
    assert judge([], truth) == []


def test_points_are_correct_inside_an_object_of_their_own():
    truth = [(0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0)]
    found = [
        {"x": 0.1, "y": 0.1, "score": 0.5},
        {"x": 0.2, "y": 0.2, "score": 0.4},
        {"x": 0.9, "y": 0.9, "score": 0.8},
        {"x": 0.9, "y": 0.1, "score": 0.7},
    ]
    assert judge(found, truth) == [(0.8, True), (0.7, False), (0.5, True), (0.4, False)]


COCO = {
    "images": [
        {"id": 1, "file_name": "a.jpg", "width": 200, "height": 100, "neg_category_ids": [2]},
        {"id": 2, "file_name": "b.jpg", "width": 10, "height": 10},
    ],
    "annotations": [
        {"image_id": 1, "category_id": 1, "bbox": [20, 10, 100, 50]},
        {"image_id": 1, "category_id": 3, "bbox": [0, 0, 200, 100], "iscrowd": 1},
    ],
    "categories": [{"id": n, "name": name} for n, name in enumerate(("cat", "dog", "sheep"), 1)],
}


def labelled(folder: Path, **change):
    (folder / "labels.json").write_text(json.dumps(COCO | change))
    for name in ("a.jpg", "b.jpg"):
        (folder / name).touch()
    return read_labelled_images(folder / "labels.json", folder)


def test_labels_become_questions(tmp_path):
    first, second = labelled(tmp_path)
    assert first.path == tmp_path / "a.jpg"
    assert first.questions == (Question("cat", ((0.1, 0.1, 0.6, 0.6),)), Question("dog", ()))
    (absent,) = second.questions
    assert absent.name in ("cat", "dog", "sheep") and absent.boxes == ()
    many = read_labelled_images(tmp_path / "labels.json", tmp_path, absent=9)
    assert [len(image.questions) for image in many] == [2, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": [{}]}, "id must be"),
        ({"images": [{"id": 1, "file_name": "a.jpg"}]}, "has no width and height"),
        ({"images": [{**COCO["images"][0], "file_name": "c.jpg"}]}, "no file 'c.jpg'"),
    ],
)
def test_invalid_labels_are_refused(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        labelled(tmp_path, **change)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_without_labels_is_refused(tmp_path, text):
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(ConfigError):
        read_labelled_images(tmp_path / "labels.json", tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_labelled_images(tmp_path / "other.json", tmp_path)
