"""Batches with the Python clients and with ``kestrel batch --on-server``."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
import pyvips

from kestrel_client import (
    AnalyzeResult,
    AsyncKestrelClient,
    CaptionTask,
    DetectTask,
    FailedPreconditionError,
    InvalidImageError,
    InvalidRequestError,
    KestrelClient,
    KestrelError,
    NotFoundError,
    QueryTask,
)
from kestrel_client.calls.prepared_call import PreparedCall
from kestrel_client.errors import STATUS_DROPPED
from kestrel_grpc.batches import running
from kestrel_grpc.batches.store import BatchStore
from kestrel_grpc.cli.program import main
from kestrel_grpc.settings.batches import BatchesConfig
from tests.service.conftest import HeldRuntime
from tests.waiting import until


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of 5 small images and a file that is none."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):
        image = pyvips.Image.black(40, 30, bands=3) + number
        image.cast("uchar").copy(interpretation="srgb").pngsave(str(folder / f"{number}.png"))
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def kept_in(folder: Path) -> dict[str, Any]:
    return {"batches": BatchesConfig(path=str(folder / "batches.db"))}


async def test_both_clients_create_and_read_batches(serve, images, tmp_path):
    served = await serve(server_config=kept_in(tmp_path))
    tasks = {"a": CaptionTask(max_tokens=3), "b": DetectTask("cup")}
    requests = {
        "sky": (None, QueryTask("Why?", max_tokens=3)),
        "both": (images / "0.png", tasks),
        "broken": (images / "broken.png", DetectTask("cup")),
    }
    address = served.server.addresses[0]

    def ask() -> None:
        with KestrelClient(address) as client:
            batch = client.create_batch(requests)
            assert batch.total_requests == 3 and batch.state == "in_progress"
            found = list(client.batch_results(batch.batch_id, requests=requests))
            assert [each.custom_id for each in found] == list(requests)
            sky, both, broken = (each.outcome for each in found)
            assert sky.question == "Why?" and sky.answer
            assert isinstance(both, AnalyzeResult) and both["b"].searches[0].object == "cup"
            assert broken.reason == "IMAGE_FORMAT_UNSUPPORTED"
            # Without the requests, and from a later one on.
            [again] = client.batch_results(batch.batch_id, start_index=2)
            assert again.index == 2 and str(again.outcome) == str(broken)
            assert [each.outcome for each in client.batch_results(batch.batch_id)][1]["b"]
            for other in (
                {},
                [("sky", requests["sky"])],
                {"cloud": requests["sky"]},
                {**requests, "sky": (None, CaptionTask())},
                {**requests, "both": (None, {"c": CaptionTask()})},
            ):
                with pytest.raises(
                    InvalidRequestError, match=r"requests: (are not those of|must be)"
                ):
                    list(client.batch_results(batch.batch_id, requests=other))
            assert client.get_batch(batch.batch_id).done
            client.delete_batch(batch.batch_id)
            assert client.list_batches() == ()

    await asyncio.to_thread(ask)
    async with AsyncKestrelClient(address) as client:
        missing = {**requests, "missing": (images / "no.png", CaptionTask())}
        with pytest.raises(InvalidImageError, match=r"requests\['missing'\]: .*no\.png"):
            await client.create_batch(missing)
        assert await client.list_batches() == (), "nothing is stored of it"
        left_out: dict[str, Any] = {}
        batch = await client.create_batch(missing, left_out=left_out)
        assert batch.total_requests == 3 and [*left_out] == ["missing"]
        assert len([each async for each in client.batch_results(batch.batch_id)]) == 3
        assert (await client.cancel_batch(batch.batch_id)).state == "completed"
        with pytest.raises(NotFoundError):
            await client.get_batch("batch_1")


def read(file: Path) -> dict[str, Any]:
    """What the lines of results say, by image, without times and ids."""
    text = re.sub(r', "seed": \d+', "", file.read_text())
    lines = [json.loads(line) for line in text.splitlines()]
    found = {line["image"]: line for line in lines}
    assert len(found) == len(lines), "each image once"
    for line in lines:
        for each in (line, *line.get("tasks", {}).values()):
            for name in ("timings", "request_id", "image_id", "usage"):
                each.pop(name, None)
    return found


async def test_the_command_leaves_its_batch_and_comes_back(serve, images, tmp_path, capsys):
    tasks = ["--detect", "cat", "--caption", "short", "--max-tokens", "4", "--quiet"]

    async def run(served: Any, name: str, *flags: str) -> int:
        address, output = served.server.addresses[0], str(tmp_path / name)
        words = ["batch", str(images), *tasks, "--output", output, "--server", address, *flags]
        return await asyncio.to_thread(main, words)

    runtime = HeldRuntime()
    served = await serve(runtime=runtime, server_config=kept_in(tmp_path))
    running = asyncio.create_task(run(served, "remote.jsonl", "--on-server", "--patience", "0"))
    assert await asyncio.to_thread(runtime.began.wait, 60)
    await until(lambda: served.server.in_flight.count > 1)
    stopping = asyncio.create_task(served.server.stop(0))
    assert await running == 1
    runtime.gate.set()
    await stopping
    told = capsys.readouterr().err
    batch_id = told.partition("--batch ")[2].split()[0]
    served = await serve(server_config=kept_in(tmp_path))
    assert await run(served, "remote.jsonl", "--on-server", "--batch", batch_id) == 1
    assert "1 failed: INVALID_ARGUMENT" in capsys.readouterr().out
    assert await run(served, "local.jsonl") == 1
    remote, local = read(tmp_path / "remote.jsonl"), read(tmp_path / "local.jsonl")
    assert len(remote) == 6 and remote == local
    assert await run(served, "other.jsonl", "--on-server", "--batch", f"batch_{'0' * 32}") == 1
    assert "you have no batch" in capsys.readouterr().err
    assert (
        await run(served, "other.jsonl", "--on-server", "--batch", batch_id, "--point", "cat") == 1
    )
    assert "is of other images or tasks" in capsys.readouterr().err
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        other = await client.create_batch({"x": (None, QueryTask("Why?"))})
        with pytest.raises(
            InvalidRequestError, match="start_index=-1: must be a whole number from 0"
        ):
            await anext(client.batch_results(other.batch_id, start_index=-1))
    assert (
        await run(served, "other.jsonl", "--fresh", "--on-server", "--batch", other.batch_id) == 1
    )
    assert "is of other images or tasks" in capsys.readouterr().err


async def test_the_command_outlives_the_limit_of_a_call(
    moved_clock, serve, images, tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "OFF_PEAK_S", 3600)
    served = await serve(server_config=kept_in(tmp_path))
    store = served.server.batches.store
    results, asked, pauses = store.results, asyncio.Event(), []

    async def noted(*args: Any) -> Any:
        asked.set()
        return await results(*args)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        moved_clock.advance(3601)

    monkeypatch.setattr(
        BatchStore, "results", lambda store, *args, **named: noted(*args, *named.values())
    )
    monkeypatch.setattr("kestrel_client.commands.batch.on_server.time.sleep", pause)
    words = ["batch", str(images / "0.png"), "--caption", "short", "--max-tokens", "4", "--quiet"]
    words += ["--output", str(tmp_path / "a.jsonl"), "--server", served.server.addresses[0]]
    words += ["--on-server", "--off-peak", "--patience", "0"]
    command = asyncio.create_task(asyncio.to_thread(main, words))
    await asked.wait()
    moved_clock.advance(121)  # The limit of a call is 120 s.
    assert await command == 0 and len(pauses) == 1


async def test_requests_are_checked_before_they_are_sent():
    async with AsyncKestrelClient("127.0.0.1:1") as client:
        for wrong, part in (
            ({}, "requests: must be a mapping of ids to 1 to 50000 requests, not 0 requests"),
            ([("a", CaptionTask())], "requests: must be a mapping"),
            (dict.fromkeys(map(str, range(50_001))), "not 50001 requests"),
            ({1: (None, CaptionTask())}, "requests[1]: the id must have 1 to 512 characters"),
            ({"a": CaptionTask()}, "requests['a']: must be a tuple of an image and what to do"),
        ):
            with pytest.raises(InvalidRequestError, match=re.escape(part)):
                await client.create_batch(wrong)


def test_flags_that_do_not_fit(tmp_path, capsys):
    words = ["batch", "a.png", "--caption", "short", "--output", str(tmp_path / "a.jsonl")]
    for flags, part in (
        (["--batch", "batch_1"], "--batch: needs --on-server"),
        (["--off-peak"], "--off-peak: needs --on-server"),
        (["--on-server", "--off-peak", "--batch", "batch_1"], "exists already"),
        (["--on-server", "--in-process"], "keeps no batch"),
        (["--on-server", "--server", "a:1,b:2"], "needs one --server"),
    ):
        assert main([*words, *flags]) == 2
        assert part in capsys.readouterr().err


async def test_what_the_second_attempt_reads_is_not_left_out(serve, tmp_path, monkeypatch):
    served = await serve(server_config=kept_in(tmp_path))
    image, whole, sent = tmp_path / "late.png", PreparedCall.send, []

    async def dropped(prepared):
        sent.extend([each async for each in prepared.request()])
        pyvips.Image.black(8, 8).write_to_file(str(image))
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), STATUS_DROPPED
        )

    monkeypatch.setattr(
        PreparedCall, "send", lambda self, stub: whole(self, stub) if sent else dropped(self)
    )
    asked, left_out = (None, QueryTask("Why?")), dict[str, KestrelError]()
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        requests = {"a": (image, CaptionTask()), "b": asked}
        batch = await client.create_batch(requests, left_out=left_out)
        [only] = await client.list_batches()
    assert len(sent) == 2, "the info and b"
    assert (batch.total_requests, only.batch_id, left_out) == (2, batch.batch_id, {})


async def test_a_server_without_batches_is_named(serve, monkeypatch):
    """Even if gRPC has dropped its status, because the server refused the batch while its requests were sent."""
    served = await serve()
    whole, sent = PreparedCall.send, []

    def send(self, stub):
        sent.append(self)
        if len(sent) == 1:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(),
                details=STATUS_DROPPED,
            )
        return whole(self, stub)

    monkeypatch.setattr(PreparedCall, "send", send)
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        with pytest.raises(FailedPreconditionError, match="--batches"):
            await client.create_batch({"a": (None, QueryTask("Why?"))})
