"""ObjectTracker and to_supervision(), in an environment of their own with the packages trackers and supervision."""

from pathlib import Path

import pytest

from tests.environments import printed, python_with

CLIENT = Path(__file__).parents[3] / "clients/python"
MADE = """
from kestrel_client import (
    Box, DetectedBox, DetectedPoint, DetectResult, ObjectSearch, ObjectTracker, PointResult, Segment, SegmentResult
)
from kestrel_client.geometry import ImageSize
import dataclasses

def made(kind, **given):
    fields = {f.name: None for f in dataclasses.fields(kind) if f.init}
    searches = (ObjectSearch(object="cat"),)
    return kind(**{**fields, "searches": searches, "image_size": ImageSize(400, 200), **given})
"""
TRACKED = """
def found(*lefts):
    boxes = tuple(DetectedBox(x, 0.2, x + 0.2, 0.6, "cat", 0.9) for x in lefts)
    return made(DetectResult, objects=boxes)

tracker = ObjectTracker()
seen = [tracker.update(found(0.1 + 0.01 * n, 0.7 - 0.01 * n)) for n in range(8)]
swapped = tracker.update(found(0.62, 0.18))
assert len(set(seen[-1])) == 2 and None not in seen[-1], seen
assert seen[-2] == seen[-1], seen
assert swapped == seen[-1][::-1], (swapped, seen)
assert tracker.update(found()) == ()
"""
DETECTIONS = """
import supervision
import supervision.metrics

boxes = (DetectedBox(0.25, 0.5, 0.5, 1, "cat", 0.75), DetectedBox(0, 0, 1, 0.5, "cat", 0.5))
found = made(DetectResult, objects=boxes).to_supervision()
assert isinstance(found, supervision.Detections)
assert found.xyxy.tolist() == [[100, 100, 200, 200], [0, 0, 400, 100]]
assert found.confidence.tolist() == [0.75, 0.5]
assert found.data["class_name"].tolist() == ["cat", "cat"]
assert found[found.confidence > 0.6].xyxy.tolist() == [[100, 100, 200, 200]]
precision = supervision.metrics.MeanAveragePrecision().update(found, found).compute()
assert precision.map50_95 == 1, precision.map50_95

assert len(made(DetectResult, objects=()).to_supervision()) == 0

points = made(PointResult, points=(DetectedPoint(0.25, 0.5, "cat", 0.75),)).to_supervision()
assert points.xy.tolist() == [[[100, 100]]], points.xy
assert points.keypoint_confidence.tolist() == [[0.75]], points

box = Box(0.25, 0.25, 0.5, 0.75)
segment = Segment(label="cat", score=0.5, box=box, svg_path="M 0 0 L 1 0 1 1 0 1 z")
outline = made(SegmentResult, segments=(segment,)).to_supervision()
assert outline.xyxy.tolist() == [[100, 50, 200, 150]]
assert outline.mask.shape == (1, 200, 400) and outline.mask.sum() == 100 * 100
assert outline.mask[0, 50:150, 100:200].all()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = ("trackers>=2.6", "supervision>=0.29,<1", str(CLIENT))
    return python_with(tmp_path_factory.mktemp("packages"), *packages)


@pytest.mark.slow
@pytest.mark.parametrize("program", [TRACKED, DETECTIONS], ids=["tracked", "detections"])
def test_with_the_real_packages(python: Path, program: str) -> None:
    printed(python, "-c", MADE + program)
