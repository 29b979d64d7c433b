"""clients/tools/fiftyone_kestrel in the real FiftyOne, where a variable names a Python that has it."""

import json
from pathlib import Path

import pytest

from kestrel_client import KestrelClient
from tests.code_blocks import ROOT
from tests.environments import printed, python_named

IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
SOURCE = ROOT / "clients/tools/fiftyone_kestrel"


def test_the_manifest_names_models_that_the_source_loads():
    manifest = json.loads((SOURCE / "manifest.json").read_text())
    names = [model["base_name"] for model in manifest["models"]]
    skills = ("detect", "point", "segment", "caption", "query")
    assert names == [f"kestrel-{skill}" for skill in skills]
    assert all(m["base_filename"] == f"{m['base_name']}.json" for m in manifest["models"])


@pytest.mark.slow
def test_the_models_label_samples(server: str, tmp_path: Path):
    python = python_named("KESTREL_TEST_FIFTYONE", "fiftyone")
    program = ROOT / "tests/tools/with_fiftyone.py"
    variables = {
        "PYTHONPATH": str(ROOT / "clients/python"),
        "FIFTYONE_MODEL_ZOO_DIR": str(tmp_path / "zoo"),
        "FIFTYONE_DO_NOT_TRACK": "true",
    }
    told = printed(python, program, server, IMAGE, tmp_path, **variables)
    said = json.loads(told.splitlines()[-1])
    with KestrelClient(server, timeout=60) as client:
        boxes = client.detect(IMAGE, "green crescent")
        points = client.point(IMAGE, "green crescent")
        outline = client.segment(IMAGE, "green crescent")
        caption = client.caption(IMAGE, "short").caption
        answer = client.query(IMAGE, "How many green crescents are there?").answer
    assert len(said["models"]) == 5
    found = [box for label, box, _ in said["boxes"] if label == "green crescent"]
    assert found == [pytest.approx([b.x_min, b.y_min, b.width, b.height]) for b in boxes]
    assert [c for n, _, c in said["boxes"] if n == "green crescent"] == pytest.approx(
        [box.score for box in boxes]
    )
    (label, places, scores) = said["points"][0]
    assert label == "green crescent" and len(scores) == len(points)
    assert places == [pytest.approx([point.x, point.y]) for point in points]
    mask = outline.to_mask()
    left, top, right, bottom = mask.getbbox()
    width, height = mask.size
    box, pixels, shape = said["mask"]
    assert box == pytest.approx(
        [left / width, top / height, (right - left) / width, (bottom - top) / height], abs=2e-3
    )
    assert pixels == pytest.approx(mask.histogram()[255], rel=0.01)
    assert abs(shape[0] - (bottom - top)) <= 1 and abs(shape[1] - (right - left)) <= 1
    assert said["outlines"][0] == ["green crescent", 1, True, True]
    assert len(said["outline"]) > 2 and all(
        0 <= x <= 1 for corner in said["outline"] for x in corner
    )
    assert (said["caption"], said["answer"]) == (caption, answer)
    assert said["prompted"] == found
    assert len(said["several"]) == 2 and said["several"][1] == [box for _, box, _ in said["boxes"]]
    assert len(said["several"][0]) == len(said["boxes"])  # From pixels, not from the video's file.
    assert 0 < said["sure"] < len(said["boxes"]) and said["refused"] == 3
    assert said["none"] == len(said["boxes"]) - len(found)
