"""Measures the cost of telemetry for a call in the server process: tracing, unsampled and sampled, and metrics.

python -m benchmarks.service.telemetry_overhead [--quick] [--json FILE]

It calls watcher and observer in the same order as the server: a call begins and is accepted, steps run, its request
ends, the call ends. Nothing else runs, so single microseconds are visible. Spans pass through the batch processor to an
exporter that drops them. The cost of the collector's protocol, which another thread pays, is not included.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineMetrics, RequestEvent, SchedulerStats, StepEvent
from kestrel_grpc.edge.calls.call import Call, Metadata
from kestrel_grpc.telemetry.metrics import ServiceMetrics
from kestrel_grpc.telemetry.opening import Telemetry
from kestrel_grpc.telemetry.tracing import CallTracing

from ..reports.report import Report, benchmark_parser, median

METHOD = "/kestrel.v1.VisionService/Query"
NUM_STEPS = 10
ROUNDS = 15
UNSAMPLED_LIMIT_US = 10.0
MESSAGE = pb.QueryRequest(query={"question": "what?"})


class _Dropping(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


COMMON = (("user-agent", "grpc-python-asyncio/1.85.1"), ("x-request-id", "abc"))
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"
CALLERS = {
    "no traceparent": COMMON,
    "unsampled traceparent": (*COMMON, ("traceparent", TRACEPARENT + "0")),
    "sampled traceparent": (*COMMON, ("traceparent", TRACEPARENT + "1")),
}
"""The metadata of a call."""


def step(now: float, step_id: int) -> StepEvent:
    return StepEvent(
        step_id=step_id,
        launched_at=now + 0.003 * step_id,
        collected_at=now + 0.003 * (step_id + 1),
        vision_s=0.0,
        prefill_s=0.001,
        decode_s=0.001,
        num_crops=0,
        num_prefill_positions=10,
        num_decode=16,
        request_ids=("r",),
        encoded_request_ids=("r",) if step_id == 0 else (),
        failed=False,
        stats=SchedulerStats(running=16, pages_free=1, pages_cached=1, pages_total=2),
        num_tokens=16,
        token_gaps=((0.003, 15), (0.006, 1)),
    )


def request(now: float) -> RequestEvent:
    metrics = EngineMetrics(input_tokens=10, output_tokens=10, decode_time_ms=1.0, ttft_ms=1.0)
    return RequestEvent(
        request_id="r",
        skill="query",
        finish_reason="stop",
        error="",
        metrics=metrics,
        image_size=(850, 600),
        num_crops=9,
        accepted_at=now,
        prepared_at=now,
        scheduled_at=now,
        first_token_at=now + 0.003,
        finished_at=now + 0.003 * NUM_STEPS,
    )


def call_with(metadata: Metadata) -> Call:
    no_context: Any = None
    peer = "ipv4:127.0.0.1:5"
    return Call(method=METHOD, peer=peer, context=no_context, metadata=metadata, request_id="r")


def traced(telemetry: Telemetry, metadata: Metadata, steps: Sequence[StepEvent]) -> None:
    call = call_with(metadata)
    telemetry.begin(call)
    call.message = MESSAGE
    telemetry.on_message(call)
    for event in steps:
        telemetry.on_step(event)
    telemetry.on_request(request(call.started_at))
    telemetry.end(call)


def untraced(metadata: Metadata) -> None:
    """The baseline: the same without tracing."""
    request(call_with(metadata).started_at)


def microseconds(work: Callable[[], None], count: int) -> float:
    """Returns the process's CPU time of a call, including the exporting thread: the median of the rounds' means."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(count):
            work()
        rounds.append(1e6 * (time.process_time() - began) / count)
    return median(rounds)


def tracing_costs(report: Report, count: int) -> None:
    processor = BatchSpanProcessor(_Dropping(), max_queue_size=2**16)
    rarely = ParentBased(TraceIdRatioBased(0.0))
    description: str = rarely.get_description()  # type: ignore[no-untyped-call]
    providers = [TracerProvider(sampler=s, shutdown_on_exit=False) for s in (rarely, ALWAYS_ON)]
    for provider in providers:
        provider.add_span_processor(processor)
    requests, steps = (provider.get_tracer("benchmark") for provider in providers)
    tracing = CallTracing(requests, steps, sampling=description, content=False)
    telemetry = Telemetry(tracing, None, None, [])
    telemetry.start_counting()
    worst = 0.0
    for caller, metadata in CALLERS.items():
        events = [step(time.monotonic(), i) for i in range(NUM_STEPS)]
        sampled = caller.startswith("sampled")
        shared = events if sampled else []  # Steps of an unsampled call are the step's own cost.
        baseline = microseconds(functools.partial(untraced, metadata), count)
        cost = microseconds(functools.partial(traced, telemetry, metadata, shared), count)
        report.add("tracing a call", {"us": max(0.0, cost - baseline), "caller": caller})
        if not sampled:
            worst = max(worst, cost - baseline)
    cost = microseconds(functools.partial(telemetry.on_step, step(time.monotonic(), 1)), count)
    report.add("tracing a step", {"us": cost, "of": "unsampled calls"})
    telemetry_ends: Callable[[], object] = processor.shutdown
    telemetry_ends()
    report.bar("microseconds that tracing adds to an unsampled call", worst, UNSAMPLED_LIMIT_US)


def metrics_costs(report: Report, count: int) -> None:
    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    metrics = ServiceMetrics(provider.get_meter("benchmark"), lambda: 0, lambda: True)
    call, now = call_with(CALLERS["no traceparent"]), time.monotonic()
    event, ended = step(now, 1), request(now)
    table = "metrics"
    report.add(
        table, {"us": microseconds(functools.partial(metrics.on_call, call), count), "of": "a call"}
    )
    cost = microseconds(functools.partial(metrics.on_request, ended), count)
    report.add(table, {"us": cost, "of": "a request"})
    report.add(
        table,
        {"us": microseconds(functools.partial(metrics.on_step, event), count), "of": "a step"},
    )
    provider.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("service.telemetry_overhead", __doc__)
    args = parser.parse_args(arguments)
    count = 20 if args.quick else 2000
    report = Report("telemetry_overhead", {"calls": count, "rounds": ROUNDS})
    gc.collect()
    gc.freeze()
    tracing_costs(report, count)
    metrics_costs(report, count)
    gc.unfreeze()
    report.finish(args.json)


if __name__ == "__main__":
    main()
