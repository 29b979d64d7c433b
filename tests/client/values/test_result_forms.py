"""Results in notebooks, as sequences, and in the forms of other tools."""

import dataclasses
import io
import json
import sys
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from kestrel_client import (
    Box,
    CaptionResult,
    CaptionTask,
    DetectedBox,
    DetectedPoint,
    DetectResult,
    DetectTask,
    Embedding,
    EmbedResult,
    ImageSize,
    MissingDependencyError,
    NotFoundError,
    ObjectSearch,
    QueryResult,
    SegmentResult,
    SkillResult,
    Timings,
    Usage,
)
from kestrel_client.commands.requests.output import print_result
from tests.client.drawing.test_drawing import CIRCLE, COLOURS, answer, made, outlined, pointed

BOXES = (DetectedBox(0.25, 0.5, 0.5, 1, "cat", 0.75), DetectedBox(0, 0, 1, 0.5, "dog", 0.5))
NAMES = tuple(ObjectSearch(object=name, absence=0.25) for name in ("dog", "cow", "cat"))
FOUND = made(DetectResult, objects=BOXES, searches=NAMES)
NONE = made(DetectResult, objects=(), searches=NAMES)


def test_a_notebook_shows_what_was_found() -> None:
    shown = FOUND._repr_png_()
    with Image.open(io.BytesIO(shown)) as image:
        assert image.size == (400, 200)
        assert image.convert("RGB").getpixel((100, 190)) == COLOURS[0]
    large = dataclasses.replace(pointed("x", (0, 0)), source=Image.new("L", (2000, 10)))
    with Image.open(io.BytesIO(large._repr_png_())) as image:
        assert image.size == (800, 4)
    for nothing in (
        NONE,
        dataclasses.replace(FOUND, source=None),
        dataclasses.replace(FOUND, source=b"no image"),
    ):
        assert nothing._repr_png_() is None


def test_commands_print_the_pixel_in_which_a_point_is(capsys) -> None:
    print_result(pointed("x", (0.749, 1)))
    assert capsys.readouterr().out.startswith("0.7490 1.0000  (299, 199 px)  score ")


def test_results_are_sequences_with_short_words() -> None:
    assert list(FOUND) == list(BOXES) and len(FOUND) == 2
    assert repr(FOUND) == "DetectResult(1 x 'dog', 0 x 'cow', 1 x 'cat' 0.50 to 0.75, m, stop)"
    points = pointed("x", (0, 1))
    assert [*points] == [DetectedPoint(0, 1, "x", 1)]
    assert repr(points) == "PointResult(1 x 'x' 1.00, m, stop)"
    assert repr(points.points[0]) == "DetectedPoint(x=0, y=1, label='x', score=1.000)"
    assert repr(NONE) == "DetectResult(0 x 'dog', 0 x 'cow', 0 x 'cat', m, stop)"
    answered = made(QueryResult, question="why?", answers=(answer("word " * 99),))
    assert str(answered) == answered.answer and len(repr(answered)) < 160
    assert str(made(CaptionResult, captions=(answer("a dog"),))) == "a dog"
    box = Box(0, 0, 1, 1)
    embedding = Embedding(bytes(4096), 1, 1024, "float32", box)
    shown = f"Embedding(1 x 1024 float32, {box})"
    assert repr(embedding) == shown
    embedded = EmbedResult(
        embeddings=(embedding, dataclasses.replace(embedding, crop=0)), usage=Usage(), timings=Timings(), model="m",
        request_id="r", image_size=ImageSize(4, 2),
    )  # fmt: skip
    assert repr(embedded) == f"EmbedResult(2 x {shown}, m)"


def test_what_was_searched_for_is_there_by_name() -> None:
    error = NotFoundError(grpc.StatusCode.NOT_FOUND, "gone", reason="R")
    failed = ObjectSearch(object="cow", error=error)
    result = dataclasses.replace(FOUND, searches=(NAMES[0], failed, NAMES[2]))
    assert result.absences == {"dog": 0.25, "cat": 0.25} and result.errors == {"cow": error}
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["searches"][1]["error"] == {"code": "NOT_FOUND", "message": "gone", "reason": "R"}
    assert plain["objects"][1]["label"] == "dog" and plain["objects"][1]["score"] == 0.5


def test_a_skill_by_its_name_has_marks() -> None:
    named = made(
        SkillResult,
        skill="s",
        output={"objects": [{"x_min": 0, "y_min": 0, "x_max": 1, "y_max": 1}]},
    )
    assert named.marks.boxes == ((Box(0, 0, 1, 1), "s"),)


def test_coco() -> None:
    first, second = FOUND.to_coco(image_id=7, category_id=3)
    assert first == {
        "id": 1, "image_id": 7, "category_id": 5, "bbox": [100, 100, 100, 100], "area": 10000, "iscrowd": 0,
        "score": 0.75,
    }  # fmt: skip
    assert second["id"] == 2 and second["bbox"] == [0, 0, 400, 100]
    assert second["category_id"] == 3 and second["score"] == 0.5
    (segment,) = outlined("o", CIRCLE, Box(0.25, 0.25, 0.5, 0.75)).to_coco()
    assert segment["area"] == pytest.approx(np.pi * 50 * 50, rel=0.01)
    (polygon,) = segment["segmentation"]
    assert min(polygon[::2]) == pytest.approx(100) and max(polygon[1::2]) == pytest.approx(
        150, abs=1
    )
    assert made(SegmentResult, segments=()).to_coco() == []


def test_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = FOUND.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["x_min_px"].tolist() == [100, 0] and frame["label"].tolist() == ["cat", "dog"]
    points = pointed("x", (0.5, 1)).to_frame()
    assert points.loc[0, ["x", "x_px", "y_px"]].tolist() == [0.5, 200, 199]
    assert NONE.to_frame().empty and list(NONE.to_frame()) == list(frame)
    assert frame["score"].tolist() == [0.75, 0.5]


def test_supervision() -> None:
    supervision = pytest.importorskip("supervision")
    detections = FOUND.to_supervision()
    assert isinstance(detections, supervision.Detections)
    assert detections.xyxy.tolist() == [[100, 100, 200, 200], [0, 0, 400, 100]]
    assert detections.data["class_name"].tolist() == ["cat", "dog"]
    assert detections.class_id.tolist() == [2, 0]
    assert detections.confidence.tolist() == [0.75, 0.5]
    assert len(NONE.to_supervision()) == 0
    outline = outlined("o", CIRCLE, Box(0.25, 0.25, 0.5, 0.75))
    assert outline.to_supervision().mask.sum() == pytest.approx(np.pi * 50 * 50, rel=0.01)


def test_supervision_has_points_as_key_points() -> None:
    supervision = pytest.importorskip("supervision")
    points = pointed("eye", (0.25, 0.5), (1, 1), score=0.75).to_supervision()
    assert isinstance(points, supervision.KeyPoints)
    assert points.xy.tolist() == [[[100, 100]], [[400, 200]]]
    assert points.keypoint_confidence.tolist() == [[0.75], [0.75]]
    assert points.detection_confidence.tolist() == [0.75, 0.75]
    assert points.data["class_name"].tolist() == ["eye", "eye"]
    image = np.zeros((200, 400, 3), np.uint8)
    drawn = supervision.VertexAnnotator(radius=3).annotate(image.copy(), points)
    assert drawn[100, 100].any() and not drawn[50, 50].any()
    assert len(pointed("eye").to_supervision()) == 0


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
