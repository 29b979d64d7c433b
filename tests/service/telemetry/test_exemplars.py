"""Exemplars: the buckets of first tokens and gaps name the trace of a sampled call, in OpenMetrics' text only."""

import asyncio
import os
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kestrel_grpc.settings.telemetry import telemetry_config
from tests.service.telemetry.test_traces import QUERY, SAMPLED, TRACE_ID, runtime, trace

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
BUCKETS = (
    "gen_ai_server_time_to_first_token_seconds_bucket",
    "gen_ai_server_time_per_output_token_seconds_bucket",
    "kestrel_token_gap_duration_seconds_bucket",
)


@pytest.fixture
async def served(serve, collector):
    telemetry = replace(telemetry_config(os.environ), prometheus="127.0.0.1:0")
    return await serve(runtime(), server_config={"telemetry": telemetry})


async def scraped(served, accept):
    assert await served.server.in_flight.wait_idle(60)
    url = f"http://{served.server.telemetry.metrics_address}/metrics"
    request = urllib.request.Request(url, headers={"Accept": accept})

    def read():
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode()

    return await asyncio.to_thread(read)


def exemplars(text):
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return [sample for sample in samples if sample.exemplar is not None]


async def test_buckets_name_the_trace_of_a_sampled_call(served, collector):
    await served.vision.Query(QUERY, metadata=SAMPLED)
    found = exemplars(await scraped(served, OPENMETRICS))
    assert {sample.name for sample in found} == set(BUCKETS)
    spans = {span.span_id.hex() for span in (await trace(collector)).values()}
    for sample in found:
        assert sample.exemplar.labels["trace_id"] == TRACE_ID
        assert sample.exemplar.labels["span_id"] in spans
        assert sample.exemplar.value <= float(sample.labels["le"])
    assert "trace_id" not in await scraped(served, "text/plain")


async def test_a_call_that_is_not_sampled_is_no_exemplar(served):
    unsampled = tuple((key, value[:-1] + "0") for key, value in SAMPLED)
    await served.vision.Query(QUERY, metadata=unsampled)
    assert not exemplars(await scraped(served, OPENMETRICS))


async def test_the_filter_turns_exemplars_off(serve, collector, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", "always_off")
    telemetry = replace(telemetry_config(os.environ), prometheus="127.0.0.1:0")
    served = await serve(runtime(), server_config={"telemetry": telemetry})
    await served.vision.Query(QUERY, metadata=SAMPLED)
    assert not exemplars(await scraped(served, OPENMETRICS))
