"""The server without OpenTelemetry, and settings that need a missing package or an unknown exporter."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from kestrel_grpc.settings.telemetry import TelemetryConfig, missing_packages, telemetry_config
from tests.forking.process import run_forked

ROOT = Path(__file__).parents[3]

SERVE_ONCE = textwrap.dedent("""
    import asyncio, logging, sys
    logging.basicConfig(level="INFO", stream=sys.stdout)
    for name in ABSENT:
        sys.modules[name] = None
    import grpc
    from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
    from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
    from kestrel_engine import InferenceEngine, RuntimeConfig
    from tests.fake_runtime import FakeRuntime
    from kestrel_engine.types.step import RuntimeLimits
    from kestrel_grpc.process.server import KestrelServer
    from kestrel_grpc.settings.server import ServerConfig
    from kestrel_grpc.settings.telemetry import telemetry_config
    from tests.engine.fakes import fake_build

    async def main():
        limits = RuntimeLimits(100, 2, 3, 100, 400)
        config = RuntimeConfig(max_batch_size=3)
        async def load():
            built = fake_build(config, FakeRuntime(limits))
            return InferenceEngine(config, built, observer=server.telemetry)
        settings = ServerConfig(listen=("127.0.0.1:0",), telemetry=telemetry_config(ENVIRON))
        server = KestrelServer(settings, config, load)
        await server.start()
        await server.load()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            call = VisionServiceStub(channel).Query(pb.QueryRequest(query={"question": "?"}))
            print("METADATA", *sorted(dict(await call.initial_metadata())))
            await call
        await server.stop(0)
        print("OTEL", any(name.startswith("opentelemetry") and sys.modules[name] for name in sys.modules))

    asyncio.run(main())
""")


def serve_once(environ, absent=()):
    code = f"ENVIRON = {environ!r}\nABSENT = {absent!r}\n{SERVE_ONCE}"
    done = run_forked([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "absent", [["opentelemetry"], ["opentelemetry.exporter.otlp.proto.grpc", "prometheus_client"]]
)
def test_without_its_packages_the_server_says_so_and_serves(absent):
    told = serve_once({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, absent)
    assert (
        "telemetry is off: opentelemetry" in told
        and "pip install ./clients/python '.[telemetry]'" in told
    )
    assert "METADATA x-request-id\n" in told


def test_while_nothing_is_asked_for_nothing_is_loaded():
    told = serve_once({})
    assert "OTEL False" in told and "METADATA x-request-id\n" in told


def test_a_flag_that_needs_absent_packages_ends_the_start():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from kestrel_grpc.__main__ import main\n"
        "sys.argv = ['kestrel-grpc', 'serve', '--metrics-listen', '127.0.0.1:0']\n"
        "sys.exit(main())"
    )
    done = run_forked([sys.executable, "-c", code], text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "--metrics-listen=127.0.0.1:0: prometheus_client is not installed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_the_variables_choose():
    assert telemetry_config({}) == TelemetryConfig()
    grpc = telemetry_config({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"})
    assert (grpc.traces, grpc.metrics, grpc.traces_protocol) == (("otlp",), ("otlp",), "grpc")
    only = telemetry_config({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"})
    assert (only.traces, only.metrics) == (("otlp",), ())
    mixed = telemetry_config(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "5",
        }
    )
    assert (mixed.traces, mixed.metrics) == (("otlp",), ())
    assert (mixed.traces_protocol, mixed.span_delay_ms) == ("http/protobuf", None)
    off = telemetry_config(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, "127.0.0.1:1"
    )
    assert off == TelemetryConfig(prometheus="127.0.0.1:1")
    assert missing_packages(mixed) == ()


@pytest.mark.parametrize(
    ("named", "exporters", "protocol"),
    [
        ("console,otlp", ("console", "otlp"), "grpc"),
        (" OTLP , console,", ("otlp", "console"), "grpc"),
        ("otlp_proto_http", ("otlp",), "http/protobuf"),
        ("otlp_proto_grpc,logging", ("otlp", "console"), "grpc"),
        ("otlp,otlp", ("otlp",), "grpc"),
        ("none", (), "grpc"),
        (" ", (), "grpc"),
    ],
)
def test_a_variable_lists_exporters(named: str, exporters: tuple[str, ...], protocol: str):
    both = {"OTEL_TRACES_EXPORTER": named, "OTEL_METRICS_EXPORTER": named}
    config = telemetry_config(both)
    assert config.traces == config.metrics == exporters
    assert config.traces_protocol == config.metrics_protocol == protocol
    listed = {"OTEL_METRICS_EXPORTER": f"prometheus,{named}" if exporters else "prometheus"}
    assert telemetry_config(listed, "127.0.0.1:1").metrics == exporters
    with pytest.raises(ValueError, match="--metrics-listen"):
        telemetry_config(listed)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("zipkin", "OTEL_TRACES_EXPORTER='zipkin': must be one of none, otlp, console"),
        ("otlp,zipkin", "'zipkin'"),
        ("none,otlp", "'none': must stand alone"),
        ("otlp_proto_grpc,otlp_proto_http", "two protocols"),
    ],
)
def test_a_list_that_is_refused(named: str, why: str):
    with pytest.raises(ValueError, match=why):
        telemetry_config({"OTEL_TRACES_EXPORTER": named})
    protocol = "OTEL_EXPORTER_OTLP_PROTOCOL"
    with pytest.raises(ValueError, match=f"{protocol}='http/json': must be one of"):
        telemetry_config({protocol: "http/json"})


def test_prometheus_comes_over_tcp():
    with pytest.raises(ValueError, match="--metrics-listen=unix:/x: must be HOST:PORT"):
        telemetry_config({}, "unix:/x")


def test_prometheus_is_asked_for_by_its_flag():
    named = {"OTEL_METRICS_EXPORTER": "prometheus"}
    assert telemetry_config(named, "127.0.0.1:1").prometheus == "127.0.0.1:1"
    with pytest.raises(
        ValueError, match="OTEL_METRICS_EXPORTER='prometheus': needs --metrics-listen"
    ):
        telemetry_config(named)


@pytest.mark.slow_with("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT")
@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_PROPAGATORS", "pigeon", "Propagator pigeon not found"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "9000", "must be less than or equal to max_queue_size"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1", "must be a non-negative integer"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "squeeze", "squeeze"),
    ],
)
def test_what_the_sdk_refuses_ends_the_start_with_one_line(variable, value, told):
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", variable: value}
    command = [sys.executable, "-m", "kestrel_grpc", "serve", "--listen", "127.0.0.1:0"]
    # With more connections, a low limit on open files would be a second line.
    command += ["--drain-delay", "0", "--max-connections", "100"]
    done = run_forked(command, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "serve: error: OpenTelemetry cannot start: " in done.stderr
    assert told in done.stderr and variable in done.stderr
