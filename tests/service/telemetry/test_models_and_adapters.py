"""Metrics and spans by model and by adapter, scraped from running servers."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineMetrics, RequestEvent
from kestrel_engine.types.adapter import AdapterCounts
from kestrel_grpc import model_changes
from kestrel_grpc.settings.telemetry import TelemetryConfig, telemetry_config
from kestrel_grpc.telemetry.metrics import MOST_ADAPTERS, ServiceMetrics
from kestrel_grpc.telemetry.model_gauges import ModelGauges
from kestrel_grpc.telemetry.names import (
    MAX_LORA,
    METRICS,
    REQUEST_MODEL,
    RUNNING_LORA,
    SCOPE,
    WAITING_LORA,
)
from kestrel_grpc.telemetry.readers import PullReader
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.services.options.test_adapters import NAME, add_adapters, folder, query
from tests.service.services.test_several_models import Two
from tests.service.statuses import failure
from tests.service.telemetry.test_metrics import scrape
from tests.service.telemetry.test_traces import QUERY as TRACED
from tests.service.telemetry.test_traces import SAMPLED, attributes, trace
from tests.waiting import until

__all__ = ["folder"]

PROMETHEUS = TelemetryConfig(prometheus="127.0.0.1:0")
MODEL = "gen_ai_request_model"
LONG = pb.QueryRequest(
    images=[raw_image()], query=pb.QueryTask(question="what?", max_tokens=NO_END)
)


async def test_what_an_adapter_counts(serve, folder: Path) -> None:
    served = await serve(server_config={"telemetry": PROMETHEUS})
    assert (await scrape(served)).value("kestrel_adapters_loaded") == 0
    add_adapters(served, folder)
    for adapter in (NAME, NAME, "unfit", "none"):
        call = served.vision.Query(query(adapter))
        if adapter == NAME:
            await call
        else:
            await failure(call)
    await served.vision.Query(pb.QueryRequest(query=pb.QueryTask(question="?")))
    found = await scrape(served)
    mine = {MODEL: "fake", "kestrel_adapter": NAME}
    assert found.value("kestrel_requests_total", **mine) == 2
    assert found.value("kestrel_requests_total", kestrel_adapter="") == 1
    assert found.value("kestrel_tokens_total", gen_ai_token_type="output", **mine) > 0
    assert found.value("gen_ai_server_time_to_first_token_seconds_count", **mine) == 2
    assert found.value("gen_ai_server_request_duration_seconds_count", **mine) == 2
    # What could not be loaded is no label.
    labels = {s.labels.get("kestrel_adapter") for each in found.samples.values() for s in each}
    assert labels == {None, "", NAME}
    assert found.value("kestrel_adapters_loaded", **{MODEL: "fake"}) == 1
    assert found.value("kestrel_adapters_used") == 0
    assert found.value("kestrel_adapters_loads_total", kestrel_failed="false") == 1
    assert found.value("kestrel_adapters_loads_total", kestrel_failed="true") == 1
    assert found.value("kestrel_adapters_memory_bytes", kestrel_memory="device") > 0
    (info,) = found.samples["kestrel_lora_requests_info"]
    assert info.labels["running_lora_adapters"] == NAME
    assert info.labels["waiting_lora_adapters"] == "" and int(info.labels["max_lora"]) > 1
    assert info.value > 1.7e9


async def test_use_of_the_kv_cache_is_from_0_to_1(serve) -> None:
    served = await serve(EndlessRuntime(), server_config={"telemetry": PROMETHEUS})
    calls = [served.vision.StreamQuery(LONG) for _ in range(3)]
    await until(lambda: served.engine.stats.running == LIMITS.max_batch_size)
    found = await scrape(served, while_running=True)
    assert 0 < found.value("kestrel_kv_usage") <= 1
    for call in calls:
        call.cancel()
    await until(lambda: not served.engine.num_requests and (not served.engine.stats.running))
    found = await scrape(served)
    # Cached pages that no request uses are not in use.
    assert found.value("kestrel_kv_usage") == 0
    assert found.value("kestrel_kv_pages", kestrel_kv_state="cached") > 0


async def test_gauges_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # To collect all garbage takes 0.3 s, and this test is not about memory.
    monkeypatch.setattr(model_changes, "_free_memory", lambda held: None)
    async with Two(telemetry=PROMETHEUS) as two:
        await two.server.load()
        await two.answer("second")
        found = await scrape(two)
        for gauge in ("kestrel_kv_usage", "kestrel_requests_running", "kestrel_adapters_loaded"):
            assert {s.labels[MODEL] for s in found.samples[gauge]} == {"first", "second"}
        for model in ("first", "second"):
            assert found.value("kestrel_kv_pages", **{MODEL: model}) == LIMITS.num_pages
        assert found.value("kestrel_requests_total", **{MODEL: "second"}) == 1
        assert found.value("kestrel_prompt_positions_total", **{MODEL: "second"}) > 0
        assert len(found.samples["kestrel_kernels_total"]) == 2
        # A model that was unloaded has no gauges, also if it was the default at the start.
        two.server.models.make_default("second")
        await two.server.models.unload("first", grace_s=1)
        found = await scrape(two)
        assert {s.labels[MODEL] for s in found.samples["kestrel_kv_usage"]} == {"second"}


async def test_spans_name_the_adapter(serve, collector, folder: Path) -> None:
    served = await serve(server_config={"telemetry": telemetry_config(os.environ)})
    add_adapters(served, folder)
    request = pb.QueryRequest()
    request.CopyFrom(TRACED)
    request.options.adapter = NAME
    await served.vision.Query(request, metadata=SAMPLED)
    facts = attributes((await trace(collector))["generate_content"])
    assert (facts["kestrel.adapter"], facts["gen_ai.request.model"]) == (NAME, "fake")


def test_labels_of_adapters_are_bounded() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics = ServiceMetrics(provider.get_meter("test"), lambda: 0, lambda: True)
    for number in range(3 * MOST_ADAPTERS):
        metrics.on_request(
            RequestEvent(
                request_id="r",
                skill="query",
                finish_reason="stop",
                error="",
                metrics=EngineMetrics(),
                image_size=None,
                num_crops=0,
                accepted_at=0.0,
                prepared_at=None,
                scheduled_at=None,
                first_token_at=None,
                finished_at=1.0,
                adapter=f"adapter-{number}",
            )
        )
    data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    counted = next(m for m in data if m.name == METRICS["kestrel.requests"].name).data.data_points
    by_name = {point.attributes["kestrel.adapter"]: point.value for point in counted}
    assert len(by_name) == MOST_ADAPTERS + 1 and by_name["other"] == 2 * MOST_ADAPTERS
    provider.shutdown()


def test_what_routers_read_names_the_adapters_however_often_they_change() -> None:
    """An instrument of the SDK loses its attributes after 2,000 sets of them."""
    gauges = ModelGauges(lambda metric, read: None)
    engine = Mock(info=SimpleNamespace(model="fake"), stats=None)
    gauges.add(engine, 1.0)
    reader = PullReader()
    reader.changing = gauges.lora_info
    provider = MeterProvider([reader], shutdown_on_exit=False)
    provider.get_meter(SCOPE).create_gauge("other").set(1)
    for number in range(2100):
        engine.adapter_counts = AdapterCounts(loaded=(f"adapter-{number}",), most=8)
        data = reader.get_metrics_data()
    found = {m.name: m for m in data.resource_metrics[0].scope_metrics[0].metrics}
    (point,) = found[METRICS["kestrel.lora_requests_info"].name].data.data_points
    assert point.attributes == {
        REQUEST_MODEL: "fake",
        MAX_LORA: "8",
        RUNNING_LORA: "adapter-2099",
        WAITING_LORA: "",
    }
    provider.shutdown()
