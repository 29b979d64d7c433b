"""Results in notebooks, as sequences, and in the forms of other tools."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel_client import (
    Box,
    CaptionResult,
    CaptionTask,
    DetectResult,
    DetectTask,
    InvalidImageError,
    MissingDependencyError,
    Point,
    PointResult,
    QueryResult,
    SegmentResult,
    SkillResult,
)
from tests.client.drawing.test_drawing import CIRCLE, COLOURS, made

BOXES = (Box(0.25, 0.5, 0.5, 1), Box(0, 0, 1, 0.5))
FOUND = made(DetectResult, object="cat", objects=BOXES)
SCORED = made(
    DetectResult, object="cat", objects=(Box(0.25, 0.5, 0.5, 1, 0.75), Box(0, 0, 1, 0.5, 0.5))
)


def test_a_notebook_shows_what_was_found() -> None:
    shown = FOUND._repr_png_()
    with Image.open(io.BytesIO(shown)) as image:
        assert image.size == (400, 200)
        assert image.convert("RGB").getpixel((100, 190)) == COLOURS[0]
    large = made(PointResult, object="x", points=(Point(0, 0),), source=Image.new("L", (2000, 10)))
    with Image.open(io.BytesIO(large._repr_png_())) as image:
        assert image.size == (800, 4)
    for nothing in (
        made(DetectResult, object="cat", objects=()),
        made(DetectResult, object="cat", objects=BOXES, source=None),
        made(DetectResult, object="cat", objects=BOXES, source=b"no image"),
    ):
        assert nothing._repr_png_() is None


def test_results_are_sequences_with_short_words() -> None:
    assert list(FOUND) == list(BOXES) and len(FOUND) == 2
    assert repr(FOUND) == "DetectResult(2 x 'cat', m, stop)"
    points = made(PointResult, object="x", points=(Point(0, 1),))
    assert [*points] == [Point(0, 1)] and repr(points) == "PointResult(1 x 'x', m, stop)"
    assert repr(SCORED) == "DetectResult(2 x 'cat' 0.50 to 0.75, m, stop)"
    assert repr(Point(0, 1)) == "Point(x=0, y=1)"
    assert repr(Point(0, 1, 0.25)) == "Point(x=0, y=1, score=0.250)"
    answer = made(QueryResult, question="why?", answer="word " * 99)
    assert str(answer) == answer.answer and len(repr(answer)) < 160
    assert str(made(CaptionResult, caption="a dog")) == "a dog"
    named = made(
        SkillResult,
        skill="s",
        output={"objects": [{"x_min": 0, "y_min": 0, "x_max": 1, "y_max": 1}]},
    )
    assert named.marks.boxes == ((Box(0, 0, 1, 1), "s"),)


def test_coco() -> None:
    first, second = FOUND.to_coco(image_id=7, category_id=3)
    assert first == {
        "id": 1, "image_id": 7, "category_id": 3, "bbox": [100, 100, 100, 100], "area": 10000, "iscrowd": 0,
    }  # fmt: skip
    assert second["id"] == 2 and second["bbox"] == [0, 0, 400, 100]
    assert "score" not in first and [each["score"] for each in SCORED.to_coco()] == [0.75, 0.5]
    outline = made(SegmentResult, object="o", svg_path=CIRCLE, box=Box(0.25, 0.25, 0.5, 0.75))
    (segment,) = outline.to_coco()
    assert segment["area"] == pytest.approx(np.pi * 50 * 50, rel=0.01)
    (polygon,) = segment["segmentation"]
    assert min(polygon[::2]) == pytest.approx(100) and max(polygon[1::2]) == pytest.approx(
        150, abs=1
    )
    assert made(SegmentResult, object="o", svg_path="", box=None).to_coco() == []
    with pytest.raises(InvalidImageError, match="no image_size"):
        made(DetectResult, object="cat", objects=BOXES, image_size=None).to_coco()


def test_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = FOUND.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["x_min_px"].tolist() == [100, 0] and frame["object"].tolist() == ["cat", "cat"]
    points = made(PointResult, object="x", points=(Point(0.5, 1),)).to_frame()
    assert points.loc[0, ["x", "x_px", "y_px"]].tolist() == [0.5, 200, 199]
    assert made(DetectResult, object="cat", objects=()).to_frame().empty
    assert SCORED.to_frame()["score"].tolist() == [0.75, 0.5]
    assert points["score"].isna().all()


def test_supervision() -> None:
    supervision = pytest.importorskip("supervision")
    detections = FOUND.to_supervision()
    assert isinstance(detections, supervision.Detections)
    assert detections.xyxy.tolist() == [[100, 100, 200, 200], [0, 0, 400, 100]]
    assert detections.data["class_name"].tolist() == ["cat", "cat"]
    assert detections.confidence is None
    assert SCORED.to_supervision().confidence.tolist() == [0.75, 0.5]
    assert len(made(DetectResult, object="cat", objects=()).to_supervision()) == 0
    outline = made(SegmentResult, object="o", svg_path=CIRCLE, box=Box(0.25, 0.25, 0.5, 0.75))
    assert outline.to_supervision().mask.sum() == pytest.approx(np.pi * 50 * 50, rel=0.01)


def test_supervision_has_points_as_key_points() -> None:
    supervision = pytest.importorskip("supervision")
    places = (Point(0.25, 0.5, 0.75), Point(1, 1, 0.5))
    points = made(PointResult, object="eye", points=places).to_supervision()
    assert isinstance(points, supervision.KeyPoints)
    assert points.xy.tolist() == [[[100, 100]], [[400, 200]]]
    assert points.keypoint_confidence.tolist() == [[0.75], [0.5]]
    assert points.detection_confidence.tolist() == [0.75, 0.5]
    assert points.data["class_name"].tolist() == ["eye", "eye"]
    image = np.zeros((200, 400, 3), np.uint8)
    drawn = supervision.VertexAnnotator(radius=3).annotate(image.copy(), points)
    assert drawn[100, 100].any() and not drawn[50, 50].any()
    unscored = made(PointResult, object="eye", points=(Point(0, 0),)).to_supervision()
    assert unscored.keypoint_confidence is None
    assert len(made(PointResult, object="eye", points=()).to_supervision()) == 0
    with pytest.raises(InvalidImageError, match="no image_size"):
        made(PointResult, object="eye", points=places, image_size=None).to_supervision()


@pytest.mark.parametrize("package", ["pandas", "supervision"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    call = FOUND.to_frame if package == "pandas" else FOUND.to_supervision
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        call()


def test_analyze_gives_results_by_task(client: Any) -> None:
    about, circles = CaptionTask("short"), DetectTask("circle")
    image = Image.new("RGB", (8, 4))
    analysis = client.analyze(image, [about, circles])
    assert isinstance(analysis[about], CaptionResult)
    assert analysis[circles] is analysis[1] is analysis["1"]
    assert list(analysis) == ["0", "1"] and len(analysis) == 2
    assert "2 x 'circle'" in repr(analysis)
    assert analysis.draw().width == 8 and analysis._repr_png_()
    assert "tasks" not in analysis.to_dict()["tasks"]
    with pytest.raises(KeyError):
        analysis[CaptionTask("short")]
