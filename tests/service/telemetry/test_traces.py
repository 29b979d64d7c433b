"""Spans as a collector receives them, of calls that end well, fail, are cancelled or expire."""

import asyncio
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import grpc
import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import image_service_pb2 as image_pb
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.types.step import StepResult
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.telemetry import telemetry_config
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import ENDLESS, NO_END, raw_image
from tests.service.statuses import failure
from tests.waiting import outlived, until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
QUERY = pb.QueryRequest(
    images=[raw_image()],
    query=pb.QueryTask(question="a secret?", max_tokens=4, sampling=common_pb2.Sampling(top_p=0.5)),
)
LONG = pb.QueryRequest(
    images=[raw_image()], query=pb.QueryTask(question="what?", max_tokens=NO_END)
)


class TimedRuntime(FakeRuntime):
    """Says how long each phase of a step took."""

    def collect(self, handle):
        result = super().collect(handle)
        return StepResult(
            tokens=result.tokens,
            readings=result.readings,
            vision_s=0.001 if handle.encode else 0.0,
            prefill_s=0.001 if handle.prefill else 0.0,
            decode_s=0.001 if handle.decode else 0.0,
        )


def runtime():
    """Never says the end, a letter every 5 ms."""
    return TimedRuntime(ENDLESS, lambda fed: 197, cost=lambda plan: 0.005)


@pytest.fixture
def serve_traced(serve, collector):
    async def start(**config):
        telemetry = telemetry_config(os.environ)
        return await serve(runtime(), server_config={"telemetry": telemetry}, **config)

    return start


def attributes(item):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in item.attributes}


async def trace(collector, trace_id=TRACE_ID):
    """The spans of one trace by name, once its server span is there; it comes last."""

    def mine():
        return [s for s in collector.spans() if s.trace_id.hex() == trace_id]

    await until(lambda: any(s.kind == Span.SPAN_KIND_SERVER for s in mine()))
    return {span.name.split(" ")[0]: span for span in mine()}


async def test_a_call_becomes_a_trace_below_its_callers(serve_traced, collector):
    served = await serve_traced()
    call = served.vision.Query(QUERY, metadata=SAMPLED)
    told = dict(await call.initial_metadata())
    response = await call
    assert told == {"x-request-id": response.info.request_id, "x-trace-id": TRACE_ID}
    spans = await trace(collector)
    server, generate = spans["kestrel.v1.VisionService/Query"], spans["generate_content"]
    assert server.parent_span_id.hex() == PARENT_ID
    assert server.status.code == Status.STATUS_CODE_UNSET
    assert generate.parent_span_id == server.span_id
    inner = ("image.preprocess", "queue", "vision.encode", "prefill", "decode")
    assert {spans[name].parent_span_id for name in inner} == {generate.span_id}
    assert spans["postprocess"].parent_span_id == server.span_id
    assert set(spans) == {server.name, "generate_content", "postprocess", *inner}
    starts = [spans[name].start_time_unix_nano for name in inner]
    assert starts == sorted(starts)
    for span in spans.values():
        assert server.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= server.end_time_unix_nano
    # Three steps after the first token, of 5 ms each.
    decode = spans["decode"]
    assert 14e6 < decode.end_time_unix_nano - decode.start_time_unix_nano < 60e9
    facts = attributes(server)
    assert facts["rpc.system.name"] == "grpc"
    assert facts["rpc.method"] == "kestrel.v1.VisionService/Query"
    assert facts["rpc.response.status_code"] == facts["rpc.status_code"] == "OK"
    assert facts["network.peer.address"] == "127.0.0.1" and facts["network.peer.port"] > 0
    assert facts["kestrel.request.id"] == response.info.request_id
    facts = attributes(generate)
    assert facts["gen_ai.operation.name"] == "generate_content"
    assert facts["gen_ai.request.model"] == facts["gen_ai.response.model"] == "fake"
    assert (facts["gen_ai.request.max_tokens"], facts["gen_ai.request.top_p"]) == (4, 0.5)
    assert "gen_ai.request.seed" not in facts and facts["gen_ai.request.stream"] is False
    assert facts["gen_ai.usage.input_tokens"] == response.usage.input_tokens
    assert facts["gen_ai.usage.output_tokens"] == 4
    image = response.usage.image_tokens
    assert facts["gen_ai.usage.image.input_tokens"] == image > 0
    assert facts["gen_ai.usage.text.input_tokens"] == response.usage.input_tokens - image
    assert facts["gen_ai.usage.text.output_tokens"] == 4
    assert not [name for name in facts if "text.cache_read" in name or "reasoning.level" in name]
    assert (facts["mm.modality"], facts["mm.hash_count"], facts["mm.hit"]) == ("image", 1, False)
    assert [v.string_value for v in facts["gen_ai.response.finish_reasons"].values] == ["length"]
    assert (facts["kestrel.image.width"], facts["kestrel.image.height"]) == (60, 40)
    assert 0 < facts["gen_ai.response.time_to_first_chunk"] < 60
    assert "secret" not in str(spans)


async def test_spans_link_to_the_steps_they_shared(serve_traced, collector):
    served = await serve_traced()

    def servers():
        return [s for s in collector.spans() if s.kind == Span.SPAN_KIND_SERVER]

    await asyncio.gather(*(served.vision.Query(QUERY, metadata=SAMPLED) for _ in range(2)))
    await until(lambda: len(servers()) == 2)
    spans = await trace(collector)
    steps = {s.span_id: s for s in collector.spans() if s.name == "step"}
    linked = spans["prefill"].links
    assert linked and {link.span_id for link in linked} <= set(steps)
    assert spans["vision.encode"].links[0].span_id in steps
    step = steps[linked[0].span_id]
    assert step.trace_id.hex() != TRACE_ID and not step.parent_span_id
    assert attributes(step)["kestrel.step.requests"] >= 1
    assert {link.span_id for link in step.links} <= {s.span_id for s in servers()}


async def test_a_cached_image_has_no_vision_span(serve_traced, collector):
    served = await serve_traced()
    await served.vision.Query(QUERY)
    await served.vision.Query(QUERY, metadata=SAMPLED)
    spans = await trace(collector)
    assert "vision.encode" not in spans and "prefill" in spans
    told = attributes(spans["generate_content"])
    cached = told["gen_ai.usage.cache_read.input_tokens"]
    assert cached > told["gen_ai.usage.image.cache_read.input_tokens"] == 81
    assert told["gen_ai.usage.text.cache_read.input_tokens"] == cached - 81
    assert told["mm.hit"] is True


async def test_a_request_without_an_image_and_with_reasoning(serve_traced, collector):
    served = await serve_traced()
    task = pb.QueryTask(question="why?", reasoning=True, max_tokens=3)
    await served.vision.Query(pb.QueryRequest(query=task), metadata=SAMPLED)
    told = attributes((await trace(collector))["generate_content"])
    assert told["gen_ai.request.reasoning.level"] == "on"
    assert (told["mm.modality"], told["mm.hash_count"]) == ("none", 0)
    assert not [name for name in told if ".image." in name or name == "mm.hit"]


async def test_embeddings_have_an_operation_of_their_own(serve_traced, collector):
    served = await serve_traced()
    request = pb.EmbedRequest(
        image=raw_image(), embed=pb.EmbedTask(parts="EMBEDDING_PARTS_IMAGE_AND_CROPS")
    )
    await served.vision.Embed(request, metadata=SAMPLED)
    spans = await trace(collector)
    assert "vision.encode" in spans and "queue" in spans
    assert not {"prefill", "decode", "generate_content"} & spans.keys()
    told = attributes(spans["embeddings"])
    assert told["gen_ai.operation.name"] == "embeddings" and told["kestrel.skill"] == "embed"
    assert told["gen_ai.usage.output_tokens"] == 0 and "gen_ai.output.type" not in told


async def test_a_failed_request(serve_traced, collector, caplog):
    served = await serve_traced()
    served.runtime.fail_next = RuntimeError("the device is on fire")
    told = await failure(served.vision.Query(QUERY, metadata=SAMPLED))
    assert told.code is grpc.StatusCode.INTERNAL
    assert told.trailers["x-trace-id"] == TRACE_ID
    spans = await trace(collector)
    server = spans["kestrel.v1.VisionService/Query"]
    assert server.status.code == Status.STATUS_CODE_ERROR
    assert attributes(server)["error.type"] == "INTERNAL"
    assert [event.name for event in server.events] == ["exception"]
    assert spans["generate_content"].status.code == Status.STATUS_CODE_ERROR
    assert attributes(spans["generate_content"])["error.type"] == "RuntimeFailure"
    assert "decode" not in spans


async def test_a_callers_mistake_is_no_error_of_the_server(serve_traced, collector):
    served = await serve_traced()
    told = await failure(served.vision.Query(pb.QueryRequest(), metadata=SAMPLED))
    assert told.code is grpc.StatusCode.INVALID_ARGUMENT
    spans = await trace(collector)
    assert set(spans) == {"kestrel.v1.VisionService/Query"}
    (server,) = spans.values()
    assert server.status.code == Status.STATUS_CODE_UNSET and not server.events
    assert attributes(server)["rpc.response.status_code"] == "INVALID_ARGUMENT"


async def test_a_cancelled_stream(serve_traced, collector):
    served = await serve_traced()
    call = served.vision.StreamQuery(LONG, metadata=SAMPLED)
    for _ in range(3):
        await call.read()
    call.cancel()
    spans = await trace(collector)
    server = spans["kestrel.v1.VisionService/StreamQuery"]
    assert server.status.code == Status.STATUS_CODE_UNSET
    assert [event.name for event in server.events] == ["cancelled"]
    facts = attributes(spans["generate_content"])
    assert [v.string_value for v in facts["gen_ai.response.finish_reasons"].values] == ["cancelled"]
    assert facts["gen_ai.request.stream"] is True
    assert "decode" in spans


async def test_a_stream_by_http_is_a_stream(serve, collector):
    http = HttpConfig(http_listen=("127.0.0.1:0",))
    config = {"telemetry": telemetry_config(os.environ), "http": http}
    served = await serve(runtime(), server_config=config)
    asked = {"question": "what?", "stream": True, "settings": {"max_tokens": 2}}
    async with httpx2.AsyncClient(headers=dict(SAMPLED)) as client:
        url = f"http://{served.server.http_addresses[0]}/v1/query"
        assert (await client.post(url, json=asked)).status_code == 200
    spans = await trace(collector)
    assert attributes(spans["generate_content"])["gen_ai.request.stream"] is True


async def test_a_deadline(serve_traced, collector):
    served = await serve_traced()
    trace_ids = (f"{number:032x}" for number in count(1))

    async def expired(timeout):
        trace_id, steps = next(trace_ids), len(served.runtime.plans)
        metadata = (("traceparent", f"00-{trace_id}-{PARENT_ID}-01"),)
        told = await failure(served.vision.Query(LONG, timeout=timeout, metadata=metadata))
        assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
        return await trace(collector, trace_id) if len(served.runtime.plans) > steps else {}

    spans = await outlived(expired, lambda spans: "decode" in spans)
    server = spans["kestrel.v1.VisionService/Query"]
    assert server.status.code == Status.STATUS_CODE_ERROR
    assert attributes(server)["error.type"] == "DEADLINE_EXCEEDED"
    assert [event.name for event in server.events] == ["deadline_exceeded"]


async def test_tasks_of_one_call_have_spans_of_their_own(serve_traced, collector):
    served = await serve_traced()
    tasks = [pb.Task(query=pb.QueryTask(question=q, max_tokens=4)) for q in "abc"]
    request = pb.AnalyzeRequest(image=raw_image(), tasks=tasks)
    await served.vision.Analyze(request, metadata=SAMPLED)
    spans = await trace(collector)
    server = spans["kestrel.v1.VisionService/Analyze"]
    generated = [s for s in collector.spans() if s.name.startswith("generate_content")]
    assert len(generated) == 3
    assert {s.parent_span_id for s in generated} == {server.span_id}
    # One image, prepared once and ahead.
    [prepared] = [s for s in collector.spans() if s.name == "image.preprocess"]
    assert prepared.parent_span_id == server.span_id
    assert server.start_time_unix_nano <= prepared.start_time_unix_nano
    assert prepared.end_time_unix_nano <= min(s.start_time_unix_nano for s in generated)
    facts = attributes(prepared)
    assert (facts["kestrel.image.width"], facts["kestrel.image.height"]) == (60, 40)
    assert facts["kestrel.image.preprocess_s"] > 0


async def test_images_that_are_put_or_uploaded_have_a_span(serve_traced, collector):
    served = await serve_traced()
    png = (
        Path(__file__).parents[3] / "clients/python/kestrel_client/commands/demo.jpg"
    ).read_bytes()

    def upload():
        yield image_pb.UploadImageRequest(info=image_pb.UploadInfo())
        yield image_pb.UploadImageRequest(chunk=png)

    request = image_pb.PutImageRequest(image=common_pb2.Image(encoded=png))
    await served.images.PutImage(request, metadata=SAMPLED)
    await served.images.UploadImage(upload(), metadata=SAMPLED)
    broken = image_pb.PutImageRequest(image=common_pb2.Image(encoded=b"no picture"))
    await failure(served.images.PutImage(broken, metadata=SAMPLED))

    def prepared():
        return [s for s in collector.spans() if s.name == "image.preprocess"]

    def servers():
        return {s.name.rpartition("/")[2]: s for s in collector.spans() if s.kind == 2}

    await until(lambda: len(prepared()) == 3 and len(servers()) == 2)
    assert [s.status.code for s in prepared()] == [0, 0, Status.STATUS_CODE_ERROR]
    assert {s.parent_span_id for s in prepared()} >= {servers()["UploadImage"].span_id}
    assert attributes(prepared()[2])["error.type"] == "UnsupportedImageError"


async def test_the_callers_decision_is_kept_and_ids_are_told_all_the_same(serve_traced, collector):
    served = await serve_traced()
    unsampled = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00"),)
    call = served.vision.Query(QUERY, metadata=unsampled)
    assert dict(await call.initial_metadata())["x-trace-id"] == TRACE_ID
    await call
    await served.server.telemetry.close()
    assert collector.spans() == []


async def test_the_samplers_variables_count(serve_traced, collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    served = await serve_traced()
    call = served.vision.Query(QUERY)
    root = dict(await call.initial_metadata())["x-trace-id"]
    assert re.fullmatch("[0-9a-f]{32}", root)
    await served.vision.Query(QUERY, metadata=SAMPLED)
    await trace(collector)
    assert {s.trace_id.hex() for s in collector.spans() if s.name != "step"} == {TRACE_ID}
    assert collector.resource()["service.name"] == "kestrel-grpc"
    assert collector.resource()["deployment.environment.name"] == "test"


async def test_a_broken_traceparent_begins_a_new_trace(serve_traced, collector):
    served = await serve_traced()
    broken = (("traceparent", "00-zz-zz-01"), ("tracestate", "=,=" * 100), ("baggage", "%%=;;,"))
    call = served.vision.Query(QUERY, metadata=broken)
    root = dict(await call.initial_metadata())["x-trace-id"]
    spans = await trace(collector, root)
    assert not spans["kestrel.v1.VisionService/Query"].parent_span_id


async def test_questions_and_answers_only_where_wanted(serve_traced, collector, monkeypatch):
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    served = await serve_traced()
    await served.vision.Query(QUERY, metadata=SAMPLED)
    facts = attributes((await trace(collector))["kestrel.v1.VisionService/Query"])
    assert "a secret?" in facts["gen_ai.input.messages"]
    assert "aaaa" in facts["gen_ai.output.messages"]


async def test_over_http_too(serve_traced, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    endpoint = f"http://127.0.0.1:{collector.http_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    served = await serve_traced()
    await served.vision.Query(QUERY, metadata=SAMPLED)
    await trace(collector)
    await served.server.telemetry.close()
    await until(lambda: "rpc.server.call.duration" in collector.metric_names())
    assert {signal for signal, _ in collector.exports} == {"http-traces", "http-metrics"}


async def test_stopping_exports_what_waits(serve_traced, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    served = await serve_traced()
    await served.vision.Query(QUERY, metadata=SAMPLED)
    assert collector.spans() == []
    await served.server.stop(grace_s=1)
    await until(lambda: "rpc.server.call.duration" in collector.metric_names())
    assert "kestrel.token.gap.duration" in collector.metric_names()
    await trace(collector)


@pytest.fixture
def held_collector():
    """(address, gate): a collector that answers no export before the gate is open."""
    gate = threading.Event()

    class Held(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(lambda *_: b"" if gate.wait(60) else None)

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Held()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", gate
    gate.set()
    server.stop(0).wait(60)


async def test_a_collector_that_does_not_answer_holds_nothing_up(
    serve, held_collector, monkeypatch, caplog
):
    address, gate = held_collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    served = await serve(server_config={"telemetry": telemetry_config(os.environ)})
    assert (await served.vision.Query(QUERY)).answers[0].text
    await served.server.telemetry.close(timeout_s=0.1)
    assert not gate.is_set() and "not exported in 0.1 s" in caplog.text
    gate.set()


async def test_nothing_is_kept_of_calls_that_ended(serve_traced, collector):
    served = await serve_traced()
    for _ in range(3):
        await served.vision.Query(QUERY, metadata=SAMPLED)
        await served.overdue(
            lambda timeout: served.vision.Query(LONG, timeout=timeout, metadata=SAMPLED)
        )
    await until(lambda: served.engine.num_requests == 0)
    await until(lambda: served.server.telemetry.num_open_traces == 0)


async def test_other_services_have_a_server_span_and_health_none(serve_traced, collector):
    served = await serve_traced()
    await served.models.ListModels(model_service_pb2.ListModelsRequest(), metadata=SAMPLED)
    assert set(await trace(collector)) == {"kestrel.v1.ModelService/ListModels"}


async def test_the_access_log_names_the_trace(serve, collector, caplog):
    caplog.set_level("INFO", logger="kestrel_grpc.access")
    telemetry = telemetry_config(os.environ)
    served = await serve(server_config={"telemetry": telemetry, "access_log": "text"})
    await served.vision.Query(QUERY, metadata=SAMPLED)
    await until(lambda: f" trace_id={TRACE_ID} " in caplog.text)
