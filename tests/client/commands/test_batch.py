"""``kestrel-grpc batch``: every image has exactly one result, also if the command or the server is killed."""

import asyncio
import csv
import json
import os
import sys
import time

import pytest
import pyvips

from kestrel_client.commands.batch.journal import Journal
from kestrel_client.commands.batch.rows import file_names, open_rows
from kestrel_client.commands.batch.running import Pace
from kestrel_client.commands.parser import CommandError
from kestrel_grpc.cli.program import main
from tests.forking.killed import killed_until_done

TASKS = ["--detect", "cat", "--caption", "short"]


@pytest.fixture
def images(tmp_path):
    """A folder of 12 small images and a file that is none."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(12):
        image = pyvips.Image.black(40, 30, bands=3) + number
        image.cast("uchar").copy(interpretation="srgb").pngsave(str(folder / f"{number:02}.png"))
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


async def run(served, *words):
    address = served.server.addresses[0]
    arguments = ["batch", *map(str, words), "--quiet", "--server", address]
    return await asyncio.to_thread(main, arguments)


async def test_results_errors_and_exports(serve, images, tmp_path, capsys):
    served = await serve()
    output = tmp_path / "out" / "results.jsonl"
    output.parent.mkdir()
    exports = ["found.csv", "found.parquet", "coco:found.json", "yolo:yolo"]
    flags = [f"--export={kind}{colon}{tmp_path}/{name}"
             for kind, colon, name in (e.rpartition(":") for e in exports)]  # fmt: skip
    words = [images, *TASKS, "--output", output, *flags]
    assert await run(served, *words, "--overlays", tmp_path / "drawn") == 1
    assert "1 failed: INVALID_ARGUMENT" in capsys.readouterr().out
    lines = {line["image"]: line for line in read(output)}
    assert len(lines) == 13
    failed = lines.pop(str(images / "broken.png"))
    assert failed["error"]["reason"] == "IMAGE_FORMAT_UNSUPPORTED"
    for line in lines.values():
        assert (
            line["tasks"]["detect"]["searches"][0]["object"] == "cat"
            and line["tasks"]["caption"]["caption"]
        )
        assert line["image_size"] == {"width": 40, "height": 30}
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "drawn").iterdir()}
    assert len(drawn) == 12
    # The results that are there are drawn the same, without a question to the server.
    again = tmp_path / "again"
    assert await run(served, *words, "--overlays", again) == 1
    assert {path.name: path.read_bytes() for path in again.iterdir()} == drawn
    (again / "03.png").write_bytes(b"mine")
    assert await run(served, *words, "--overlays", again) == 1
    assert (again / "03.png").read_bytes() == b"mine"
    capsys.readouterr()

    boxes = sum(len(line["tasks"]["detect"]["objects"]) for line in lines.values())
    coco = json.loads((tmp_path / "found.json").read_text())
    assert (len(coco["images"]), len(coco["annotations"])) == (12, boxes) and boxes
    assert coco["categories"] == [{"id": 1, "name": "cat"}]
    assert all(0 < a["bbox"][2] <= 40 for a in coco["annotations"])
    labels = (tmp_path / "yolo/labels/03.txt").read_text().split()
    box = lines[str(images / "03.png")]["tasks"]["detect"]["objects"][0]
    assert float(labels[1]) == pytest.approx((box["x_min"] + box["x_max"]) / 2, abs=1e-6)
    assert '0: "cat"' in (tmp_path / "yolo/data.yaml").read_text()
    with (tmp_path / "found.csv").open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert sorted(row["image"] for row in rows if not row["error"]) == sorted(lines)
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "found.parquet")
    assert parquet.num_rows == 13 and "caption" in parquet.column_names

    # The same command has nothing left to do; failed images are run again on request.
    steps = len(served.runtime.plans)
    assert await run(served, *words) == 1
    assert "0 images" in capsys.readouterr().out and len(served.runtime.plans) == steps
    (images / "broken.png").write_bytes((images / "00.png").read_bytes())
    assert await run(served, *words, "--retry-failed") == 0
    assert len({line["image"] for line in read(output)}) == len(read(output)) == 13


async def test_rows_of_a_file(serve, images, tmp_path, capsys):
    served = await serve()
    file, output = tmp_path / "rows.csv", tmp_path / "results.jsonl"
    file.write_text("picture,who\nimages/01.png,dog\nimages/01.png,cow\n")
    words = ["--rows", file, "--image-column", "picture", "--output", output, "--detect"]
    assert await run(served, *words, "a {who}") == 0
    found = {line["row"]: line["tasks"]["detect"]["searches"][0]["object"] for line in read(output)}
    assert found == {1: "a dog", 2: "a cow"}
    assert await run(served, *words, "a {what}", "--fresh") == 1
    assert "row 1 has no column 'what'; its columns are picture, who" in capsys.readouterr().err
    assert await run(served, *words, "another {who}") == 1
    assert "holds results of other tasks" in capsys.readouterr().err


async def test_what_can_not_be_done_is_said_before_the_first_request(images, tmp_path, capsys):
    for words, text in (
        ([images, "--output", "r"], "at least one task"),
        (["--detect", "cat", "--output", "r"], "no image is given"),
        ([images, "--detect", "cat", "--output", "r", "--export", "x.txt"], "FILE.csv"),
        ([images, "--detect", "cat", "--output", tmp_path / "no/r"], "cannot write"),
        (["--rows", "x.txt", "--detect", "cat", "--output", "r"], "must end with"),
        ([images, "--detect", "cat", "--output", "r", "--config", "x"], "needs --in-process"),
        ([images, "--detect", "cat", "--output", "r", "--request-id", "x"], "one request"),
    ):
        assert main(["batch", *map(str, words)]) in (1, 2)
        assert text in capsys.readouterr().err
    other = tmp_path / "notes.txt"
    other.write_text("a file of the user\n")
    assert main(["batch", str(images), "--detect", "cat", "--output", str(other)]) == 1
    assert "is not a file of results" in capsys.readouterr().err
    assert other.read_text() == "a file of the user\n"


@pytest.mark.slow
async def test_a_busy_server_is_asked_again_and_an_absent_one_is_given_up(
    serve, images, tmp_path, capsys
):
    (images / "broken.png").unlink()
    served = await serve(max_queue=1)
    output = tmp_path / "results.jsonl"
    words = [images, *TASKS, "--output", output]
    assert await run(served, *words, "--concurrency", 8) == 0
    assert len(read(output)) == 12 and all("error" not in line for line in read(output))
    await served.server.stop(0)
    assert await run(served, *words, "--fresh") == 1
    assert "no server answers there" in capsys.readouterr().err
    assert await run(served, *words, "--fresh", "--concurrency", 8, "--patience", 0) == 1
    assert "no request has succeeded" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kills", [100])
async def test_a_killed_batch_goes_on(serve, images, tmp_path, kills):
    """It is killed at any moment, with SIGKILL. No image is lost, and none is done twice."""
    (images / "broken.png").unlink()
    served = await serve()
    output = tmp_path / "results.jsonl"
    rows = tmp_path / "rows.csv"
    count = 15 * kills + 30
    names = [f"images/{number % 12:02}.png" for number in range(count)]
    rows.write_text("image\n" + "".join(f"{name}\n" for name in names))
    command = [sys.executable, "-m", "kestrel_grpc", "batch", "--rows", str(rows), "--detect",
               "cat", "--output", str(output), "--quiet", "--server", served.server.addresses[0]]  # fmt: skip
    killed = await killed_until_done(command, output, kills, kills)
    assert killed > kills / 2
    lines = read(output)
    assert sorted(line["row"] for line in lines) == [*range(1, count + 1)]
    assert all(line["image"] == names[line["row"] - 1] for line in lines)


async def test_a_name_that_is_not_utf_8(serve, images, tmp_path):
    """The bytes that it has are escaped in every file, and the next run knows it again."""
    name = b"\xff.png"
    try:
        (images / "00.png").rename(images / os.fsdecode(name))
    except OSError:
        pytest.skip("the file system takes no such name")
    served = await serve()
    output, exports = tmp_path / "out.jsonl", ["out.csv", "coco:out.json", "out.parquet"]
    flags = [f"--export={kind}{colon}{tmp_path}/{file}"
             for kind, colon, file in (each.rpartition(":") for each in exports)]  # fmt: skip
    (images / "broken.png").unlink()
    assert await run(served, images, *TASKS, "--output", output, *flags) == 0
    found = [line["image"] for line in read(output)]
    assert len(found) == 12 and os.fsdecode(name) in {os.path.basename(each) for each in found}
    assert await run(served, images, *TASKS, "--output", output, "--retry-failed") == 0
    assert len(read(output)) == 12
    for file in ("out.csv", "out.json"):
        assert r"\udcff.png" in (tmp_path / file).read_text(encoding="utf-8")


def test_an_incomplete_line_is_removed_and_a_full_disk_leaves_none(tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl"
    with Journal(file, {"tasks": []}) as journal:
        journal.append({"image": "a", "tasks": {}})
        with pytest.raises(CommandError, match="another command"):
            Journal(file, {"tasks": []})
    with file.open("a") as opened:
        opened.write('{"image": "b", "ta')
    with Journal(file, {"tasks": []}) as journal:
        assert journal.done == {("a", None)}
        write, left = os.write, [5]

        def fills_up(fd, data):
            if not left:
                raise OSError(28, "No space left on device")
            return write(fd, data[: left.pop()])

        monkeypatch.setattr(os, "write", fills_up)
        with pytest.raises(OSError, match="space"):
            journal.append({"image": "c", "tasks": {}})
        monkeypatch.undo()
        journal.append({"image": "d", "error": {"code": "X"}})
        assert [line["image"] for line in journal.lines()] == ["a", "d"]
    with Journal(file, {"tasks": []}, without_failed=True) as journal:
        assert journal.done == {("a", None)} and journal.failed == 0
        journal.append({"image": "d", "tasks": {}})
    assert [line["image"] for line in read(file)] == ["a", "d"]


def test_files_of_rows_keep_their_names(tmp_path):
    """A run that goes on must not write over the overlays of the one before."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(b"")
    rows = open_rows([str(tmp_path / "a"), str(tmp_path / "b")], [], "image")
    assert [*file_names(rows).values()] == ["x", "x-2"]
    assert file_names(rows)[rows[1].identity] == "x-2"


def test_rows_are_distinct_and_errors_name_them(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"image": "a.png", "n": 3}\n\n{"image": "https://host/b.png"}\n')
    first, second, third = open_rows([str(tmp_path / "a.png")] * 2, [str(file)], "image")
    assert (first.number, second.columns["n"]) == (None, "3")
    assert (second.source, third.source) == (str(tmp_path / "a.png"), "https://host/b.png")
    assert first.filled("{n}") == "{n}" and second.filled("x{n}") == "x3"
    for text, error in (
        ('{"n": 1}', "row 1 has no image"), ("[1]", "not an object"), ("{", "not JSON")
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(CommandError, match=error):
            open_rows([], [str(file)], "image")


def test_the_pace_grows_by_one_a_round_and_halves_once_for_all_that_were_in_flight():
    pace = Pace(16)
    assert pace.limit == 4
    for _ in range(40):
        pace.succeeded()
    before = pace.limit
    assert 8 <= before < 16
    started = time.monotonic()
    for _ in range(before):
        pace.refused(started)
    assert pace.limit == before // 2
    for _ in range(30):
        pace.refused(time.monotonic())
    assert pace.limit == 1
    for _ in range(1000):
        pace.succeeded()
    assert pace.limit == 16
