"""Connections that no regular client makes: the server continues to serve, and they write nothing into its log."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="counts spans")

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from tests.abuse.connections.rude_sockets import PREFACE, RudeCall, RudeCaller, frame
from tests.abuse.soak.__main__ import TOKEN, Server, rest, timed
from tests.abuse.soak.span_receiver import SpanReceiver
from tests.forking.process import ForkedProcess

FORGED = b'\n{"event": "forged"}\n'
EACH = 6


async def _abuse(address: str) -> None:
    request = pb.QueryRequest(query={"question": "What is this?"})
    asked = RudeCall("/kestrel.v1.VisionService/StreamQuery", request.SerializeToString(), TOKEN)
    caller = RudeCaller(address, asked, random.Random(1))

    async def several(kind) -> None:
        for _ in range(EACH):
            try:
                # A busy machine needs longer than the second of --write-timeout to notice.
                await kind(5.0 if kind == caller.never_reads else 0.1)
            except OSError:
                pass

    await asyncio.gather(*(several(kind) for kind in caller.kinds))
    # A goaway's last words come from the stranger as they are.
    host, port = address.split(":")
    goaway = frame(7, 0, 0, bytes(8) + FORGED)
    header = b"\x00\x0cgrpc-timeout" + bytes([len(FORGED)]) + FORGED
    for data in (goaway, frame(1, 5, 1, header), FORGED):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(4, 0, 0) + data)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()


@pytest.mark.slow
def test_rude_connections_cost_nothing_that_lasts_and_write_no_log(tmp_path: Path) -> None:
    with SpanReceiver() as receiver, Server(tmp_path, receiver.endpoint, ForkedProcess) as server:
        with grpc.insecure_channel(server.address) as channel:
            vision = VisionServiceStub(channel)
            timed(vision)
            normal = rest(server, None)
            asyncio.run(_abuse(server.address))
            timed(vision)
            held = rest(server, normal)
        assert held.tasks <= normal.tasks
        assert held.descriptors <= normal.descriptors
        assert (held.calls, held.requests, held.lost_pages, held.held_bytes) == (0, 0, 0, 0)
    assert server.status == 0
    records = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert [r for r in records if r["level"] != "INFO"] == []
    events = Counter(record.get("event") for record in records)
    assert events["forged"] == 0
    codes = Counter(record["code"] for record in records if record.get("event") == "call")
    assert codes["OK"] >= 60, "the calls between"
    assert codes["RESOURCE_EXHAUSTED"] == EACH, "those who never read"
    # Headers of garbage may make a call without a token.
    refused = {"RESOURCE_EXHAUSTED", "CANCELLED", "INVALID_ARGUMENT", "UNAUTHENTICATED"}
    assert set(codes) <= {"OK", *refused}, codes
