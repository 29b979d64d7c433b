"""Metrics as Prometheus scrapes them from a running server, and what is written about them."""

import asyncio
import json
import math
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import image_service_pb2 as image_pb
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.types.step import StepResult
from kestrel_grpc.edge.calls.call import Call
from kestrel_grpc.images.shared.shared_images import SharedImageEvent
from kestrel_grpc.security.identity.principal import Principal
from kestrel_grpc.settings.addresses import AddressError
from kestrel_grpc.settings.telemetry import TelemetryConfig
from kestrel_grpc.telemetry.metrics import MOST_PRINCIPALS, ServiceMetrics
from kestrel_grpc.telemetry.names import METRICS, SCOPE, Metric
from kestrel_grpc.telemetry.readers import DenseHistogram, PushReader
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import ENDLESS, NO_END, raw_image
from tests.service.statuses import failure
from tests.waiting import until

ROOT = Path(__file__).parents[3]
QUERY = pb.QueryRequest(images=[raw_image()], query=pb.QueryTask(question="what?", max_tokens=4))
LONG = pb.QueryRequest(
    images=[raw_image()], query=pb.QueryTask(question="what?", max_tokens=NO_END)
)


class TimedRuntime(FakeRuntime):
    """Says how long each phase of a step took."""

    def collect(self, handle):
        tokens = super().collect(handle).tokens
        return StepResult(
            tokens=tokens,
            shared_groups=(3, 2) if handle.decode else (),
            vision_s=0.003 if handle.encode else 1e-6,
            prefill_s=0.002 if handle.prefill else 1e-6,
            decode_s=0.001 if handle.decode else 1e-6,
        )


class Scrape:
    """Samples of one scrape by name; ``families`` by name: type and documentation."""

    def __init__(self, text):
        self.families, self.samples = {}, {}
        for family in text_string_to_metric_families(text):
            self.families[family.name] = family
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append(sample)

    def value(self, name, **labels):
        """The sum over all samples that have ``labels``."""
        found = [s.value for s in self.samples.get(name, []) if labels.items() <= s.labels.items()]
        return sum(found)

    def labels(self, name):
        return {label for s in self.samples[name] for label in s.labels} - {"le"}


async def scrape(served, *, while_running=False):
    """A client has its answer before the server has counted the call, so this waits for the end of all calls."""
    if not while_running:
        assert await served.server.in_flight.wait_idle(60)
    url = f"http://{served.server.telemetry.metrics_address}/metrics"

    def read():
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.read().decode()

    return Scrape(await asyncio.to_thread(read))


@pytest.fixture
def measured(serve):
    async def start(**options):
        runtime = TimedRuntime(ENDLESS, lambda fed: 197, cost=lambda plan: 0.003)
        telemetry = TelemetryConfig(prometheus="127.0.0.1:0")
        return await serve(runtime, server_config={"telemetry": telemetry}, **options)

    return start


async def test_each_series_of_a_worker_names_it(serve):
    served = await serve(
        server_config={"telemetry": TelemetryConfig(prometheus="127.0.0.1:0", worker=3)}
    )
    await served.vision.Query(QUERY)
    found = await scrape(served)
    samples = [sample for each in found.samples.values() for sample in each]
    assert {sample.labels.get("worker") for sample in samples} == {"3"}
    assert found.labels("rpc_server_call_duration_seconds_count") > {"worker", "rpc_method"}


async def all_kinds_of_calls(served):
    """One each that fails, is invalid, is cancelled, is refused, names no method; two that end well. Returns a scrape
    after all of them."""
    telemetry = served.server.telemetry
    telemetry.show_shared_images(lambda: True)
    telemetry.show_audit(lambda: 0)
    served.server.guard.budgets.exceeded["", "day"] += 1
    telemetry.on_shared_image(SharedImageEvent("get", "hit", 0.01, 100))
    served.runtime.fail_next = RuntimeError("x")
    await failure(served.vision.Query(QUERY))
    for _ in range(2):
        await served.vision.Query(QUERY)
    await failure(served.vision.Query(pb.QueryRequest()))
    call = served.vision.StreamQuery(LONG)
    for _ in range(3):
        await call.read()
    call.cancel()
    await failure(served.channel.unary_unary("/kestrel.v1.AdminService/Drain")(b""))
    await failure(served.channel.unary_unary("/kestrel.v1.AdminService/Nope")(b""))
    return await scrape(served)


async def test_what_is_counted(measured):
    served = await measured()
    found = await all_kinds_of_calls(served)
    query = {"rpc_method": "kestrel.v1.VisionService/Query"}
    calls = "rpc_server_call_duration_seconds_count"
    assert found.value(calls, **query, rpc_response_status_code="OK", error_type="") == 2
    assert found.value(calls, **query, rpc_response_status_code="INVALID_ARGUMENT") == 1
    assert found.value(calls, rpc_response_status_code="CANCELLED") == 1
    assert found.value(calls, rpc_response_status_code="INTERNAL", error_type="INTERNAL") == 1
    ended = {
        s.labels["kestrel_finish_reason"]: s.value for s in found.samples["kestrel_requests_total"]
    }
    assert ended == {"length": 2, "cancelled": 1, "error": 1}
    assert found.value("kestrel_requests_total", error_type="RuntimeFailure") == 1
    assert found.value("kestrel_tokens_total", gen_ai_token_type="output") >= 8
    assert found.value("kestrel_principal_calls_total", kestrel_principal="") == 7
    assert found.value("kestrel_calls_unauthorized_total", kestrel_reason="SCOPE_MISSING") == 1
    assert found.value(calls, rpc_method="_OTHER", rpc_response_status_code="UNIMPLEMENTED") == 1
    assert found.value("kestrel_principal_tokens_total", gen_ai_token_type="output") == 8
    assert found.value("gen_ai_server_time_to_first_token_seconds_count") == 3
    assert found.value("gen_ai_server_time_per_output_token_seconds_count") >= 2
    per_token = found.value("gen_ai_server_time_per_output_token_seconds_sum") / found.value(
        "gen_ai_server_time_per_output_token_seconds_count"
    )
    assert 0.002 < per_token < 0.05
    gaps = "kestrel_token_gap_duration_seconds"
    # Three of each request that ended well, two and more of the cancelled one, none of a first token.
    assert found.value(f"{gaps}_count") == found.value("kestrel_step_tokens_total") - 3 >= 8
    assert 0.002 < found.value(f"{gaps}_sum") / found.value(f"{gaps}_count") < 0.05
    assert found.value("kestrel_step_tokens_total") >= found.value(
        "kestrel_tokens_total", gen_ai_token_type="output"
    )
    loads = found.samples["kestrel_model_load_phase_duration_seconds"]
    assert {s.labels["kestrel_phase"] for s in loads} == {"weights", "build", "capture", "warm_up"}
    assert found.value("kestrel_crops_total") == 1  # The only tile equals the overview.
    steps = found.value("kestrel_steps_total", kestrel_failed="false")
    assert found.value("kestrel_steps_total", kestrel_failed="true") == 1 and steps >= 9
    # The second image's prefix is that of the first: BOS and 81 positions.
    assert found.value("kestrel_prefix_cache_hit_positions_total") >= 2 * 82
    vision = found.value("kestrel_step_phase_duration_seconds_sum", kestrel_phase="vision")
    encodings = found.value("kestrel_step_phase_duration_seconds_count", kestrel_phase="vision")
    assert vision == pytest.approx(0.003) and encodings == 1
    assert found.value("kestrel_ready") == 1
    assert found.value("kestrel_model_load_duration_seconds") > 0
    assert found.value("kestrel_requests_running") == found.value("kestrel_requests_waiting") == 0
    assert found.value("kestrel_calls_active") == 0
    pages = {s.labels["kestrel_kv_state"]: s.value for s in found.samples["kestrel_kv_pages"]}
    assert sum(pages.values()) == ENDLESS.num_pages
    assert pages["private"] == 0 and pages["cached"] > 0


async def test_reasoning_masks_and_shared_reads_are_counted(measured):
    served = await measured()
    thinking = pb.QueryRequest(query=pb.QueryTask(question="what?", reasoning=True, max_tokens=4))
    response = await served.vision.Query(thinking)
    # The fourth token is the last of the reasoning; the fifth begins the answer.
    assert (response.usage.reasoning_tokens, response.usage.output_tokens) == (4, 8)
    choices = common_pb2.Constraint(choices=common_pb2.Choices(texts=["red", "green"]))
    text = common_pb2.TextOptions(constraint=choices)
    answer = await served.vision.Query(
        pb.QueryRequest(query=pb.QueryTask(question="what?", max_tokens=9, text=text))
    )
    assert answer.usage.reasoning_tokens == 0
    found = await scrape(served)
    assert found.value("kestrel_tokens_reasoning_total") == 4
    # One for each token, and one for the end.
    # One for each token and for the end, except for the first one: its mask is made when the constraint is compiled.
    assert found.value("kestrel_masks_total") == answer.usage.output_tokens
    assert found.value("kestrel_masks_time_seconds_total") > 0
    groups = found.value("kestrel_step_shared_groups_total")
    assert groups > 0 and found.value("kestrel_step_shared_rows_total") == 2.5 * groups


async def test_images_prepared_ahead_count_as_prepared(measured):
    served = await measured()
    await served.images.PutImage(image_pb.PutImageRequest(image=raw_image()))
    task = pb.Task(caption=pb.CaptionTask(max_tokens=4))
    await served.vision.Analyze(pb.AnalyzeRequest(image=raw_image(90), tasks=[task, task]))
    await failure(
        served.images.PutImage(
            image_pb.PutImageRequest(image=common_pb2.Image(encoded=b"no picture"))
        )
    )
    found = await scrape(served)
    prepared = "kestrel_request_preprocess_duration_seconds_count"
    assert found.value(prepared) == found.value(prepared, kestrel_skill="") == 2


def test_groups_are_counted_as_one_by_one():
    metric = Metric("m", "histogram", "s", "", (), (0.1, 0.2))
    dense = DenseHistogram(metric)
    for value, times in ((0.05, 3), (0.1, 2), (0.15, 1), (0.2, 1), (7.0, 4)):
        dense.record(value, times=times)
    [point] = dense.collected(dense.points().values()).data.data_points
    assert (point.bucket_counts, point.count) == ((5, 2, 4), 11)
    assert point.sum == pytest.approx(0.15 + 0.2 + 0.15 + 0.2 + 28)


def test_a_fault_in_one_group_loses_no_other(monkeypatch, caplog):
    metrics = ServiceMetrics(MeterProvider().get_meter("test"), lambda: 0, lambda: True)
    count = metrics._count_calls

    def failing(labels, ended):
        if labels[0] == "/a":
            raise KeyError("fault")
        count(labels, ended)

    monkeypatch.setattr(metrics, "_count_calls", failing)
    for method in ("/a", "/b", "/c"):
        metrics.on_call(Call(method, "", None))
    metrics._count_ended()
    assert sum(metrics._principal_calls.values()) == 2
    assert "metrics of 1 that ended are lost" in caplog.text


@pytest.mark.parametrize("preferred", ["CUMULATIVE", "DELTA"])
async def test_they_are_told_as_differences_where_that_is_wanted(collector, preferred, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", preferred)
    reader = PushReader(OTLPMetricExporter(), export_interval_millis=math.inf)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    counter = provider.get_meter(SCOPE).create_counter("c")
    dense = DenseHistogram(Metric("m", "histogram", "s", "", (), (0.1, 0.2)))
    reader.dense = [dense]
    for times in (2, 0, 3):
        counter.add(times)
        dense.record(0.15, times=times)
        await asyncio.to_thread(reader.collect)
    await until(lambda: len(collector.exports) == 3)
    provider.shutdown()
    told = [dict(zip("cm", metrics, strict=True)) for metrics in collector.metrics()[:3]]
    counted = [each["c"].sum.data_points[0].as_int for each in told]
    histograms = [each["m"].histogram for each in told]
    points = [histogram.data_points[0] for histogram in histograms]
    assert [point.count for point in points] == counted
    assert counted == ([2, 0, 3] if preferred == "DELTA" else [2, 2, 5])
    sums = [each["c"].sum.aggregation_temporality for each in told]
    assert [histogram.aggregation_temporality for histogram in histograms] == sums
    assert points[2].sum == pytest.approx(0.15 * counted[2])
    assert not points[2].HasField("max")
    if preferred == "DELTA":
        assert points[2].start_time_unix_nano == points[1].time_unix_nano


async def test_load_shows_while_it_lasts(measured):
    served = await measured()
    calls = [served.vision.StreamQuery(LONG) for _ in range(5)]
    await until(lambda: (served.engine.stats.running, served.engine.num_requests) == (3, 5))
    found = await scrape(served, while_running=True)
    assert found.value("kestrel_requests_running") == ENDLESS.max_batch_size == 3
    assert found.value("kestrel_requests_waiting") == 2
    assert found.value("kestrel_calls_active") == 5
    assert found.value("kestrel_kv_pages", kestrel_kv_state="private") > 0
    for call in calls:
        call.cancel()


async def test_a_server_that_loads_is_not_ready(measured):
    served = await measured(load=False)
    assert (await failure(served.vision.Query(QUERY))).reason == "MODEL_NOT_READY"
    found = await scrape(served)
    assert found.value("kestrel_ready") == 0
    calls = "rpc_server_call_duration_seconds_count"
    assert found.value(calls, error_type="UNAVAILABLE") == 1
    await served.server.load()
    assert (await scrape(served)).value("kestrel_ready") == 1


async def test_all_that_is_named_is_given(measured):
    served = await measured()
    found = await all_kinds_of_calls(served)
    kinds = {}
    for metric in METRICS.values():
        name = metric.prometheus_name
        sample = f"{name}_count" if metric.kind == "histogram" else name
        family = name.removesuffix("_total")
        kinds[family] = metric.kind
        assert found.families[family].documentation == metric.description
        assert found.labels(sample) == {a.replace(".", "_") for a in metric.attributes}
        if metric.kind == "histogram":
            bounds = {s.labels["le"] for s in found.samples[f"{name}_bucket"]}
            assert bounds == {*map(str, metric.buckets), "+Inf"}
    assert {name: family.type for name, family in found.families.items()} == kinds


def expressions():
    """(where, PromQL) of the dashboard and the alerts."""
    dashboard = json.loads((ROOT / "deploy/grafana/kestrel.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"] and rule["labels"]["severity"]
            yield rule["alert"], rule["expr"]


async def test_dashboard_and_alerts_name_only_what_there_is(measured):
    served = await measured()
    found = await all_kinds_of_calls(served)
    labels = {label for name in found.samples for label in found.labels(name)}
    checked = 0
    for where, expression in expressions():
        inside = [*re.findall(r"\{(.*?)\}", expression), *re.findall(r"by \((.*?)\)", expression)]
        used = {w for part in inside for w in re.findall(r"[a-z_]\w*(?=\s*(?:[=!]|,|$))", part)}
        assert used <= labels | {"instance", "job", "le"}, f"{where}: {used - labels}"
        series = set(re.findall(r"\b(?:kestrel|gen_ai|rpc)_\w+", expression)) - labels
        assert series, f"{where} asks for nothing of ours"
        assert series <= set(found.samples), f"{where}: {series - set(found.samples)}"
        checked += 1
    assert checked > 30


async def test_a_port_in_use_is_said(measured, serve):
    served = await measured()
    taken = served.server.telemetry.metrics_address
    with pytest.raises(AddressError, match=f"metrics on {taken}: address already in use"):
        await serve(server_config={"telemetry": TelemetryConfig(prometheus=taken)})


async def test_the_port_is_free_after_the_end(measured, serve):
    served = await measured()
    taken = served.server.telemetry.metrics_address
    await served.server.stop(grace_s=0)
    again = await serve(server_config={"telemetry": TelemetryConfig(prometheus=taken)})
    assert (await scrape(again)).value("kestrel_ready") == 1


def test_principals_are_bounded():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics = ServiceMetrics(provider.get_meter("test"), lambda: 0, lambda: True)
    for number in range(3 * MOST_PRINCIPALS):
        principal = Principal(f"caller-{number}", frozenset())
        metrics.on_call(Call("/kestrel.v1.X/Y", "", None, principal=principal))
    data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    counted = next(
        m for m in data if m.name == METRICS["kestrel.principal.calls"].name
    ).data.data_points
    by_name = {point.attributes["kestrel.principal"]: point.value for point in counted}
    assert len(by_name) == MOST_PRINCIPALS + 1 and by_name["other"] == 2 * MOST_PRINCIPALS
    provider.shutdown()


async def test_a_variable_that_asks_for_other_buckets_is_named(serve, monkeypatch, caplog):
    variable = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
    monkeypatch.setenv(variable, "base2_exponential_bucket_histogram")
    await serve(server_config={"telemetry": TelemetryConfig(prometheus="127.0.0.1:0")})
    assert f"{variable}=base2_exponential_bucket_histogram does not apply" in caplog.text
