"""The hand-written encoder of load reports against the message that the package xds-protos defines."""

import zipfile

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from kestrel_engine.types.info import SchedulerStats
from kestrel_grpc.monitoring.load import Load
from kestrel_grpc.monitoring.orca import load_report
from kestrel_grpc.served_model import State
from kestrel_grpc.service_names import LOAD_REPORT_METHODS
from kestrel_grpc.services.load_reports import _request_class
from tests.xds import download, file_of

REPORT = "xds/data/orca/v3/orca_load_report.proto"
SERVICE = "xds/service/orca/v3/orca.proto"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return download(tmp_path_factory.mktemp("xds"))


def official_message(wheel: zipfile.ZipFile) -> type[Message]:
    """xds.data.orca.v3.OrcaLoadReport."""
    file = file_of(wheel, REPORT)
    # The rules of validation need another file, and change nothing of the encoding.
    del file.dependency[:]
    for field in file.message_type[0].field:
        field.ClearField("options")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport")
    )


@pytest.mark.slow
def test_the_report_is_read_back_by_the_official_message(wheel: zipfile.ZipFile) -> None:
    stats = SchedulerStats(
        running=3, pages_free=5, pages_total=16, cached_positions=30, prompt_positions=40
    )
    load = Load(
        state=State.READY, stats=stats, waiting=2, max_running=4, max_waiting=9, tokens_per_s=12.5,
        requests_per_s=1.25, errors_per_s=0.5, cpu=0.75, memory=0.25,
    )  # fmt: skip
    encoded = load_report(load)
    report = official_message(wheel).FromString(encoded)
    assert {field.name: value for field, value in report.ListFields()} == {
        "cpu_utilization": 0.75,
        "mem_utilization": 0.25,
        "utilization": {"kv_cache": load.kv_use},
        "rps_fractional": 1.25,
        "eps": 0.5,
        "named_metrics": {
            "running_requests": 3,
            "waiting_requests": 2,
            "kv_cache_pages": 16,
            "kv_cache_free_pages": 5,
            "prefix_hit_rate": stats.prefix_hit_rate,
            "output_tokens_per_second": 12.5,
        },
        "application_utilization": 1.25,
    }
    report.DiscardUnknownFields()
    assert sorted(report.SerializeToString()) == sorted(encoded), "no field is unknown"


@pytest.mark.slow
def test_the_stream_is_the_official_one(wheel: zipfile.ZipFile) -> None:
    file = file_of(wheel, SERVICE)
    (service,) = file.service
    assert f"/{file.package}.{service.name}/" == LOAD_REPORT_METHODS
    (method,) = service.method
    assert (method.name, method.server_streaming, method.client_streaming) == (
        "StreamCoreMetrics",
        True,
        False,
    )
    assert method.output_type == ".xds.data.orca.v3.OrcaLoadReport"
    (request,) = file.message_type
    assert method.input_type == f".{file.package}.{request.name}"
    interval = request.field[0]
    ours = _request_class().DESCRIPTOR.fields_by_name["report_interval"]
    assert (interval.name, interval.number, interval.type_name) == (
        ours.name,
        ours.number,
        ".google.protobuf.Duration",
    )
    assert ours.message_type.full_name == "google.protobuf.Duration"
