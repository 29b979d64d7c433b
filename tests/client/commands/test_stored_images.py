"""``put``, ``forget``, ``analyze``, ``run`` against a server in this process; ``serve --skill`` in one of its own."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_grpc.cli.program import main
from tests.forking.process import ForkedProcess, run_forked
from tests.service.services.test_run_skill import SOURCE

ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"


@pytest.fixture
async def kestrel(serve, capsys):
    """Runs a command against a server on the fake runtime: (status, output, errors)."""
    served = await serve()
    capsys.readouterr()

    async def run(*arguments):
        target = ["--server", served.server.addresses[0]]
        try:
            status = await asyncio.to_thread(main, [*map(str, arguments), *target])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    run.served = served
    return run


async def test_a_image_put_is_named_in_place_of_a_file(kestrel, monkeypatch):
    status, told, errors = await kestrel("put", IMAGE)
    assert (status, errors) == (0, "")
    image_id = told.strip()
    assert re.fullmatch(r"img_[0-9a-f]{32}", image_id)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(IMAGE.read_bytes())))
    _, told, _ = await kestrel("put", "-", "--json")
    assert json.loads(told) == {"image_id": image_id, "image_size": {"width": 857, "height": 783}}
    flags = ["--temperature", 0, "--max-tokens", 4]
    sent = await kestrel("query", IMAGE, "what?", *flags)
    assert sent == await kestrel("query", image_id, "what?", *flags)
    _, told, _ = await kestrel("caption", image_id, "--json", *flags)
    assert json.loads(told)["image_id"] == image_id
    assert await kestrel("forget", image_id) == (0, "", "")
    status, _, errors = await kestrel("forget", image_id)
    assert status == 0 and "was not stored" in errors
    status, _, errors = await kestrel("query", image_id, "what?")
    assert status == 1 and "send the image again" in errors and "NOT_FOUND" in errors


TASKS = [
    "--query", "how many?", "--caption", "--detect", "cat", "--query", "why?", "--point", "dog",
]  # fmt: skip


async def test_several_tasks(kestrel):
    status, told, _ = await kestrel("analyze", IMAGE, *TASKS, "--max-tokens", 4)
    assert status == 0
    titles = [line for line in told.splitlines() if line.endswith(":")]
    assert [title for title in titles if title.split()[0] in "query caption detect point"] == [
        "query 'how many?':",
        "caption 'normal':",
        "detect 'cat':",
        "query 'why?':",
        "point 'dog':",
    ]
    _, told, _ = await kestrel("analyze", IMAGE, *TASKS, "--max-tokens", 4, "--json")
    described = json.loads(told)
    assert list(described["tasks"]) == ["0", "1", "2", "3", "4"]
    assert described["tasks"]["2"]["objects"] and described["tasks"]["1"]["caption"]
    streamed = ["--stream", "--json"]
    _, told, _ = await kestrel("analyze", IMAGE, *TASKS, "--max-tokens", 4, *streamed)
    *events, final = map(json.loads, told.splitlines())
    assert {event["key"] for event in events} == {"0", "1", "2", "3", "4"}
    assert sum("result" in event for event in events) == 5
    assert list(final["final"]["tasks"]) == ["0", "1", "2", "3", "4"]
    status, told, _ = await kestrel("analyze", IMAGE, "--caption", "short", "--stream")
    assert status == 0 and told.startswith("caption 'short':\n")


async def test_a_failed_task_is_told_and_the_status_is_1(kestrel):
    tasks = ["--query", " ", "--detect", "cat"]
    for flags in ([], ["--stream"]):
        status, told, errors = await kestrel("analyze", IMAGE, *tasks, *flags)
        assert status == 1 and "detect 'cat':" in told
        assert "tasks[0].query.question: must not be empty [INVALID_ARGUMENT]" in errors
    status, told, _ = await kestrel("analyze", IMAGE, *tasks, "--json")
    assert json.loads(told)["tasks"]["0"]["error"]["code"] == "INVALID_ARGUMENT"
    assert status == 1
    status, _, errors = await kestrel("analyze", IMAGE)
    assert status == 2 and "at least one task" in errors
    status, _, errors = await kestrel("analyze", IMAGE, "--caption", "tiny")
    assert status == 1 and "there is no image 'tiny'" in errors  # No length, so the next image.


async def test_any_skill(kestrel):
    arguments = ["--argument", "object=cat", "--argument", "spatial_refs=[[0.5, 0.5]]"]
    status, told, _ = await kestrel("run", "point", IMAGE, *arguments, "--setting", "max_objects=2")
    assert status == 0 and json.loads(told)["points"]
    _, told, _ = await kestrel("run", "point", IMAGE, *arguments, "--json")
    assert json.loads(told)["skill"] == "point"
    _, told, _ = await kestrel("run", "point", IMAGE, *arguments, "--stream", "--json")
    *points, final = map(json.loads, told.splitlines())
    assert len(points) == len(final["final"]["output"]["points"])
    question = ["--argument", "question=what?", "--setting", "max_tokens=4"]
    plain = ["--setting", "temperature=0"]
    _, told, _ = await kestrel("run", "query", *question, *plain, "--stream")
    _, whole, _ = await kestrel("run", "query", *question, *plain)
    assert json.loads(whole)["answer"] == told.removesuffix("\n")
    status, _, errors = await kestrel("run", "dream")
    assert status == 1 and "its skills are query, caption" in errors
    status, _, errors = await kestrel("run", "query", "--argument", "question")
    assert status == 2 and "NAME=VALUE" in errors


async def test_priority_and_salt(kestrel, monkeypatch):
    seen = []
    start = kestrel.served.engine.start

    async def spy(request):
        seen.append((request.priority, request.cache_salt))
        return await start(request)

    kestrel.served.engine.start = spy
    flags = ["--priority", "high", "--cache-salt", "mine"]
    await kestrel("query", "what?", "--max-tokens", 1, *flags)
    await kestrel("analyze", IMAGE, "--query", "what?", *flags)
    await kestrel("run", "query", "--argument", "question=what?", *flags)
    assert seen == [("high", "mine")] * 3


@pytest.mark.slow
def test_serve_takes_the_guides_skill(tmp_path):
    """As the guide says: saved in the current folder, served, listed, called."""
    (tmp_path / "yes_no.py").write_text(SOURCE)
    program = [sys.executable, "-m", "kestrel_grpc"]
    variables = {name: value for name, value in os.environ.items() if "KESTREL" not in name}
    where = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = {"cwd": tmp_path, "text": True, "env": variables | {"PYTHONPATH": where}}
    flags = [
        "--skill", "yes_no:YesNoSkill", "--listen", "127.0.0.1:0", "--threads", "1", "--drain-delay", "0",
    ]  # fmt: skip
    with ForkedProcess([*program, "serve", *flags], stdout=subprocess.PIPE, **options) as server:
        try:
            (target,) = re.findall(r"listening on (\S+),", server.stdout.readline())
            asked = ["--argument", "question=Is there a green crescent?", "--server", target]
            done = run_forked([*program, "run", "yes_no", IMAGE, *asked], **options)
            assert json.loads(done.stdout) in ({"yes": True}, {"yes": False}), done.stderr
            listed = run_forked([*program, "models", "--server", target], **options)
            assert "gaze, yes_no" in listed.stdout
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0
    bad = run_forked([*program, "serve", "--skill", "yes_no:Nothing"], **options)
    assert bad.returncode == 2
    (line,) = bad.stderr.splitlines()
    assert line.startswith("kestrel-grpc serve: error: --skill=yes_no:Nothing: AttributeError")
