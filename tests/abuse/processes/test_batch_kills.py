"""kill -9 of a process that answers batches, at any point: no request is lost, and none is answered twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kestrel_grpc.batches.requests import read_requests
from kestrel_grpc.batches.store import BatchStore
from kestrel_grpc.batches.tables import NewBatch
from kestrel_grpc.security.identity.principal import Principal
from kestrel_grpc.settings.batches import BatchesConfig
from tests.forking.process import ROOT, ForkedProcess

OWNER = Principal("one", frozenset())


def killed_after(path: Path, answers: int) -> None:
    """Kills a process once it has begun so many answers, if there are so many."""
    process: Any = ForkedProcess(
        [sys.executable, "-m", "tests.abuse.processes.batch_process", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    for _ in range(answers):
        process.stdout.readline()
    process.kill()
    process.wait(60)
    process.stdout.close()


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
async def test_each_request_is_answered_once(tmp_path, kills):
    chance, path = random.Random(kills), tmp_path / "batches.db"
    config, num_requests = BatchesConfig(path=str(path)), 12 * kills
    rows = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"n": number},
        }
        for number in range(num_requests)
    ]
    store = BatchStore(config)
    file = await store.add_file(OWNER, "a", "\n".join(map(json.dumps, rows)).encode())
    batch = await store.add_batch(OWNER, NewBatch("/v1/responses", file["id"]), read_requests)
    await store.close()
    for _ in range(kills):
        killed_after(path, chance.randint(4, 9))
    store = BatchStore(config)
    while waiting := await store.claim(
        100, ["/v1/responses"]
    ):  # What the killed ones have not answered.
        for each in waiting:
            await store.answer(each, json.dumps({"custom_id": each.custom_id}).encode(), True)
    [ended] = await store.batches(OWNER, "", 5)
    assert ended["id"] == batch["id"] and ended["status"] == "completed"
    content = b"".join([piece async for piece in store.content(OWNER, ended["output_file_id"])])
    names = [json.loads(line)["custom_id"] for line in content.splitlines()]
    assert names == [row["custom_id"] for row in rows]
    assert 0 < content.count(b"id-") < num_requests, "the killed ones have answered some"
    await store.close()
