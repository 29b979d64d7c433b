"""Load signals for routers: GetLoad and the load report in trailers, read by a real client."""

import asyncio
import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

from kestrel_client import AsyncKestrelClient
from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_engine import RuntimeConfig, clock
from kestrel_grpc.edge.calls.call import Call
from kestrel_grpc.monitoring.load import WINDOW_S, LoadMeter
from kestrel_grpc.monitoring.orca import FRESH_S, LoadReports
from kestrel_grpc.security.identity.principal import Scope
from kestrel_grpc.security.identity.tokens import line_of, new_token
from kestrel_grpc.served_model import ServedModel, ServedModels
from kestrel_grpc.services import load_reports
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.conftest import ENDLESS, LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure
from tests.waiting import until

TRAILER = "endpoint-load-metrics-bin"
BUF = Path(sys.executable).parent / "buf"
SHORT = {"query": {"question": "?", "maxTokens": 2}}
LOAD = model_service_pb2.GetLoadRequest()


def query(max_tokens=2, **fields):
    return pb.QueryRequest(
        query=pb.QueryTask(
            question="what?", max_tokens=max_tokens, sampling=common_pb2.Sampling(temperature=0)
        ),
        **fields,
    )


def orca_message():
    """xds.data.orca.v3.OrcaLoadReport, as the xDS interface numbers its fields."""
    file = descriptor_pb2.FileDescriptorProto(
        name="orca_load_report.proto", package="xds.data.orca.v3", syntax="proto3"
    )
    message = file.message_type.add(name="OrcaLoadReport")
    kinds = descriptor_pb2.FieldDescriptorProto
    double = {"type": kinds.TYPE_DOUBLE, "label": kinds.LABEL_OPTIONAL}
    shares = {1: "cpu_utilization", 2: "mem_utilization", 9: "application_utilization"}
    for number, name in {**shares, 6: "rps_fractional", 7: "eps"}.items():
        message.field.add(name=name, number=number, **double)
    for number, name in ((5, "utilization"), (8, "named_metrics")):
        pair = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        pair.options.map_entry = True
        pair.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
        pair.field.add(name="value", number=2, **double)
        kind = {"type": kinds.TYPE_MESSAGE, "label": kinds.LABEL_REPEATED}
        message.field.add(
            name=name,
            number=number,
            type_name=f".xds.data.orca.v3.OrcaLoadReport.{pair.name}",
            **kind,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport")
    return message_factory.GetMessageClass(found)


async def ask(served, method, message):
    """(exit status, the trailer's report or None) of a call by buf: gRPC's C core, and so Python, keeps this trailer
    from its applications."""
    process = await asyncio.create_subprocess_exec(
        *(BUF, "curl", "-v", "--protocol", "grpc", "--http2-prior-knowledge"),
        *("-d", json.dumps(message), f"http://{served.server.addresses[0]}/kestrel.v1.{method}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, err = await process.communicate()
    # The call's own trailers come last, after those of reflection.
    found = re.findall(rf"(?i){TRAILER}: (\S+)", err.decode())
    if not found:
        return process.returncode, None
    encoded = base64.b64decode(found[-1] + "=" * (-len(found[-1]) % 4))
    return process.returncode, orca_message().FromString(encoded)


@pytest.fixture
def stopped_clock():
    with clock.installed(now=lambda: 1e6):
        yield


async def test_the_load_of_a_busy_server(stopped_clock, serve):
    served = await serve(EndlessRuntime(), max_queue=9)
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        idle = await client.server_load()
        assert (idle.ready, idle.state, idle.utilization) == (True, "ready", 0)
        assert (idle.max_batch_size, idle.max_queue) == (LIMITS.max_batch_size, 9)
        assert (idle.pages, idle.free_pages) == (ENDLESS.num_pages, ENDLESS.num_pages)
        calls = [asyncio.ensure_future(served.vision.Query(query(NO_END))) for _ in range(5)]
        await until(lambda: served.engine.stats.running == 3 and served.engine.num_requests == 5)
        busy = await client.server_load()
        assert (busy.running_requests, busy.waiting_requests) == (3, 2)
        assert busy.utilization == pytest.approx(5 / 3)
        assert busy.free_pages < busy.pages and 0 < busy.memory_utilization < 1
        served.runtime.ends.set()
        answers = await asyncio.gather(*calls)
        for _ in range(2):
            answers.append(await served.vision.Query(query(images=[raw_image()])))
        tokens = sum(answer.usage.output_tokens for answer in answers)
        after = await client.server_load()
        assert (after.running_requests, after.waiting_requests) == (0, 0)
        assert after.cached_pages > 0 and 0 < after.prefix_hit_rate < 1
        # Over as long as the server is there, but at least one second.
        assert after.requests_per_second == 7
        assert after.output_tokens_per_second == tokens
        assert after.errors_per_second == 0
        assert after.to_dict()["state"] == "ready"


async def test_the_load_while_loading_and_draining(serve):
    served = await serve(load=False)
    load = await served.models.GetLoad(LOAD)
    assert (load.ready, load.state) == (False, model_service_pb2.MODEL_STATE_LOADING)
    await served.server.load()
    assert (await served.models.GetLoad(LOAD)).ready
    await served.server.drain()
    load = await served.models.GetLoad(LOAD)
    assert (load.ready, load.state) == (False, model_service_pb2.MODEL_STATE_DRAINING)


async def test_who_may_ask_for_the_load(serve, tmp_path):
    tokens = {scope: new_token() for scope in Scope}
    path = tmp_path / "tokens"
    path.write_text("\n".join(line_of(s.value, [s], token) for s, token in tokens.items()))
    served = await serve(server_config={"security": SecurityConfig(auth_tokens=str(path))})
    assert (await failure(served.models.GetLoad(LOAD))).code is grpc.StatusCode.UNAUTHENTICATED
    for scope in Scope:
        call = served.models.GetLoad(LOAD, metadata=(("authorization", f"Bearer {tokens[scope]}"),))
        if scope in (Scope.INFER, Scope.METRICS):
            assert (await call).ready
        else:
            assert (await failure(call)).reason == "SCOPE_MISSING"


async def test_trailers_report_the_load_of_unary_calls_streams_and_failures(serve):
    served = await serve(EndlessRuntime(), server_config={"orca": True})
    # Longer than the test: neither a slow machine nor an ending leaves the server idle.
    busy = served.vision.StreamQuery(query(NO_END))
    await busy.read()
    unary, told = await ask(served, "VisionService/Query", SHORT)
    streamed, again = await ask(served, "VisionService/StreamQuery", SHORT)
    failed, refused = await ask(served, "VisionService/Query", {})
    asked, nothing = await ask(served, "ModelService/GetLoad", {})
    assert not busy.done()
    busy.cancel()
    assert unary == streamed == asked == 0 < failed
    assert nothing is None
    for report in (told, again, refused):
        # The call itself may have left the batch, or the engine, or neither yet.
        assert 1 / 3 <= report.application_utilization <= 2 / 3
        assert report.named_metrics["running_requests"] >= 1
        assert report.named_metrics["waiting_requests"] <= 1
        assert report.named_metrics["kv_cache_pages"] == ENDLESS.num_pages
        assert 0 < report.utilization["kv_cache"] < 1 and 0 < report.mem_utilization < 1
    assert max(report.rps_fractional for report in (told, again, refused)) > 0


async def test_no_report_unless_asked(serve):
    assert await ask(await serve(), "VisionService/Query", SHORT) == (0, None)


def test_a_report_is_read_again_once_it_is_old(still_clock):
    began, reads = still_clock.now(), []

    def read():
        reads.append(still_clock.now() - began)
        return meter.read()

    meter = LoadMeter(ServedModels(ServedModel(RuntimeConfig())))
    reports = LoadReports(read)
    first = reports.trailer("/kestrel.v1.VisionService/Query")
    assert first == ((TRAILER, reports.current()),) and reports.current()
    still_clock.advance(0.9 * FRESH_S)
    assert reports.trailer("/kestrel.v1.VisionService/Point") == first
    assert reports.trailer("/kestrel.v1.ModelService/GetLoad") == ()
    still_clock.advance(0.2 * FRESH_S)
    reports.current()
    assert reads == pytest.approx([0, 1.1 * FRESH_S])


STREAM = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"


def reports_of(channel, interval_s=0, metadata=None):
    """A stream of reports. The request is OrcaLoadReportRequest, whose first field is the interval, a Duration."""
    interval = duration_pb2.Duration()
    interval.FromMilliseconds(round(1000 * interval_s))
    encoded = interval.SerializeToString()
    stream = channel.unary_stream(STREAM, response_deserializer=orca_message().FromString)
    return stream(bytes((1 << 3 | 2, len(encoded))) + encoded, metadata=metadata)


async def test_reports_in_a_stream(serve, monkeypatch):
    pauses_s, ends = [], asyncio.Semaphore(0)

    async def sleep(seconds):
        pauses_s.append(seconds)
        await ends.acquire()

    monkeypatch.setattr(load_reports, "asyncio", SimpleNamespace(sleep=sleep))
    served = await serve(EndlessRuntime(), server_config={"orca": True})
    stream = reports_of(served.channel)
    idle = await stream.read()
    assert idle.application_utilization == 0
    assert idle.named_metrics["kv_cache_pages"] == ENDLESS.num_pages
    busy = served.vision.StreamQuery(query(NO_END))
    await busy.read()
    ends.release()
    while (await stream.read()).named_metrics["running_requests"] != 1:
        ends.release()
    busy.cancel()
    stream.cancel()
    for interval_s in (600, 1e6):
        assert await reports_of(served.channel, interval_s=interval_s).read()
    await until(lambda: 3600 in pauses_s)
    assert set(pauses_s) == {1, 600, 3600}, "no faster than once a second"


async def test_who_may_read_the_stream_and_how_many_of_them(serve, tmp_path):
    tokens = {scope: new_token() for scope in Scope}
    path = tmp_path / "tokens"
    path.write_text("\n".join(line_of(s.value, [s], token) for s, token in tokens.items()))
    security = SecurityConfig(auth_tokens=str(path))
    served = await serve(server_config={"orca": True, "security": security})
    served.server.guard.visits.most_of_one = 2

    def opened(scope):
        return reports_of(served.channel, metadata=(("authorization", f"Bearer {tokens[scope]}"),))

    assert (await failure(reports_of(served.channel))).code is grpc.StatusCode.UNAUTHENTICATED
    assert (await failure(opened(Scope.ADMIN))).reason == "SCOPE_MISSING"
    held = [opened(Scope.METRICS), opened(Scope.METRICS)]
    for stream in held:
        assert await stream.read()
    told = await failure(opened(Scope.METRICS))
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    assert await opened(Scope.INFER).read(), "another principal"


async def test_no_stream_unless_asked(serve):
    told = await failure(reports_of((await serve()).channel))
    assert told.code is grpc.StatusCode.UNIMPLEMENTED


async def test_grpcs_own_balancer_reads_the_stream(serve):
    served = await serve(server_config={"orca": True})
    policy = {"enableOobLoadReport": True, "oobReportingPeriod": "1s"}
    config = json.dumps({"loadBalancingConfig": [{"weighted_round_robin": policy}]})
    options = [("grpc.service_config", config), ("grpc.use_local_subchannel_pool", 1)]
    address = served.server.addresses[0]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await VisionServiceStub(channel).Query(query())
        await until(lambda: served.server.guard.visits.streams == 1)


def test_rates_are_of_the_last_seconds(still_clock):
    meter = LoadMeter(ServedModels(ServedModel(RuntimeConfig())))
    call = Call(method="/kestrel.v1.VisionService/Query", peer="", context=None)
    still_clock.advance(100.0)
    for seconds in (0, 1.5, 6.5):
        still_clock.advance(seconds)
        meter.on_call(call)
    call.error = ValueError()
    meter.on_call(call)
    meter.on_call(Call(method="/kestrel.v1.ModelService/GetLoad", peer="", context=None))
    still_clock.advance(2.0)
    load = meter.read()
    # From the second second on: three calls in nine seconds and the present one.
    assert load.requests_per_s == pytest.approx(3 / (WINDOW_S - 1))
    assert load.errors_per_s == pytest.approx(1 / (WINDOW_S - 1))
    still_clock.advance(790.0)
    assert meter.read().requests_per_s == 0
