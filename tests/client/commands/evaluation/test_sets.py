"""Each data set: its own layout as tiny files, the questions and truths of its rows, and the scores of answers."""

import json

import pytest
import pyvips

from kestrel_client import DetectTask
from kestrel_client.commands.evaluation.benchmark import Asking, items_of
from kestrel_client.commands.evaluation.reading import open_records
from kestrel_client.commands.evaluation.scored import score_lines
from kestrel_client.commands.evaluation.sets import NAMES, benchmark
from kestrel_client.commands.parser import CommandError
from kestrel_grpc.settings.flags import SettingsError

SIZE = {"width": 40, "height": 20}


def png(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pyvips.Image.black(40, 20, bands=3).copy(interpretation="srgb")
    image.write_to_file(str(path))


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def items(name, folder, limit=None, **asking):
    chosen = benchmark(name)
    records = open_records(chosen, str(folder), limit)
    return list(items_of(records, chosen, Asking(**asking)))


def cases(name, folder, **asking):
    return [case for item in items(name, folder, **asking) for case in item.cases.values()]


def score(name, case, outcome):
    return benchmark(name).score(case, outcome)


def box(x_min, y_min, x_max, y_max, value=1.0):
    edges = {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}
    return {**edges, "score": value}


@pytest.fixture
def coco(tmp_path):
    for name in ("a.jpg", "b.jpg"):
        png(tmp_path / "val2017" / name)
    annotation = {"iscrowd": 0, "area": 100}
    write(
        tmp_path / "annotations/instances_val2017.json",
        {
            "images": [{"id": i, "file_name": f"{n}.jpg", "width": 40, "height": 20} for i, n in ((3, "a"), (5, "b"))],
            "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}, {"id": 4, "name": "cow"}],
            "annotations": [
                {"id": 1, "image_id": 3, "category_id": 1, "bbox": [0, 0, 10, 10], **annotation},
                {"id": 2, "image_id": 3, "category_id": 1, "bbox": [20, 0, 10, 10], **annotation},
                {"id": 3, "image_id": 5, "category_id": 2, "bbox": [0, 0, 20, 20], **annotation, "area": 400},
                {"id": 4, "image_id": 5, "category_id": 1, "bbox": [0, 0, 20, 20], "area": 400, "iscrowd": 1},
            ],
        },
    )  # fmt: skip
    return tmp_path


def test_coco(coco):
    pytest.importorskip("faster_coco_eval")
    chosen = benchmark("coco")
    found = {item.identity: item for item in items("coco", coco)}
    names = [[case.question for case in item.cases.values()] for item in found.values()]
    assert names == [["dog"], ["cat"]]  # Nobody asks for a name of which there are crowds only.
    dogs = [box(0, 0, 0.25, 0.5, 0.9), box(0.8, 0.8, 1, 1, 0.5)]
    lines = [
        {"image": "val2017/a.jpg", "row": 1, "tasks": {"0": {"objects": dogs, "image_size": SIZE}}},
        {"image": "val2017/b.jpg", "row": 2,
         "tasks": {"0": {"objects": [box(0, 0, 0.5, 1)], "image_size": SIZE}}},
    ]  # fmt: skip
    answered = list(score_lines(lines, found, chosen))
    assert [each.scored.value for each in answered] == [0.5, 1.0]
    values = chosen.whole(answered).values
    # Of two dogs one is found, and a wrong box has a lower score: the precision is 1 up to a recall of 0.5.
    assert values["AP50"] == pytest.approx((51 / 101 + 1) / 2)
    assert values["AP"] == pytest.approx(values["AP50"])


def test_average_precision_of_a_false_positive_with_the_best_score(coco):
    """By hand: a wrong dog with the best score halves the precision; the cat is missed."""
    pytest.importorskip("faster_coco_eval")
    chosen = benchmark("coco")
    found = {item.identity: item for item in items("coco", coco)}
    dogs = [box(0.8, 0.8, 1, 1, 0.95), box(0, 0, 0.25, 0.5, 0.9), box(0.5, 0, 0.75, 0.5, 0.8)]
    lines = [
        {"image": "val2017/a.jpg", "row": 1, "tasks": {"0": {"objects": dogs, "image_size": SIZE}}},
        {"image": "val2017/b.jpg", "row": 2, "tasks": {"0": {"objects": [], "image_size": SIZE}}},
    ]
    values = chosen.whole(list(score_lines(lines, found, chosen))).values
    # After the wrong box: precision 1/2 at recall 1/2, 2/3 at recall 1. COCO takes the best precision at or beyond each
    # recall, 2/3 everywhere. The cat's AP is 0, and the mean is over both names.
    assert values["AP50"] == pytest.approx((2 / 3 + 0) / 2)
    assert values["AP small"] == pytest.approx(
        (2 / 3 + 0) / 2
    )  # Both have fewer than 32 x 32 pixels.
    assert "AP medium" not in values and "AP large" not in values


def test_coco_asks_for_absent_names_the_same_way_in_every_run(coco):
    first, second = (items("coco", coco, absent=2) for _ in range(2))
    asked = [[case.question for case in item.cases.values()] for item in first]
    assert asked == [["dog", "cat", "cow"], ["cat", "cow"]]
    assert [[*item.cases] for item in second] == [["0", "1", "2"], ["0", "1"]]
    absent = first[0].cases["1"]
    assert isinstance(absent.task, DetectTask)
    nothing = score("coco", absent, {"objects": [], "image_size": SIZE})
    assert nothing.value == 1 and nothing.counts["absent: nothing found"] == (1, 1)
    assert score("coco", absent, {"objects": [box(0, 0, 1, 1)], "image_size": SIZE}).value == 0
    assert score("coco", absent, None).value == 0


def test_coco_boxes_are_in_the_size_that_the_file_gives(tmp_path):
    """Also if the image file has another one."""
    png(tmp_path / "i.png")
    objects = [{"bbox": [0, 0, 100, 100], "label": "dog"}]
    row = {
        "image": "i.png",
        "objects": objects,
        "width": 200,
        "height": 100,
        "absent": ["cat", "dog"],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (dog, cat) = cases("coco", tmp_path, absent=9)
    assert cat.question == "cat"
    assert score("coco", dog, {"objects": [box(0, 0, 0.5, 1)], "image_size": SIZE}).value == 1


def test_rows_with_more_names_than_a_call_takes_become_several_items(tmp_path):
    png(tmp_path / "i.png")
    objects = [{"bbox": [0, 0, 5, 5], "label": "person"}]
    others = [f"name {number}" for number in range(90)]
    write(tmp_path / "rows.jsonl", {"image": "i.png", "objects": objects, "absent": others})
    found = items("coco", tmp_path, absent=79)
    assert [len(item.cases) for item in found] == [32, 32, 16]
    assert len({item.identity for item in found}) == 3
    assert found[0].cases["0"].question == "person" and "79" in found[2].cases
    asked = {case.question for item in found for case in item.cases.values()}
    assert len(asked) == 80 and asked - {"person"} < {*others}


def annotated(**fields):
    """The file's annotations: one, with these fields."""
    return {"annotations": [{"image_id": 3, "category_id": 1, "bbox": [1, 2, 3, 4], **fields}]}


def query(text):
    return {"image": "c.png", "requests": [{"skill": "query", "text": text, "answer": "1"}]}


def image(**fields):
    return {"images": [{"id": 3, "file_name": "a.jpg", **fields}]}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (annotated(category_id=[1]), "not in the layout of COCO"),
        (annotated(category_id=9), "unknown category_id 9"),
        (annotated(bbox=[1, 2, 3]), "row 1: bbox is '.1, 2, 3.', needs 4"),
        (annotated(bbox=[1, 2, -3, 4]), "bbox is .* needs a width and a height of at least 0"),
        (annotated(bbox=[1, 2, 3, 10**400]), "bbox is .* needs 4 numbers"),
        (annotated(area="x"), "area is 'x', needs a number of at least 0"),
        (annotated(area=-1), "area is '-1'"),
        (annotated(area=float("nan")), "area is 'nan'"),
        (image(width=10**400, height=1), "width is .* needs a number of at least 1"),
        (image(file_name="/etc/passwd"), "an image outside of it"),
        (image(file_name="../val2017/a.jpg"), "an image outside of it"),
        (image(file_name=7), "names no image, but 7"),
        ({"categories": None}, "'categories' of .* must be a list of objects"),
    ],
)
def test_errors_of_a_file_in_the_layout_of_a_set(coco, change, text):
    file = coco / "annotations/instances_val2017.json"
    write(file, json.loads(file.read_text()) | change)
    with pytest.raises(CommandError, match=text):
        items("coco", coco)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"requests": []}], "row 1 has no image in the column 'image'"),
        ([{"image": "gone.png", "requests": []}], "row 1: there is no image"),
        ([{"image": "c.png", "label": "1"}], "row 1 has no column 'requests'; its columns are label"),
        ([{"image": "c.png", "requests": ["x"]}], "requests is .* needs a list of objects"),
        ([query("  ")], "text is '  ', needs a text"),
        ([query("\ud800")], "text is .*ud800', needs a text"),
        (["text"], "row 1 is not an object"),
    ],
)  # fmt: skip
def test_errors_name_the_row_and_the_column(tmp_path, rows, text):
    png(tmp_path / "c.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(CommandError, match=text):
        items("charts", tmp_path)


def test_results_of_another_question_are_not_scored(tmp_path):
    png(tmp_path / "c.png")
    write(tmp_path / "rows.jsonl", query("How many?"))
    found = {item.identity: item for item in items("charts", tmp_path)}
    task = {"question": "Another?", "answer": "1"}
    with pytest.raises(CommandError, match="answers another question than 'How many"):
        list(
            score_lines(
                [{"image": "c.png", "row": 1, "tasks": {"0": task}}], found, benchmark("charts")
            )
        )


def test_errors_of_places(tmp_path):
    for name, place, text in (
        ("charts", tmp_path / "no", "there is no file or folder"),
        ("charts", tmp_path, "no file of rows"),
    ):
        with pytest.raises(CommandError, match=text):
            items(name, place)
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(CommandError, match=r"must end with .jsonl"):
        items("charts", tmp_path / "x.csv")
    (tmp_path / "rows.jsonl").write_bytes(b"\xff")
    with pytest.raises(CommandError, match="is not UTF-8"):
        items("charts", tmp_path)
    (tmp_path / "rows.jsonl").write_text("{")
    with pytest.raises(CommandError, match="row 1 is not JSON"):
        items("charts", tmp_path)
    image = {"id": 1, "file_name": "gone.png"}
    write(tmp_path / "annotations.json", {"images": [image], "annotations": [], "categories": []})
    with pytest.raises(CommandError, match=r"there is no image 'gone.png' in"):
        items("coco", tmp_path)
    with pytest.raises(SettingsError, match="did you mean screens"):
        benchmark("screns")
    assert all(benchmark(name).name == name for name in NAMES)
