"""The scenes that measure tiles, and how their answers are counted."""

from collections import Counter

import pytest

from kestrel_grpc.scenes.render import render_scene
from training.small_objects import SMALL_PX, f1, right_boxes, right_points, small_scene


@pytest.mark.parametrize("index", range(3))
def test_scenes_have_small_objects_and_a_large_one(index: int) -> None:
    scene, small, large = small_scene(index)
    assert small_scene(index)[0] == scene
    for phrases, is_small in ((small, True), (large, False)):
        for phrase in phrases:
            for number in phrase.find(scene):
                x0, y0, x1, y1 = scene.shapes[number].box
                assert (max(x1 - x0, y1 - y0) <= SMALL_PX[1] + 1e-6) == is_small
                assert 0 < x0 < x1 < scene.width and 0 < y0 < y1 < scene.height
    assert render_scene(scene).shape == (3, scene.height, scene.width)


def test_only_right_answers_count_and_each_object_once() -> None:
    scene, (phrase, *_), _ = small_scene(0)
    truth = [scene.shapes[number].box for number in phrase.find(scene)]
    boxes = [
        {"x_min": a / scene.width, "y_min": b / scene.height, "x_max": c / scene.width, "y_max": d / scene.height}
        for a, b, c, d in truth
    ]  # fmt: skip
    points = [
        {"x": (box["x_min"] + box["x_max"]) / 2, "y": (box["y_min"] + box["y_max"]) / 2}
        for box in boxes
    ]
    assert right_boxes(truth, boxes, scene) == right_points(truth, points, scene) == len(truth)
    assert right_boxes(truth, boxes * 2, scene) == len(truth)
    moved = [{name: value + 0.1 for name, value in box.items()} for box in boxes]
    assert right_boxes(truth, moved, scene) == 0
    assert f1(Counter(right=1, found=2, true=2)) == 0.5
    assert f1(Counter()) == 0
