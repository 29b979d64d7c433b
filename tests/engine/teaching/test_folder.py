"""Folders of labelled images: what is read, and what is refused by line and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from kestrel_engine import ConfigError
from kestrel_engine.teaching import read_folder
from kestrel_engine.teaching.data.examples import BoxExample, PointExample, QuestionExample
from tests.code_blocks import ROOT, code_blocks


def folder_of(tmp_path: Path, *lines: Any, images: tuple[str, ...] = ("a.png",)) -> Path:
    for name in images:
        (tmp_path / name).touch()
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "data.jsonl").write_text(text)
    return tmp_path


def test_the_lines_of_the_page_are_read(tmp_path: Path) -> None:
    (block,) = [
        b for b in code_blocks(ROOT / "docs/use/teaching.md") if b.text.startswith('{"image"')
    ]
    lines = block.text.splitlines()
    names = tuple({json.loads(line)["image"] for line in lines})
    images = read_folder(folder_of(tmp_path, *lines, images=names))
    kinds = {type(example) for image in images for example in image.examples}
    assert kinds == {QuestionExample, PointExample, BoxExample}
    assert sum(len(image.examples) for image in images) == len(lines)


def test_examples_are_collected_by_image_and_objects_ordered_from_left_to_right(
    tmp_path: Path,
) -> None:
    folder = folder_of(
        tmp_path,
        {"image": "a.png", "object": "nut", "points": [[0.9, 0.1], [0.2, 0.5], [0.2, 0.4]]},
        "",
        {"image": "b.png", "question": " How many? ", "answer": "three\n"},
        {"image": "./a.png", "object": "nut", "boxes": [[0.5, 0, 1, 1], [0, 0, 0.5, 1]]},
        images=("a.png", "b.png"),
    )
    first, second = read_folder(folder)
    assert first.examples == (
        PointExample("nut", ((0.2, 0.4), (0.2, 0.5), (0.9, 0.1))),
        BoxExample("nut", ((0, 0, 0.5, 1), (0.5, 0, 1, 1))),
    )
    assert second.examples == (QuestionExample("How many?", "three"),)


GOOD: dict[str, Any] = {"image": "a.png", "question": "Is it?", "answer": "yes"}
POINTS: dict[str, Any] = {"image": "a.png", "object": "nut", "points": [[0.5, 0.5]]}
BOXES: dict[str, Any] = {"image": "a.png", "object": "nut", "boxes": [[0, 0, 1, 1]]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be an object"),
        ({"image": "a.png"}, "has the fields 'image'; expected"),
        ({**GOOD, "points": []}, "has the fields"),
        ({**GOOD, "answer": 3}, "answer must be a text"),
        ({**GOOD, "answer": "  "}, "answer must be a text that is not empty"),
        ({**GOOD, "question": "x" * 40_000}, "question has 40000 UTF-8 bytes, the limit is 32767"),
        (r'{"image": "a.png", "question": "\ud800", "answer": "yes"}', "question is not valid"),
        ({**GOOD, "image": "../b.png"}, "must be a file within the folder"),
        ({**GOOD, "image": "/etc/passwd"}, "must be a file within the folder"),
        ({**GOOD, "image": "out.png"}, "must be a file within the folder"),
        ({**GOOD, "image": "a\0.png"}, "must be a file within the folder"),
        ({**GOOD, "image": "none.png"}, "is not a file of the folder"),
        ({**GOOD, "image": "."}, "is not a file of the folder"),
        ({**POINTS, "points": {}}, "points must be a list"),
        ({**POINTS, "points": [[0.5]]}, r"points\[0\] must be \[x, y\]"),
        ({**POINTS, "points": [[0, 0], [0.5, 1.5]]}, r"points\[1\]: 1.5 is not a number in \[0, 1"),
        ({**POINTS, "points": [[True, 0]]}, r"points\[0\]: True is not a number"),
        ({**POINTS, "points": [[0, 0]] * 151}, "points has 151 entries, the limit is 150"),
        ('{"image": "a.png", "object": "nut", "points": [[NaN, 0]]}', "nan is not a number"),
        ({**BOXES, "boxes": [[0, 0, 0, 1]]}, "needs x_min < x_max"),
        ({**BOXES, "object": ""}, "object must be a text that is not empty"),
        (" " * (1 << 20) + "x", "has more than 1048576 bytes"),
    ],
)
def test_an_error_names_line_and_field(tmp_path: Path, line: Any, message: str) -> None:
    (tmp_path / "out.png").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=f"data='data.jsonl line 2': .*{message}"):
        read_folder(folder_of(tmp_path, GOOD, line))


def test_a_folder_without_labels_and_one_with_two_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has neither data\.jsonl nor annotations"):
        read_folder(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no example"):
        read_folder(folder_of(tmp_path, ""))
    (tmp_path / "annotations.json").touch()
    with pytest.raises(ConfigError, match="has both"):
        read_folder(tmp_path)


COCO: dict[str, Any] = {
    "categories": [{"id": 1, "name": "nut"}, {"id": 2, "name": "bolt"}],
    "images": [
        {"id": 7, "file_name": "a.png", "width": 200, "height": 100, "neg_category_ids": [2]}
    ],
    "annotations": [
        {"image_id": 7, "category_id": 1, "bbox": [100, 0, 150, 50]},
        {"image_id": 7, "category_id": 1, "bbox": [0, 0, 50, 50]},
    ],
}


def test_boxes_of_coco_become_fractions_and_absent_categories_empty_examples(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "annotations.json").write_text(json.dumps(COCO))
    (image,) = read_folder(tmp_path)
    assert image.examples == (
        BoxExample("nut", ((0.0, 0.0, 0.25, 0.5), (0.5, 0.0, 1.0, 0.5))),
        BoxExample("bolt", ()),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": 3}, "images must be a list of objects"),
        (
            {"categories": [{"id": [], "name": "nut"}]},
            r"categories\[0\].*id must be a whole number",
        ),
        ({"categories": [{"id": 1, "name": ""}]}, r"categories\[0\].*name must be a text"),
        ({"images": COCO["images"] * 2}, r"images\[1\].*id 7 occurs twice"),
        ({"annotations": [{"image_id": 9}]}, r"annotations\[0\].*image_id '9' is the id of no"),
        (
            {"annotations": [{**COCO["annotations"][0], "bbox": [1, 2, 3]}]},
            r"annotations\[0\].*bbox must have 4 numbers",
        ),
        (
            {"annotations": [{**COCO["annotations"][0], "bbox": [300, 0, 9, 9]}]},
            r"annotations\[0\].*has no area within the image",
        ),
    ],
)
def test_an_error_of_coco_names_entry_and_field(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "annotations.json").write_text(json.dumps({**COCO, **changed}))
    with pytest.raises(ConfigError, match=message):
        read_folder(tmp_path)
