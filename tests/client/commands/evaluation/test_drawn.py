"""The built-in sets of drawn pictures: their rows, the scores of answers, a real server, and bad rows."""

from __future__ import annotations

import asyncio
import json

import pytest

from kestrel_client.commands.evaluation.answers import Truth, distance, outline_iou, score
from kestrel_client.commands.evaluation.benchmark import Asking, items_of
from kestrel_client.commands.evaluation.reading import open_records
from kestrel_client.commands.evaluation.sets import DRAWN, benchmark
from kestrel_client.commands.parser import CommandError
from kestrel_grpc.cli.program import main

SQUARE = [(0.2, 0.2), (0.4, 0.2), (0.4, 0.4), (0.2, 0.4)]


def box(x_min, y_min, x_max, y_max):
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


def right(truth):
    """The result that the truth calls for; None where it does not say which point is in the object."""
    boxes = [box(*each) for each in truth.boxes]
    if truth.skill == "query":
        return {"answer": truth.answer}
    if truth.skill == "detect":
        return {"objects": boxes}
    if truth.skill == "segment":
        corners = [(x, y) for line in truth.outlines[:1] for x, y in line]
        path = "M" + " L".join(f"{x} {y}" for x, y in corners) + "z"
        return {"segments": [{"svg_path": path, "box": box(0, 0, 1, 1)}] if boxes else []}
    if truth.outlines:
        return None
    return {"points": [{"x": (a + c) / 2, "y": (b + d) / 2} for a, b, c, d in truth.boxes]}


@pytest.mark.parametrize("name", DRAWN)
def test_the_truths_of_a_built_in_set_have_full_marks(name):
    chosen = benchmark(name)
    records = open_records(chosen, str(chosen.built_in), None)
    cases = [case for item in items_of(records, chosen, Asking()) for case in item.cases.values()]
    assert len(cases) == 210 and {case.truth.skill for case in cases} == {*chosen.skills}
    for case in cases:
        result = right(case.truth)
        assert result is None or chosen.score(case, result).value == pytest.approx(1, abs=1e-3)
        assert chosen.score(case, None).value == 0


@pytest.mark.parametrize(
    ("truth", "result", "value"),
    [
        ({"answer": "Red."}, {"answer": " red "}, 1),
        ({"answer": "1"}, {"answer": "one"}, 0),
        ({"answer": "kitten", "metric": "characters"}, {"answer": "sitting"}, 0.5),
        ({"answer": "ab", "metric": "characters"}, {"answer": "ab" * 10**6}, 0),
        ({"answer": "200", "metric": "within 5 %"}, {"answer": "209"}, 1),
        ({"skill": "point", "boxes": [(0.2, 0.2, 0.4, 0.4)]}, {"points": [{"x": 0.3, "y": 0.3}] * 2}, 2 / 3),
        ({"skill": "point", "boxes": [(0, 0, 1, 1)], "outlines": [SQUARE]}, {"points": [{"x": 0.5, "y": 0.5}]}, 0),
        ({"skill": "point"}, {"points": []}, 1),
        ({"skill": "detect"}, {"objects": [box(0, 0, 1, 1)]}, 0),
        ({"skill": "segment", "boxes": [(0.2, 0.2, 0.4, 0.4)], "outlines": [SQUARE]},
         {"segments": [{"svg_path": "M0 0L1 0 1 1 0 1z", "bbox": box(0.2, 0.2, 0.4, 0.3)}]}, 0.5),
        ({"skill": "segment", "boxes": [(0, 0, 1, 1)]},
         {"segments": [{"svg_path": "", "box": box(0, 0, 1, 1)}]}, 0),
    ],
)  # fmt: skip
def test_scores(truth, result, value):
    found = score(Truth(**{"skill": "query", **truth}), result).value
    assert found == pytest.approx(value, abs=0.01)


def test_distance_is_levenshtein():
    assert (distance("kitten", "sitting"), distance("", "ab"), distance("a", "a")) == (3, 2, 0)
    assert outline_iou([SQUARE], []) == 0


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"skill": "gaze"}, "row 1: skill is 'gaze', needs one of query, point, detect, segment"),
        ({"skill": "query", "text": "q"}, "row 1 has no column 'answer'"),
        ({"skill": "query", "text": "q", "answer": "a", "metric": "bleu"}, "metric is 'bleu', needs one of accuracy"),
        ({"skill": "point", "text": "q", "boxes": [[0, 0, 1]]}, r"boxes is '\[0, 0, 1\]', needs a list of 4 numbers"),
        ({"skill": "point", "text": "q", "boxes": 7}, "boxes is '7', needs a list of 4 numbers"),
        ({"skill": "point", "text": "q", "outlines": [[0] * 7]}, "outlines is .* needs a list of 6 or more, in pairs,"),
        ({"skill": "point", "text": "q", "outlines": [[0] * 6]}, "needs one for each of the 0 boxes, or none"),
        ({"skill": "query", "text": "q", "answer": "a", "refs": [[1]]}, "refs is .* needs a list of 2 or 4 numbers"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path, request_, text):
    (tmp_path / "a.png").touch()
    row = {"image": "a.png", "requests": [request_]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    chosen = benchmark("icons")
    with pytest.raises(CommandError, match=text):
        records = open_records(chosen, str(tmp_path), None)
        list(items_of(records, chosen, Asking()))


async def test_a_server_answers_a_built_in_set(serve, tmp_path, capsys):
    served = await serve()
    words = ["--quiet", "--server", served.server.addresses[0], "--output", str(tmp_path / "out")]

    async def run(*more):
        return await asyncio.to_thread(main, ["eval", "scenes", *more, *words])

    assert await run("--limit", "2", "--skills", "query,detect") == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["data"], report["images"], report["failed"]) == ("built in", 2, 0)
    assert report["whole"]["values"] == {"mean score": 0}
    assert report["questions"]["skills"] == ["query", "detect"]
    assert {metric["group"] for metric in report["metrics"]} == {
        "count",
        "detect",
        "listing",
        "off topic",
    }
    capsys.readouterr()
    for flags, text in (
        (
            ["--skills", "gaze"],
            "eval scenes has no requests of 'gaze'; its skills are query, point",
        ),
    ):
        assert await run(*flags) == 2
        assert text in capsys.readouterr().err
