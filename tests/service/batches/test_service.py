"""Batches by gRPC over the fake runtime: typed requests and results, callers' isolation, restarts, refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import batch_service_pb2 as pb
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as vision_pb
from kestrel_client._pb.kestrel.v1.batch_service_pb2_grpc import BatchServiceStub
from kestrel_grpc.batches import running, tables
from kestrel_grpc.batches.store import BatchStore
from kestrel_grpc.security.identity.principal import ANONYMOUS
from kestrel_grpc.settings.batches import BatchesConfig
from tests.service.conftest import NO_END, EndlessRuntime, HeldRuntime, Served, raw_image
from tests.service.security.identity.test_tokens import TokenFile, bearer
from tests.service.statuses import failure, of_message
from tests.waiting import until

GREEDY = common_pb2.Sampling(temperature=0)


def question(text: str, max_tokens: int = 5) -> vision_pb.QueryRequest:
    task = vision_pb.QueryTask(question=text, max_tokens=max_tokens, sampling=GREEDY)
    return vision_pb.QueryRequest(query=task)


def row(custom_id: str, **request: Any) -> pb.CreateBatchRequest:
    return pb.CreateBatchRequest(request=pb.BatchRequest(custom_id=custom_id, **request))


def rows_of(*texts: str, **options: Any) -> list[pb.CreateBatchRequest]:
    return [row(f"row-{n}", query=question(text, **options)) for n, text in enumerate(texts)]


class Batches:
    """Calls of one caller."""

    def __init__(self, served: Served, metadata: Any = None) -> None:
        self.stub: Any = BatchServiceStub(served.channel)
        self.metadata = metadata

    async def create(self, rows: Iterable[pb.CreateBatchRequest]) -> pb.Batch:
        return (await self.stub.CreateBatch(iter(rows), metadata=self.metadata)).batch

    async def get(self, batch_id: str) -> pb.Batch:
        request = pb.GetBatchRequest(batch_id=batch_id)
        return (await self.stub.GetBatch(request, metadata=self.metadata)).batch

    async def cancel(self, batch_id: str) -> pb.Batch:
        request = pb.CancelBatchRequest(batch_id=batch_id)
        return (await self.stub.CancelBatch(request, metadata=self.metadata)).batch

    def stream(self, batch_id: str, start_index: int = 0) -> Any:
        request = pb.StreamBatchResultsRequest(batch_id=batch_id, start_index=start_index)
        return self.stub.StreamBatchResults(request, metadata=self.metadata)

    async def results(self, batch_id: str, start: int = 0) -> list[pb.StreamBatchResultsResponse]:
        return [each async for each in self.stream(batch_id, start)]


def kept_in(folder: Any, **limits: Any) -> dict[str, Any]:
    return {"batches": BatchesConfig(path=str(folder / "batches.db"), **limits)}


async def test_each_kind_of_request_has_its_result(serve, tmp_path, monkeypatch):
    served = await serve(server_config=kept_in(tmp_path))
    start, priorities = served.engine.start, []

    async def noted(request):
        priorities.append(request.priority)
        return await start(request)

    monkeypatch.setattr(served.engine, "start", noted)
    image, found = raw_image(), vision_pb.DetectTask(objects=["cup"], sampling=GREEDY)
    high = common_pb2.RequestOptions(priority=common_pb2.PRIORITY_HIGH)
    ask = question("What?")
    several = [vision_pb.Task(key="a", query=ask.query), vision_pb.Task(key="b", detect=found)]
    sent = {
        "query": ask,
        "caption": vision_pb.CaptionRequest(
            image=image, caption={"sampling": GREEDY}, options=high
        ),
        "detect": vision_pb.DetectRequest(image=image, detect=found),
        "point": vision_pb.PointRequest(image=image),
        "analyze": vision_pb.AnalyzeRequest(image=image, tasks=several),
        "embed": vision_pb.EmbedRequest(image=image),
        "skill": vision_pb.RunSkillRequest(skill={"name": "no_such"}),
    }
    batches = Batches(served)
    rows = [row(f"my {name}", **{name: request}) for name, request in sent.items()]
    info = pb.CreateBatchRequest(info=pb.BatchInfo(total_requests=len(rows)))
    batch = await batches.create([info, *rows])
    assert batch.state == pb.BATCH_STATE_IN_PROGRESS and not batch.done
    results = await batches.results(batch.batch_id)
    assert [each.index for each in results] == list(range(len(sent)))
    assert [each.custom_id for each in results] == [f"my {name}" for name in sent]
    assert {*priorities} == {"low"}
    kinds = [each.WhichOneof("outcome") for each in results]
    assert kinds == ["query", "caption", "detect", "error", "analyze", "embed", "error"]
    direct = await served.vision.Query(ask)
    assert results[0].query.answers[0].text == direct.answers[0].text
    embedded = (await served.vision.Embed(sent["embed"])).embeddings
    assert results[5].embed.embeddings == embedded
    invalid, unknown = of_message(results[3].error), of_message(results[6].error)
    assert invalid.fields == ["point.objects"]
    assert unknown.reason == "SKILL_NOT_FOUND"
    batch = await batches.get(batch.batch_id)
    assert batch.done and batch.state == pb.BATCH_STATE_COMPLETED
    assert (batch.total_requests, batch.completed_requests, batch.failed_requests) == (7, 5, 2)
    assert batch.end_time.seconds >= batch.create_time.seconds < batch.delete_time.seconds
    assert await batches.results(batch.batch_id, 5) == results[5:]
    await batches.stub.DeleteBatch(pb.DeleteBatchRequest(batch_id=batch.batch_id))
    assert (await failure(batches.get(batch.batch_id))).reason == "STORED_NOT_FOUND"


async def test_a_stream_that_does_not_end_well_leaves_nothing(serve, tmp_path, monkeypatch):
    served = await serve(server_config=kept_in(tmp_path))
    store, info = served.server.batches.store, pb.BatchInfo(total_requests=3)
    first, second = rows_of("a", "b")
    for rows, field, part in (
        ([], "request", "has no request"),
        ([pb.CreateBatchRequest()], "", "set info or request"),
        ([first, pb.CreateBatchRequest(info=info)], "info", "must be the first message"),
        ([pb.CreateBatchRequest(info={"total_requests": 0})], "info.total_requests", "is 0"),
        ([pb.CreateBatchRequest(info=info), first, second], "info.total_requests", "but 2"),
        ([first, row("", query=question("c"))], "request.custom_id", "of request 1"),
        ([first, row("x" * 513, query=question("c"))], "request.custom_id", "1 to 512"),
        ([first, row("c")], "request", "1 is empty"),
        ([first, first], "request.custom_id", "'row-0' stands twice"),
    ):
        told = await served.refusal("BatchService/CreateBatch", rows)
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT, told
        assert part in told.message and told.fields == ([field] if field else []), told
    monkeypatch.setattr("kestrel_grpc.batches.service._ARRIVING_BYTES", 1)
    gate = asyncio.Event()

    async def endless() -> AsyncIterator[pb.CreateBatchRequest]:
        yield first
        await gate.wait()

    call = Batches(served).stub.CreateBatch(endless())
    await until(lambda: store._tables.arriving)
    call.cancel()
    await until(lambda: not store._tables.arriving)
    assert (await Batches(served).stub.ListBatches(pb.ListBatchesRequest())) == (
        pb.ListBatchesResponse()
    )
    assert store._tables.one("SELECT count(*) FROM requests")[0] == 0


async def test_a_call_that_is_cancelled_twice_at_its_end_leaves_nothing(tmp_path):
    store = BatchStore(BatchesConfig(path=str(tmp_path / "batches.db")))
    arriving, gate = tables.Arriving(ANONYMOUS), threading.Event()
    await store.add_requests(arriving, [("a", b"a")])
    await store.start_batch(arriving, tables.NewBatch("/a"))  # The cancellation comes now.
    busy = asyncio.create_task(store._run(gate.wait))
    dropped = asyncio.create_task(store.drop(arriving))
    await asyncio.sleep(0)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    gate.set()
    assert await busy and await store.batches(ANONYMOUS, "", 1) == []
    assert store._tables.one("SELECT count(*) FROM requests")[0] == 0
    await store.close()


async def test_callers_see_their_own_batches_only(serve, tmp_path, monkeypatch):
    tokens = TokenFile(tmp_path / "tokens")
    one, other = tokens.add("one"), tokens.add("other")
    limits = kept_in(tmp_path, max_bytes=1 << 20)
    served = await serve(server_config={**tokens.config(), **limits})
    mine, theirs = Batches(served, bearer(one)), Batches(served, bearer(other))
    batch = await mine.create(rows_of("a"))
    await mine.results(batch.batch_id)
    for lost in (
        theirs.get(batch.batch_id),
        theirs.cancel(batch.batch_id),
        theirs.stream(batch.batch_id),
        theirs.stub.DeleteBatch(
            pb.DeleteBatchRequest(batch_id=batch.batch_id), metadata=theirs.metadata
        ),
    ):
        told = await failure(lost)
        assert (told.reason, told.fields) == ("STORED_NOT_FOUND", ["batch_id"])
    assert (await failure(Batches(served).get(batch.batch_id))).reason == "CREDENTIALS_MISSING"
    second = await mine.create(rows_of("b"))
    page = pb.ListBatchesRequest(page_size=1)
    listed = await mine.stub.ListBatches(page, metadata=mine.metadata)
    page.page_token = listed.next_page_token
    rest = await mine.stub.ListBatches(page, metadata=mine.metadata)
    assert {listed.batches[0].batch_id, rest.batches[0].batch_id} == {
        batch.batch_id,
        second.batch_id,
    }
    assert not rest.next_page_token
    told = await failure(theirs.stub.ListBatches(page, metadata=theirs.metadata))
    assert told.fields == ["page_token"], "a batch of another caller"
    big = [row(f"{n}", query=question("x" * 100_000)) for n in range(4)]
    monkeypatch.setattr("kestrel_grpc.batches.service._ARRIVING_BYTES", 1)
    told = await served.refusal("BatchService/CreateBatch", big, metadata=mine.metadata)
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED and told.quota_subject == "one"
    assert "bytes of files and batches" in told.message
    await theirs.create(rows_of("c"))  # Its own share is free.
    monkeypatch.setattr(tables, "MOST_OPEN", 0)
    told = await served.refusal("BatchService/CreateBatch", rows_of("d"), metadata=mine.metadata)
    assert "open batches" in told.message


async def test_the_end_of_a_call_or_of_the_server_does_not_end_a_batch(serve, tmp_path):
    runtime = HeldRuntime()
    served = await serve(runtime=runtime, server_config=kept_in(tmp_path, at_once=1))
    batches = Batches(served)
    batch = await batches.create(rows_of("a", "b", "c"))
    request = pb.StreamBatchResultsRequest(batch_id=batch.batch_id)
    late = await failure(batches.stub.StreamBatchResults(request, timeout=0.1))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    stream = batches.stream(batch.batch_id)
    await until(lambda: served.server.in_flight.count > 1)
    stopping = asyncio.create_task(served.server.stop(0))
    assert (await failure(stream)).reason == "SHUTTING_DOWN"
    runtime.gate.set()
    await stopping
    batches = Batches(await serve(server_config=kept_in(tmp_path)))
    results = await batches.results(batch.batch_id)
    assert [each.WhichOneof("outcome") for each in results] == ["query"] * 3


async def test_a_cancelled_batch_keeps_its_results(serve, tmp_path):
    runtime = EndlessRuntime()
    served = await serve(runtime=runtime, server_config=kept_in(tmp_path))
    batches = Batches(served)
    texts = [row("short", query=question("a", 1)), *rows_of("b", "c", max_tokens=NO_END)]
    batch = await batches.create(texts)
    stream = aiter(batches.stream(batch.batch_id))
    assert (await anext(stream)).custom_id == "short"
    cancelled = await batches.cancel(batch.batch_id)
    assert cancelled.state == pb.BATCH_STATE_CANCELLED and cancelled.failed_requests == 2
    rest = [each async for each in stream]
    assert [of_message(each.error).code for each in rest] == [grpc.StatusCode.CANCELLED] * 2
    assert await batches.results(batch.batch_id, 3) == []
    assert (
        "start_index: is 4; must be 0 to 3"
        in (await failure(batches.stream(batch.batch_id, 4))).message
    )
    await until(lambda: served.engine.num_requests == 0)


async def test_a_request_has_as_long_as_its_batch(moved_clock, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "WINDOW_S", 200)
    served = await serve(runtime=EndlessRuntime(), server_config=kept_in(tmp_path))
    batches = Batches(served)
    batch = await batches.create(rows_of("a", "b", max_tokens=NO_END))
    await until(lambda: served.engine.num_requests == 2)
    moved_clock.advance(121)  # The limit of a call is 120 s.
    assert (await batches.get(batch.batch_id)).failed_requests == 0
    moved_clock.advance(100)
    told = [of_message(each.error) for each in await batches.results(batch.batch_id)]
    assert [(each.code, each.message) for each in told] == [
        (grpc.StatusCode.DEADLINE_EXCEEDED, "the batch was expired before")
    ] * 2
    await until(lambda: served.engine.num_requests == 0)


async def two_requests(folder: Any) -> tuple[running.BatchRunner, str]:
    """A runner of a batch of two requests, and the batch."""
    store = BatchStore(BatchesConfig(path=str(folder / "batches.db")))
    runner, arriving = running.BatchRunner(store, 2, lambda: 0), tables.Arriving(ANONYMOUS)
    runner.life, runner.forms["/a"] = Any, Any
    await store.add_requests(arriving, [("a", b"a"), ("b", b"b")])
    return runner, (await store.start_batch(arriving, tables.NewBatch("/a")))["id"]


async def test_a_batch_that_ends_as_its_requests_are_claimed_is_not_answered(tmp_path, monkeypatch):
    runner, batch_id = await two_requests(tmp_path)
    claim = runner.store.claim

    async def claimed(*args: Any, **options: Any) -> Any:
        found = await claim(*args, **options)
        await runner.store.cancel(ANONYMOUS, batch_id)
        return found

    monkeypatch.setattr(runner.store, "claim", claimed)
    await runner._begin()
    assert not runner._running
    await runner.close()


async def test_tasks_that_end_before_their_first_step_leave_nothing(tmp_path):
    runner, batch_id = await two_requests(tmp_path)
    await runner._begin()
    assert len(runner._running) == 2
    for task in runner._running:
        task.cancel()
    await until(lambda: not runner._running)
    await runner._begin()
    assert len(runner._running) == 2, "both are begun again"
    await runner.store.cancel(ANONYMOUS, batch_id)
    await until(lambda: not runner._running)
    await runner.close()


async def test_results_beyond_the_share_end_a_batch(serve, tmp_path, monkeypatch):
    runtime = HeldRuntime()
    served = await serve(runtime=runtime, server_config=kept_in(tmp_path, at_once=1))
    batches = Batches(served)
    batch = await batches.create(rows_of("a", "b"))
    assert await asyncio.to_thread(runtime.began.wait, 60)
    monkeypatch.setattr(tables, "_SHARE", 1 << 40)
    runtime.gate.set()
    first, second = await batches.results(batch.batch_id)
    assert first.query.answers
    assert of_message(second.error).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await batches.get(batch.batch_id)).state == pb.BATCH_STATE_FAILED


async def test_a_caller_without_tokens_left_does_not_hold_up_others(serve, tmp_path):
    tokens = TokenFile(tmp_path / "tokens")
    poor, rich = tokens.add("poor"), tokens.add("rich")
    text = tokens.path.read_text().replace("poor infer ", "poor infer minute=1 ")
    tokens.path.write_text(text)
    served = await serve(server_config={**tokens.config(), **kept_in(tmp_path, at_once=1)})
    waiting = await Batches(served, bearer(poor)).create(rows_of("a", "b"))
    batches = Batches(served, bearer(rich))
    batch = await batches.create(rows_of("c"))
    assert (await batches.results(batch.batch_id))[0].query.answers
    assert not (await Batches(served, bearer(poor)).get(waiting.batch_id)).done


async def test_a_server_without_batches_says_so(serve):
    served = await serve()
    told = await failure(Batches(served).get("batch_1"))
    assert told.code is grpc.StatusCode.FAILED_PRECONDITION
    assert told.reason == "BATCHES_NOT_TAKEN" and "--batches" in told.message


async def test_an_off_peak_batch_waits_until_nobody_calls(
    moved_clock, serve, tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "OFF_PEAK_S", 3600)  # More than the test takes.
    served = await serve(server_config=kept_in(tmp_path))
    batches = Batches(served)
    info = pb.CreateBatchRequest(info={"off_peak": True})

    async def waits(rows: list[pb.CreateBatchRequest]) -> pb.Batch:
        """An off-peak batch that has no result when a later one of the same caller has all of its own."""
        waiting = await batches.create([info, *rows])
        assert waiting.off_peak
        other = await batches.create(rows)
        assert len(await batches.results(other.batch_id)) == len(rows)
        assert (await batches.get(waiting.batch_id)).completed_requests == 0
        return waiting

    first = await waits(rows_of("a", "b"))
    moved_clock.advance(3601)
    assert len(await batches.results(first.batch_id)) == 2
    await served.vision.Query(question("c"))
    second = await waits(rows_of("d"))
    moved_clock.advance(3601)
    await batches.get(second.batch_id)  # Asks no model.
    assert len(await batches.results(second.batch_id)) == 1
    ended = await batches.create(rows_of("e"))
    assert len(await batches.results(ended.batch_id)) == 1
    third = await batches.create([info, *rows_of("f")])  # A batch's request is no call.
    assert len(await batches.results(third.batch_id)) == 1


async def test_what_a_batch_takes_is_its_callers_usage(wall, serve, tmp_path):
    tokens = TokenFile(tmp_path / "tokens")
    one, other = tokens.add("one"), tokens.add("other")
    (tmp_path / "usage").mkdir()
    text = tokens.path.read_text().replace(" infer ", " infer day=1000000 ")
    tokens.path.write_text(text)
    config = {**tokens.config(), "usage_log": str(tmp_path / "usage"), **kept_in(tmp_path)}
    served = await serve(server_config=config)
    for token, texts in ((one, "abc"), (other, "d")):
        batches = Batches(served, bearer(token))
        batch = await batches.create(rows_of(*texts))
        used = [each.query.usage for each in await batches.results(batch.batch_id)]
        spent = sum(each.input_tokens - each.cached_tokens + each.output_tokens for each in used)
        name = "one" if token is one else "other"
        account = served.server.guard.budgets.accounts[name]
        assert account.windows["day"].used >= spent > 0 == account.reserved
        await served.server.records.usage.write()
        lines = (tmp_path / "usage").glob("*")
        logged = [json.loads(line) for file in lines for line in file.read_text().splitlines()]
        mine = [each for each in logged if each["principal"] == name]
        assert sum(each["requests"] for each in mine) == len(texts)
        for kind in ("input_tokens", "output_tokens", "cached_tokens"):
            assert sum(each[kind] for each in mine) == sum(getattr(each, kind) for each in used)
