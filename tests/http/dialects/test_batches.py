"""OpenAI's files and batches over the fake runtime: the answers, the callers' shares, restarts and the end of days."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kestrel_engine import ConfigError, EngineOverloaded
from kestrel_grpc.batches import tables
from kestrel_grpc.batches.database import BATCH_BYTES
from kestrel_grpc.batches.requests import read_requests
from kestrel_grpc.batches.store import BatchStore
from kestrel_grpc.batches.tables import NewBatch
from kestrel_grpc.edge.failures.errors import StoredNotFound
from kestrel_grpc.security.identity.principal import Principal
from kestrel_grpc.settings.batches import BatchesConfig
from tests.service.conftest import NO_END, EndlessRuntime, HeldRuntime
from tests.waiting import until

CHAT = "/v1/chat/completions"
SLOW_TO_READ = 'multipart/form-data; boundary="' + ";" * 30_000
"""Python's email package takes 1.4 s for it."""


def lines_of(*bodies: dict[str, Any], url: str = CHAT) -> bytes:
    rows = [
        {"custom_id": f"row-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    return b"\n".join(json.dumps(row).encode() for row in rows)


def question(text: str, **others: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 5, **others}


def kept_in(folder: Path, **limits: Any) -> dict[str, Any]:
    return {"batches": BatchesConfig(path=str(folder / "batches.db"), **limits)}


async def upload(client: Any, content: bytes) -> str:
    files = {"file": ("in.jsonl", content)}
    response = await client.post("/v1/files", files=files, data={"purpose": "batch"})
    assert response.status_code == 200, response.text
    assert response.json()["bytes"] == len(content)
    return str(response.json()["id"])


async def created(client: Any, content: bytes, endpoint: str = CHAT) -> dict[str, Any]:
    asked = {"input_file_id": await upload(client, content), "endpoint": endpoint}
    asked["completion_window"] = "24h"
    response = await client.post("/v1/batches", json=asked)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def ended(client: Any, batch_id: str) -> dict[str, Any]:
    while True:
        batch = (await client.get(f"/v1/batches/{batch_id}")).json()
        if batch["status"] != "in_progress":
            return dict(batch)
        await asyncio.sleep(0)


async def lines(client: Any, file_id: str) -> list[dict[str, Any]]:
    response = await client.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_batch_answers_as_its_path_does(http, tmp_path, monkeypatch):
    served, client = await http(server_config=kept_in(tmp_path))
    start, priorities = served.engine.start, []

    async def noted(request):
        priorities.append(request.priority)
        return await start(request)

    monkeypatch.setattr(served.engine, "start", noted)
    bodies = [question(f"What {number}?") for number in range(12)]
    wrong = [question("Why?", stream=True), question("Why?", tools=[{}])]
    batch = await created(client, lines_of(*bodies, *wrong))
    assert batch["status"] == "in_progress" and batch["request_counts"]["total"] == 14
    batch = await ended(client, batch["id"])
    assert batch["status"] == "completed" and batch["completed_at"] >= batch["created_at"]
    assert batch["request_counts"] == {"total": 14, "completed": 12, "failed": 2}
    assert priorities == ["low"] * 12
    found = await lines(client, batch["output_file_id"])
    assert [each["custom_id"] for each in found] == [f"row-{number}" for number in range(12)]
    for each, body in zip(found, bodies, strict=True):
        direct = (await client.post(CHAT, json=body)).json()
        answer = each["response"]
        assert answer["status_code"] == 200 and each["error"] is None
        assert answer["body"]["choices"] == direct["choices"]
        assert answer["body"]["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    failed = await lines(client, batch["error_file_id"])
    params = [each["response"]["body"]["error"]["param"] for each in failed]
    assert params == ["stream", "tools"]
    assert {each["response"]["status_code"] for each in failed} == {400}
    listed = (await client.get("/v1/batches?limit=1")).json()
    assert [each["id"] for each in listed["data"]] == [batch["id"]] and not listed["has_more"]
    listed = (await client.get("/v1/files")).json()
    assert len(listed["data"]) == 3 and not listed["has_more"]
    page = (await client.get("/v1/files?limit=2")).json()
    assert page["data"] == listed["data"][:2] and page["has_more"]
    page = (await client.get(f"/v1/files?limit=2&after={page['last_id']}")).json()
    assert page["data"] == listed["data"][2:] and not page["has_more"]
    wrong = await client.get("/v1/files?limit=1001")
    assert "limit: must be from 1 to 1000" in wrong.json()["error"]["message"]
    deleted = await client.delete(f"/v1/files/{batch['output_file_id']}")
    assert deleted.json()["deleted"]
    gone = await client.get(f"/v1/files/{batch['output_file_id']}/content")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "stored_not_found"


async def test_what_is_refused(http, tmp_path):
    _, client = await http(server_config=kept_in(tmp_path))
    file_id = await upload(client, lines_of(question("Why?")))
    off_peak = {"input_file_id": file_id, "endpoint": CHAT, "off_peak": True}
    assert (await client.post("/v1/batches", json=off_peak)).json()["off_peak"] is True
    valid = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for asked, part in (
        ({**valid, "endpoint": "/v1/query"}, "endpoint: must be one of"),
        ({**valid, "completion_window": "1h"}, "completion_window: must be 24h"),
        ({**valid, "metadata": {"a": 1}}, "metadata.a: must be a text"),
        ({**valid, "model": "x"}, "model: is unknown"),
        ({**valid, "off_peak": "yes"}, "off_peak: "),
        ({**valid, "input_file_id": "file-1"}, "input_file_id: you have no file"),
    ):
        response = await client.post("/v1/batches", json=asked)
        assert response.status_code in (400, 404), asked
        assert part in response.json()["error"]["message"]
    form = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
    of_page = await client.post("/v1/files", **form, headers={"origin": "https://evil.example"})
    assert of_page.status_code == 415
    for wrong, part in (
        ({**form, "data": {"purpose": "user_data"}}, "purpose: must be batch"),
        ({**form, "files": {"other": ("a", b"{}")}}, "file: is required"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "a boundary"),
        ({"content": b"x", "headers": {"content-type": SLOW_TO_READ}}, "more than 1024 bytes"),
    ):
        response = await client.post("/v1/files", **wrong)
        assert response.status_code == 400 and part in response.json()["error"]["message"]
    failed = await created(client, b'{"custom_id": 1}\n[]\n' + lines_of(question("a"), url="/x"))
    assert failed["status"] == "failed" and failed["failed_at"] >= failed["created_at"]
    assert [each["line"] for each in failed["errors"]["data"]] == [1, 2, 3]
    deep = lines_of({"a": 1}).replace(b"1}", b"[" * 300 + b"]" * 300 + b"}")
    (told,) = (await created(client, deep))["errors"]["data"]
    assert "body: its objects and lists are nested too deeply" in told["message"]
    for limit in ("0", "101", "0" * 8 + "10000", "0" * 8 + "1" + "0" * 5000):
        assert (await client.get(f"/v1/batches?limit={limit}")).status_code == 400


async def test_a_download_that_fails_does_not_look_whole(http, tmp_path, monkeypatch):
    _, client = await http(server_config=kept_in(tmp_path))
    file_id = await upload(client, content := lines_of(question("a" * 2000)))
    monkeypatch.setattr(tables, "_PIECE_BYTES", 1000)
    assert (await client.get(f"/v1/files/{file_id}/content")).content == content
    read = tables.Tables.piece

    def deleted_between(self: tables.Tables, owner: Principal, name: str, at: int) -> Any:
        if at:
            self.db.execute("DELETE FROM files")
        return read(self, owner, name, at)

    monkeypatch.setattr(tables.Tables, "piece", deleted_between)
    with pytest.raises(httpx2.RemoteProtocolError, match="incomplete"):
        await client.get(f"/v1/files/{file_id}/content")


NAMES = {
    b'filename="\xc3\xa9t\xc3\xa9.jsonl"': "été.jsonl",
    b"filename=a.jsonl; filename*=UTF-8''%C3%A9t%C3%A9.jsonl": "été.jsonl",
    b"filename*=idna''%FF": "\ufffd",
    b'filename="../\xff;a=b.jsonl"': "../\ufffd;a=b.jsonl",
}
"""The forms in which clients write the name of a file, and the name."""


async def test_files_have_the_names_that_clients_gave_them(http, tmp_path):
    _, client = await http(server_config=kept_in(tmp_path))
    part = b'--B\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    headers = {"content-type": "multipart/form-data; boundary=B"}
    for given, name in NAMES.items():
        form = part % (b"purpose", b"batch") + part % (b'file"; %b; x="' % given, b"{}") + b"--B--"
        response = await client.post("/v1/files", content=form, headers=headers)
        assert response.json()["filename"] == name
    for wrong, told in (
        (form.removesuffix(b"--B--"), "the form has no end"),
        (b"--B\r\n\r\n\r\n" * 7 + form, "more than 8 parts"),
        (part % (b'file"; filename="a', b"{}") + form, "file: occurs twice"),
    ):
        refused = await client.post("/v1/files", content=wrong, headers=headers)
        assert refused.status_code == 400 and told in refused.text
    headers = {"content-type": "multipart/form-data; boundary=\u20ac".encode()}
    refused = await client.post("/v1/files", content=form, headers=headers)
    assert refused.status_code == 400 and "boundary" in refused.text

    async def number(query: str) -> int:
        return len((await client.get(f"/v1/files?{query}")).json()["data"])

    assert [await number(f"purpose={each}") for each in ("batch", "batch_output")] == [4, 0]
    assert await number("order=desc&limit=3") == 3
    for path, part in (
        ("files?order=asc", "order: must be desc"),
        ("batches?order=asc", "order: is unknown; known: after, limit"),
    ):
        response = await client.get(f"/v1/{path}")
        assert response.status_code == 400 and part in response.json()["error"]["message"]


async def test_both_wires_have_the_same_batches(http, tmp_path):
    _, client = await http(server_config=kept_in(tmp_path))

    async def ask(method: str, **fields: Any) -> dict[str, Any]:
        """By Connect."""
        response = await client.post(f"/kestrel.v1.BatchService/{method}", json=fields)
        return dict(response.json())

    of_file = await created(client, lines_of(question("a")))
    [listed] = (await ask("ListBatches"))["batches"]
    assert (listed["batchId"], listed["endpoint"]) == (of_file["id"], CHAT)
    message = json.dumps({"request": {"custom_id": "b", "skill": {"skill": {"name": "none"}}}})
    content = b"\0" + len(message).to_bytes(4) + message.encode()
    form = {"content-type": "application/connect+json"}
    path = "/kestrel.v1.BatchService/"
    made = await client.post(f"{path}CreateBatch", content=content, headers=form)
    typed = json.loads(made.content[5:].partition(b"}}")[0] + b"}}")["batch"]["batchId"]
    batch = await ended(client, typed)
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    [line] = await lines(client, batch["error_file_id"])
    assert line["custom_id"] == "b" and line["error"]["code"] == "NOT_FOUND"
    for batch_id, part in ((typed, b'"customId":"b"'), (of_file["id"], b"/v1/files")):
        message = json.dumps({"batch_id": batch_id}).encode()
        content = b"\0" + len(message).to_bytes(4) + message
        told = await client.post(f"{path}StreamBatchResults", content=content, headers=form)
        assert part in told.content


def test_requests_have_names_of_their_own():
    twice = lines_of(question("a")) + b"\n\n" + lines_of(question("b"))
    _, [error] = read_requests(twice, CHAT)
    assert error["line"] == 3 and "stands twice" in error["message"]
    [many] = read_requests(b'{"a": [' + b"0," * 20_001 + b"0]}", CHAT)[1]
    assert "more than 20000 values" in many["message"]
    assert read_requests(b"\n", CHAT)[1][0]["code"] == "empty_file"
    [many] = read_requests(b"\n" * 100_001, CHAT)[1]
    assert "more than 100000 lines" in many["message"]


async def test_a_cancelled_batch_keeps_its_answers(http, tmp_path):
    runtime = HeldRuntime()
    served, client = await http(runtime=runtime, server_config=kept_in(tmp_path, at_once=2))
    batch = await created(client, lines_of(*[question(f"{number}?") for number in range(5)]))
    assert await asyncio.to_thread(runtime.began.wait, 60)
    cancelled = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
    runtime.gate.set()
    assert cancelled["status"] == "cancelled" and cancelled["output_file_id"] is None
    found = await lines(client, cancelled["error_file_id"])
    assert [each["error"]["code"] for each in found] == ["batch_cancelled"] * 5
    again = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert again == cancelled
    await until(lambda: served.engine.num_requests == 0)


async def test_a_batch_goes_on_after_a_restart(http, tmp_path):
    config = kept_in(tmp_path)
    served, client = await http(runtime=EndlessRuntime(), server_config=config)
    batch = await created(client, lines_of(*[question("Why?", max_tokens=NO_END)] * 3))
    await until(lambda: served.engine.num_requests == 3)
    await served.server.stop(0)
    _, client = await http(server_config=config)
    batch = await ended(client, batch["id"])
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_a_full_disk_refuses_what_must_be_stored(http, tmp_path, caplog):
    served, client = await http(server_config=kept_in(tmp_path))
    db = served.server.batches.store._tables.db
    db.execute("PRAGMA max_page_count = 30")
    form = {"files": {"file": ("a", b"x" * 200_000)}, "data": {"purpose": "batch"}}
    response = await client.post("/v1/files", **form)
    assert response.status_code == 429 and "is full" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "60"
    assert not any(each.levelno >= logging.ERROR for each in caplog.records)
    await upload(client, b"{}")


async def test_answers_and_records_of_batches_count(tmp_path):
    one = Principal("one", frozenset())
    store = BatchStore(BatchesConfig(path=str(tmp_path / "a.db"), max_bytes=1 << 20))
    file = await store.add_file(one, "a", lines_of(*[question("a")] * 9))
    batch = await store.add_batch(one, NewBatch(CHAT, file["id"], "24h", {}), read_requests)
    for request in await store.claim(9, (CHAT,)):
        await store.answer(request, b"x" * 60_000, True)
    batch = await store.batch(one, batch["id"])
    assert batch["status"] == "failed" and "bytes of files and batches" in batch["errors"]
    assert (batch["completed"], batch["failed"]) == (5, 4), "what had an answer keeps it"
    output = [piece async for piece in store.content(one, batch["output_file_id"])]
    assert [len(piece) for piece in output] == [2 * 60_001] * 2 + [60_001]
    await store.delete_file(one, batch["output_file_id"])
    broken = await store.add_file(one, "b", b"{}")
    with pytest.raises(EngineOverloaded, match="bytes of files and batches"):
        for _ in range(17):
            await store.add_batch(one, NewBatch(CHAT, broken["id"], "24h", {}), read_requests)
    await store.close()


async def test_a_large_file_has_few_pieces(tmp_path):
    one, sent = Principal("one", frozenset()), bytes(range(256)) * 10_000
    store = BatchStore(BatchesConfig(path=str(tmp_path / "a.db")))
    file = await store.add_file(one, "a", sent)
    pieces = [piece async for piece in store.content(one, file["id"])]
    assert b"".join(pieces) == sent and len(pieces) == 3
    await store.close()


async def test_callers_have_shares_and_see_their_own(tmp_path, monkeypatch):

    one, other = Principal("one", frozenset(), 2.0, 500), Principal("other", frozenset())
    config = BatchesConfig(path=str(tmp_path / "a.db"), max_bytes=1 << 20)
    store = BatchStore(config)
    with pytest.raises(ConfigError, match="locked"):
        BatchStore(config)
    file = await store.add_file(one, "a", lines_of(*[question("a")] * 1, question("b")))
    for lost in (store.file(other, file["id"]), store.delete_file(other, file["id"])):
        with pytest.raises(StoredNotFound):
            await lost
    with pytest.raises(EngineOverloaded, match="bytes of files and batches"):
        await store.add_file(one, "b", b"x" * (1 << 18))
    asked = NewBatch(CHAT, file["id"])
    others = await store.add_file(other, "a", lines_of(question("c")))
    await store.add_batch(one, asked, read_requests)
    await store.add_batch(other, NewBatch(CHAT, others["id"]), read_requests)
    claimed = await store.claim(2, [CHAT])
    assert {each.owner.name for each in claimed} == {"one", "other"}, "callers in turn"
    assert {(each.owner.weight, each.owner.minute_tokens) for each in claimed} == {
        (2.0, 500),
        (1.0, None),
    }
    taken = {each.place for each in claimed}
    rest = await store.claim(5, [CHAT], (), taken)
    assert [each.number for each in rest] == [1], "each once"
    monkeypatch.setattr(tables, "MOST_OPEN", 1)
    with pytest.raises(EngineOverloaded, match="open batches"):
        await store.add_batch(one, asked, read_requests)
    # A day later, the batches have expired; after the days of the setting, all is gone.
    now = tables.clock.wall()
    monkeypatch.setattr(tables.clock, "wall", lambda: now + tables.WINDOW_S)
    await store.expire()
    [batch] = await store.batches(one, "", 5)
    assert batch["status"] == "expired" and batch["failed"] == 2
    assert await store.claim(5, [CHAT]) == []
    monkeypatch.setattr(tables.clock, "wall", lambda: now + 32 * 86_400)
    await store.expire()
    assert await store.batches(one, "", 5) == await store.files(one, "", 5) == []
    await store.close()


async def test_no_statement_reads_all_files_or_batches(tmp_path):
    one = Principal("one", frozenset())
    store = BatchStore(BatchesConfig(path=str(tmp_path / "a.db")))
    db, asked = store._tables.db, set()
    db.set_trace_callback(asked.add)
    file = await store.add_file(one, "a", lines_of(*[question("a")] * 3))
    made = [await store.add_batch(one, NewBatch(CHAT, file["id"]), read_requests) for _ in "abc"]
    listed = await store.batches(one, "", 2)
    listed += await store.batches(one, listed[-1]["id"], 2)
    assert sorted(each["id"] for each in listed) == sorted(each["id"] for each in made)
    for request in await store.claim(4, (CHAT,)):
        assert b"messages" in request.body
        await store.answer(request, b"x" * 1000, True)
    await store.cancel(one, made[1]["id"])
    await store.delete_batch(one, made[2]["id"])
    await store.delete_file(one, file["id"])
    db.set_trace_callback(None)
    kinds = ("SELECT", "UPDATE", "DELETE")
    plans = [
        (row["detail"], each)
        for each in asked
        if each.startswith(kinds)
        for row in db.execute(f"EXPLAIN QUERY PLAN {each}")
    ]
    open_ = "(?! USING .*open_batches_of)"
    assert len(plans) > 9 and not [
        p for p in plans if re.match(f"SCAN (files|batches){open_}", p[0])
    ]
    sizes = db.execute("SELECT total(bytes) FROM files").fetchone()[0]
    for row in db.execute("SELECT bytes, length(metadata) FROM batches"):
        sizes += BATCH_BYTES + sum(row)
    assert db.execute("SELECT bytes FROM held").fetchone()[0] == sizes
    await store.close()
