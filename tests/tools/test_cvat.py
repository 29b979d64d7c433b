"""clients/tools/kestrel_cvat.py in the real packages of CVAT."""

import json
from pathlib import Path

import pytest

from kestrel_client import KestrelClient
from tests.code_blocks import ROOT
from tests.environments import printed, python_with

pytestmark = pytest.mark.slow
IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"


def test_cvat_gets_boxes_points_polygons_and_masks(server: str, tmp_path: Path):
    python = python_with(tmp_path, "cvat-cli==2.80.0")
    path = str(ROOT / "clients/python")
    told = printed(python, ROOT / "tests/tools/with_cvat.py", server, IMAGE, PYTHONPATH=path)
    said = json.loads(told.splitlines()[-1])
    with KestrelClient(server, timeout=60) as client:
        boxes = client.detect(IMAGE, "green crescent")
        points = client.point(IMAGE, "green crescent")
        outline = client.segment(IMAGE, "green crescent")
    width, height = boxes.image_size or (0, 0)
    found = [each for each in said["rectangle"] if each[0] == "Moon"]
    assert [kind for _, kind, _ in found] == ["rectangle"] * len(boxes)
    for (_, _, edges), box in zip(found, boxes, strict=True):
        across, down = (box.x_min, box.x_max), (box.y_min, box.y_max)
        assert edges[::2] == pytest.approx([x * width for x in across], abs=0.01)
        assert edges[1::2] == pytest.approx([y * height for y in down], abs=0.01)
    found = [each for each in said["points"] if each[0] == "Moon"]
    for (_, kind, place), point in zip(found, points, strict=True):
        assert kind == "points"
        assert place == pytest.approx([point.x * width, point.y * height], abs=0.01)
    label, kind, corners = said["polygon"][0]
    assert (label, kind) == ("Moon", "polygon") and len(corners) >= 6
    assert 0 <= min(corners) and max(corners[::2]) <= width and max(corners[1::2]) <= height
    drawn = outline.to_mask()
    left, top, right, bottom = drawn.getbbox() or (0, 0, 0, 0)
    kind, edges, pixels = said["mask"]
    assert kind == "mask" and pixels == pytest.approx(drawn.histogram()[255], rel=0.02)
    assert edges == pytest.approx([left, top, right - 1, bottom - 1], abs=1)
    assert said["converted"] == ["polygon"]
    assert len(said["sure"]) < len(said["rectangle"])
    assert said["many"] == 33 and said["refused"] == 3
