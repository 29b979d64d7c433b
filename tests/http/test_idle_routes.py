"""What an HTTP port and batches that nobody uses cost a call by gRPC, in functions that it calls."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.settings.batches import BatchesConfig
from kestrel_grpc.settings.http import HttpConfig
from tests.service.conftest import Serve

ROOMS = [f"kestrel_grpc/{room}/" for room in ("batches", "http", "telemetry")]
CALLS = 128
"""As many as the metrics count together."""


async def functions(serve: Serve, **config: object) -> float:
    """The functions of ROOMS that the event loop calls for each call."""
    served = await serve(server_config=config)
    question = pb.QueryRequest(query={"question": "What?", "max_tokens": 1})
    await served.vision.Query(question)
    counts: Counter[str] = Counter()

    def profile(frame, event, argument):
        if event == "call" and any(room in frame.f_code.co_filename for room in ROOMS):
            counts[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        for _ in range(CALLS // 16):
            await asyncio.gather(*(served.vision.Query(question) for _ in range(16)))
    finally:
        sys.setprofile(None)
    return counts.total() / CALLS


async def test_idle_routes_call_few_functions_for_each_call(serve: Serve, tmp_path: Path):
    pytest.importorskip("prometheus_client")
    batches = BatchesConfig(path=str(tmp_path / "batches.db"))
    http = HttpConfig(http_listen=("127.0.0.1:0",))
    assert 1 < await functions(serve, http=http, batches=batches) < 6
