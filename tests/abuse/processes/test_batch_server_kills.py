"""kill -9 of a whole server under a running batch: no row is lost, and none has two results.

KESTREL_BATCH_KILLS says how many kills there are. The seed is their number.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import batch_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.batch_service_pb2_grpc import BatchServiceStub
from tests.abuse.process import ServerProcess
from tests.waiting import wait_until

KILLS = int(os.environ.get("KESTREL_BATCH_KILLS", "5"))
ROWS = 25 * KILLS


def rows() -> Iterator[pb.CreateBatchRequest]:
    for number in range(ROWS):
        request = {"query": {"query": {"question": f"{number}?", "max_tokens": 1 + number % 7}}}
        yield pb.CreateBatchRequest(request={"custom_id": f"row-{number}", **request})


def begin(stub: Any, kill: Any, path: Path) -> None:
    """Kills the server while a batch arrives."""
    arrives = threading.Event()

    def endless() -> Iterator[pb.CreateBatchRequest]:
        text = "x" * 1_100_000  # The server stores requests when they have a megabyte.
        request = {"custom_id": "lost", "query": {"query": {"question": text}}}
        yield pb.CreateBatchRequest(request=request)
        arrives.wait()

    call = stub.CreateBatch.future(endless())

    log = Path(f"{path}-wal")
    wait_until(lambda: log.exists() and log.stat().st_size > 1_000_000)
    kill()
    assert call.exception() is not None
    arrives.set()


@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * KILLS)
def test_each_row_has_one_result(tmp_path):
    chance, path, batch_id = random.Random(KILLS), tmp_path / "batches.db", ""
    seen: list[pb.StreamBatchResultsResponse] = []
    answered_before = 0
    for kill in range(-1, KILLS + 1):
        with (
            ServerProcess(tmp_path, "--batches", str(path)) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            stub: Any = BatchServiceStub(channel)
            if kill < 0:
                begin(stub, server.popen.kill, path)
                continue
            if not batch_id:
                assert not stub.ListBatches(pb.ListBatchesRequest()).batches
                batch_id = stub.CreateBatch(rows()).batch.batch_id
            batch = stub.GetBatch(pb.GetBatchRequest(batch_id=batch_id)).batch
            assert not batch.done and batch.completed_requests >= max(len(seen), answered_before)
            answered_before = batch.completed_requests
            most = len(seen) + chance.randint(0, 8) if kill < KILLS else ROWS
            asked = pb.StreamBatchResultsRequest(batch_id=batch_id, start_index=len(seen))
            stream = stub.StreamBatchResults(asked)
            while len(seen) < most:
                seen.append(next(stream))
            if kill < KILLS:
                time.sleep(chance.uniform(0, 0.03))
            else:
                assert list(stream) == []
                batch = stub.GetBatch(pb.GetBatchRequest(batch_id=batch_id)).batch
    assert [each.index for each in seen] == list(range(ROWS))
    assert [each.custom_id for each in seen] == [f"row-{number}" for number in range(ROWS)]
    assert [each.query.usage.output_tokens for each in seen] == [1 + n % 7 for n in range(ROWS)]
    assert batch.state == pb.BATCH_STATE_COMPLETED and batch.completed_requests == ROWS
    with sqlite3.connect(path) as db:
        stored = db.execute("SELECT count(*), count(line), min(succeeded) FROM requests")
        assert stored.fetchone() == (ROWS, ROWS, 1), "also of the batch that did not arrive"
