"""``kestrel-grpc eval`` with a real server: results, reports, interruptions, errors, and comparisons."""

import asyncio
import json
import os
import sys

import pytest
import pyvips

from kestrel_engine import SkillRegistry
from kestrel_engine.skills.query import QuerySkill
from kestrel_grpc.cli.program import main
from tests.forking.killed import killed_until_done

COUNT = 6


def row(image, question, answer):
    asked = {"skill": "query", "text": question, "answer": answer, "metric": "within 5 %"}
    return {"image": image, "requests": [asked]}


@pytest.fixture
def charts(tmp_path):
    """A folder of rows with a question each."""
    folder = tmp_path / "charts"
    folder.mkdir()
    rows = []
    for number in range(COUNT):
        image = (pyvips.Image.black(40, 30, bands=3) + number).cast("uchar")
        image.copy(interpretation="srgb").pngsave(str(folder / f"{number}.png"))
        rows.append(row(f"{number}.png", f"How much is {number}?", str(number)))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


async def run(served, *words):
    address = served.server.addresses[0]
    arguments = ["eval", *map(str, words), "--quiet", "--server", address]
    return await asyncio.to_thread(main, arguments)


def lines(file):
    with file.open(encoding="utf-8") as opened:  # Answers may hold line separators of Unicode.
        return [json.loads(line) for line in opened]


async def test_reports_and_going_on(serve, charts, tmp_path, capsys):
    served = await serve()
    out = tmp_path / "out"
    words = ["charts", charts, "--output", out]
    assert await run(served, *words, "--limit", 2) == 0
    assert "Charts: 2 images, 2 questions" in capsys.readouterr().out
    # A larger limit goes on with the results that there are.
    assert await run(served, *words, "--limit", -1) == 0
    printed = capsys.readouterr().out
    assert f"Charts: {COUNT} images" in printed and "within 5 %" in printed
    results = lines(out / "results.jsonl")
    assert sorted(line["row"] for line in results) == [*range(1, COUNT + 1)]
    report = json.loads((out / "report.json").read_text())
    assert (report["set"], report["cases"], report["failed"]) == ("charts", COUNT, 0)
    assert report["metrics"][0] | {"value": 0, "interval_95": None} == {
        "group": "all", "metric": "within 5 %", "cases": COUNT, "value": 0, "interval_95": None
    }  # fmt: skip
    assert [
        line["expected"] for line in sorted(lines(out / "scores.jsonl"), key=lambda s: s["row"])
    ] == [*map(str, range(COUNT))]
    # Nothing is left, so no server is needed; other questions do not mix with these.
    steps = len(served.runtime.plans)
    assert await run(served, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out) == report and len(served.runtime.plans) == steps
    assert await run(served, *words, "--prompt", "{question}!") == 1
    assert "holds results of other questions" in capsys.readouterr().err


async def test_an_image_whose_name_is_not_utf_8(serve, charts, tmp_path):
    name, out = os.fsdecode(b"\xff.png"), tmp_path / "out"
    try:
        (charts / "0.png").rename(charts / name)
    except OSError:
        pytest.skip("the file system takes no such name")
    (charts / "rows.jsonl").write_text(json.dumps(row(name, "How much?", "0")))
    served = await serve()
    for _ in range(2):
        assert await run(served, "charts", charts, "--output", out) == 0
    (score,) = lines(out / "scores.jsonl")
    assert score["image"] == name


async def test_a_failed_request_counts_as_wrong_and_can_be_asked_again(
    serve, charts, tmp_path, capsys
):
    served = await serve()
    image = charts / "3.png"
    good = image.read_bytes()
    image.write_bytes(b"no image")
    words = ["charts", charts, "--output", tmp_path / "out"]
    assert await run(served, *words) == 1
    assert "1 failed and count as wrong" in capsys.readouterr().out
    image.write_bytes(good)
    assert await run(served, *words, "--retry-failed") == 0
    assert json.loads((tmp_path / "out/report.json").read_text())["failed"] == 0


async def test_two_runs_side_by_side(serve, charts, tmp_path, capsys):
    served = await serve()
    for name, flags in (("a", []), ("b", ["--prompt", "{question} Shortly.", "--limit", 4])):
        assert await run(served, "charts", charts, "--output", tmp_path / name, *flags) == 0
    capsys.readouterr()
    folders = [str(tmp_path / name) for name in "ab"]
    assert main(["eval", "compare", *folders]) == 0
    printed = capsys.readouterr().out
    assert "4 questions in common" in printed and "2 questions that only one run has" in printed
    assert '"prompt": "{question} Shortly."' in printed and "paired bootstrap" in printed
    assert main(["eval", "compare", *folders, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["metrics"][:1]
    assert found["cases"] == 4 and 0 <= found["bootstrap_p"] <= 1
    for words, text in (
        (["compare", folders[0]], "takes the two folders"),
        (["compare", folders[0], str(tmp_path)], "cannot read"),
    ):
        assert main(["eval", *words]) in (1, 2)
        assert text in capsys.readouterr().err


async def test_what_can_not_be_done_is_said_before_the_first_request(
    serve, charts, tmp_path, capsys
):
    served = await serve(skills=SkillRegistry([QuerySkill()]))
    out = ["--output", tmp_path / "out"]
    rows = tmp_path / "rows.jsonl"
    objects = [{"bbox": [0, 0, 1, 1], "label": "car"}]
    rows.write_text(json.dumps({"image": "charts/0.png", "objects": objects}))
    for words, text in (
        ([], "no data set is given; the sets are coco, scenes"),
        (["chats"], "did you mean charts?"),
        (["chartqa"], "'chartqa' is no longer here; use lmms-eval"),
        (["coco"], "eval coco needs a folder of its data"),
        (["charts", charts, charts], "takes one folder"),
        (["charts", charts, "--prompt", "what?"], "must have {question}"),
        (["charts", charts, "--split", "x"], "unknown flag --split; write rows of your own"),
        (["charts", charts, "--limit", "0"], "whole number from 1"),
        (["coco", rows, *out], "has no skill 'detect', which eval coco needs; its skills are query"),
    ):  # fmt: skip
        try:
            assert await run(served, *words) in (1, 2)
        except SystemExit as ended:
            assert ended.code == 2
        assert text in capsys.readouterr().err
    assert not served.runtime.plans


@pytest.mark.slow
async def test_a_killed_evaluation_loses_and_repeats_nothing(serve, charts, tmp_path):
    served = await serve()
    image = charts / "0.png"
    rows = [row(str(image), f"{n}?", "1") for n in range(300)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kestrel_grpc", "eval", "charts", str(file), "--quiet",
               "--output", str(out), "--server", served.server.addresses[0]]  # fmt: skip
    killed = await killed_until_done(command, out / "results.jsonl", 7, 15)
    assert killed > 7
    assert sorted(line["row"] for line in lines(out / "results.jsonl")) == [*range(1, 301)]
    assert sorted(line["row"] for line in lines(out / "scores.jsonl")) == [*range(1, 301)]
