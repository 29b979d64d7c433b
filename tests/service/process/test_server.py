"""The server's life: listening, health, reflection, model service, sizes, unix sockets, stopping."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.api import annotations_pb2
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kestrel_client._pb.kestrel.v1 import model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.service_names import (
    ADMIN_SERVICE,
    BATCH_SERVICE,
    IMAGE_SERVICE,
    MODEL_SERVICE,
    VISION_SERVICE,
)
from kestrel_grpc.settings.addresses import AddressError
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, HeldRuntime, raw_image
from tests.service.statuses import failure
from tests.service.wire import Wire
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SHORT = pb.QueryRequest(query=pb.QueryTask(question="?", max_tokens=2))
LONG = pb.QueryRequest(query=pb.QueryTask(question="?", max_tokens=200))
BUF = Path(sys.executable).parent / "buf"


def check(served):
    stub = health_pb2_grpc.HealthStub(served.channel)

    async def status(service=""):
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    return status


async def says_no(served):
    return await check(served)() == NOT_SERVING


async def test_health_turns_serving_when_the_model_is_ready(serve):
    served = await serve(load=False)
    status = check(served)
    assert await status() == await status(VISION_SERVICE) == NOT_SERVING
    assert await status(MODEL_SERVICE) == await status("grpc.health.v1.Health") == SERVING
    configured = served.server.served.default.name
    assert await status(configured) == NOT_SERVING
    await served.server.load()
    assert await status() == await status(VISION_SERVICE) == SERVING
    assert await status(configured) == await status(served.server.served.default.name) == SERVING
    told = await failure(health_pb2_grpc.HealthStub(served.channel).Check(
        health_pb2.HealthCheckRequest(service="other")))  # fmt: skip
    assert told.code is grpc.StatusCode.NOT_FOUND


async def test_all_services_are_listed(serve):
    served = await serve(load=False)
    stub = health_pb2_grpc.HealthStub(served.channel)

    async def listed():
        found = await stub.List(health_pb2.HealthListRequest())
        return {name: entry.status for name, entry in found.statuses.items()}

    before = await listed()
    assert (before[""], before[VISION_SERVICE], before[MODEL_SERVICE]) == (
        *(NOT_SERVING, NOT_SERVING, SERVING),
    )
    await served.server.load()
    assert set((await listed()).values()) == {SERVING}
    await served.server.drain()
    assert set((await listed()).values()) == {NOT_SERVING}


async def test_watch_tells_every_change(serve):
    served = await serve(load=False)
    stub = health_pb2_grpc.HealthStub(served.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=VISION_SERVICE))
    assert (await watch.read()).status == NOT_SERVING
    await served.server.load()
    assert (await watch.read()).status == SERVING
    await served.server.stop(grace_s=0)
    assert (await watch.read()).status == NOT_SERVING


async def test_health_follows_an_engine_that_dies(serve, monkeypatch):
    monkeypatch.setattr("kestrel_grpc.services.health.POLL_INTERVAL_S", 0.01)
    served = await serve()
    await served.engine.shutdown(grace_s=0)
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
    while (await watch.read()).status != NOT_SERVING:
        pass
    watch.cancel()
    told = await failure(served.vision.Query(SHORT))
    assert told.code is grpc.StatusCode.UNAVAILABLE
    (model,) = (await served.models.ListModels(model_service_pb2.ListModelsRequest())).models
    assert model.state == model_service_pb2.MODEL_STATE_FAILED


VISION = pb.DESCRIPTOR.services_by_name["VisionService"]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_services(serve, version):
    served = await serve()

    def ask():
        # The sync client of grpcio-reflection; it speaks v1alpha, so v1 is asked by renaming the method.
        with grpc.insecure_channel(served.server.addresses[0]) as channel:
            if version == "v1":
                channel = grpc.intercept_channel(channel, ToV1())
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = descriptor_pool.DescriptorPool(database)
            return set(database.get_services()), pool.FindServiceByName(VISION_SERVICE)

    services, vision = await asyncio.to_thread(ask)
    assert services == {
        VISION_SERVICE,
        IMAGE_SERVICE,
        MODEL_SERVICE,
        BATCH_SERVICE,
        ADMIN_SERVICE,
        "inference.GRPCInferenceService",
        "grpc.channelz.v1.Channelz",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert [method.name for method in vision.methods] == [method.name for method in VISION.methods]
    assert vision.methods_by_name["StreamDetect"].server_streaming
    image = vision.methods_by_name["Detect"].input_type.fields_by_name["image"].message_type
    assert {"encoded", "raw"} <= {field.name for field in image.oneofs_by_name["source"].fields}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_finds_every_symbol(serve, version):
    served = await serve()
    ask = served.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    symbols = [
        *(f"{VISION_SERVICE}.{method.name}" for method in VISION.methods),
        *(field.full_name for field in pb.DetectRequest.DESCRIPTOR.fields),
        "inference.GRPCInferenceService.ModelStreamInfer",
        "kestrel.v1.PRIORITY_LOW",
        "kestrel.v1.Priority.PRIORITY_LOW",
        "google.api.http",  # an extension
    ]
    http = annotations_pb2.http.number
    options = "google.protobuf.MethodOptions"
    requests = [
        *({"file_containing_symbol": symbol} for symbol in symbols),
        {"file_containing_extension": {"containing_type": options, "extension_number": http}},
        {"all_extension_numbers_of_type": options},
        {"file_containing_symbol": f"{VISION_SERVICE}.Smell"},
        {"file_containing_symbol": "kestrel"},
        {"file_containing_extension": {"containing_type": options, "extension_number": 1}},
        {},
    ]
    asked = [reflection_pb2.ServerReflectionRequest(host="h", **each) for each in requests]
    answers = [answer async for answer in ask(iter(asked))]
    assert [answer.original_request for answer in answers] == asked
    assert {answer.valid_host for answer in answers} == {"h"}
    *files, numbers, _, _, _, _ = answers
    for symbol, answer in zip([*symbols, "extension"], files, strict=True):
        assert answer.file_descriptor_response.file_descriptor_proto, symbol
    assert http in numbers.all_extension_numbers_response.extension_number
    codes = [answer.error_response.error_code for answer in answers[-4:]]
    assert codes == [5, 5, 5, 3]
    assert "Smell" in answers[-4].error_response.error_message


class ToV1(grpc.StreamStreamClientInterceptor):
    def intercept_stream_stream(self, continuation, details, requests):
        class Renamed(grpc.ClientCallDetails):
            method = details.method.replace(".v1alpha.", ".v1.")
            timeout, metadata, credentials = details.timeout, details.metadata, details.credentials
            wait_for_ready, compression = details.wait_for_ready, details.compression

        return continuation(Renamed(), requests)


@pytest.mark.parametrize("reflection", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl_lists_and_calls_without_protos(serve, reflection):
    served = await serve()

    async def curl(*arguments):
        process = await asyncio.create_subprocess_exec(
            BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge",
            "--reflect-protocol", reflection, *arguments,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()

    url = f"http://{served.server.addresses[0]}"
    methods = (await curl("--list-methods", url)).split()
    assert f"{VISION_SERVICE}/StreamSegment" in methods
    assert f"{MODEL_SERVICE}/GetServerInfo" in methods
    answer = await curl("-d", SHORT_JSON, f"{url}/{VISION_SERVICE}/Query")
    assert json.loads(answer)["info"]["model"] == "fake"


SHORT_JSON = '{"query": {"question": "?", "maxTokens": 2}}'


async def test_the_model_service_answers_before_and_after_loading(serve):
    served = await serve(load=False, model="kestrel-small", max_queue=7)
    (model,) = (await served.models.ListModels(model_service_pb2.ListModelsRequest())).models
    assert model.state == model_service_pb2.MODEL_STATE_LOADING
    assert model.name == "kestrel-small"
    info = await served.models.GetServerInfo(model_service_pb2.GetServerInfoRequest())
    assert info.limits.max_queue == 7
    await served.server.load()
    (model,) = (await served.models.ListModels(model_service_pb2.ListModelsRequest())).models
    assert model.state == model_service_pb2.MODEL_STATE_READY
    assert model.family == "moondream3"
    assert (model.device, model.dtype, model.max_batch_size) == ("fake", "none", 3)
    assert " ".join(each.name for each in model.skills) == "query caption point detect segment gaze"
    assert (model.image_positions, model.context_positions) == (81, 300)
    got = await served.models.GetModel(model_service_pb2.GetModelRequest())
    assert got.model == model
    named = await served.models.GetModel(model_service_pb2.GetModelRequest(model=model.name))
    assert named.model == model
    info = await served.models.GetServerInfo(model_service_pb2.GetServerInfoRequest())
    assert info.api_version == "kestrel.v1"
    assert info.default_model == model.name
    assert info.limits.max_message_bytes == 33 * 1024 * 1024
    assert info.limits.max_image_bytes == 32 * 1024 * 1024
    assert info.limits.default_temperature == 0.2
    assert {"jpeg", "png", "webp"} <= set(info.image_formats)
    assert info.library_versions["grpcio"] == grpc.__version__


async def test_messages_up_to_the_limit_are_taken(serve):
    served = await serve(server_config={"max_message_bytes": 6 * 1024 * 1024})
    request = pb.CaptionRequest(image=raw_image(1600, 1200), caption=pb.CaptionTask(max_tokens=2))
    assert request.ByteSize() > 5 * 1024 * 1024
    assert (await served.vision.Caption(request)).info.images[0].size.width == 1600
    request = pb.CaptionRequest(image=raw_image(2000, 1200), caption=pb.CaptionTask(max_tokens=2))
    told = await failure(served.vision.Caption(request))
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await served.vision.Query(SHORT)).usage.output_tokens == 2


@pytest.mark.parametrize("compression", ["off", "low", "high"])
async def test_answers_are_compressed_for_who_takes_it(serve, compression):
    """Counted between the two: gRPC itself tells neither side."""
    served = await serve(
        FakeRuntime(LIMITS, lambda fed: 197), server_config={"compression": compression}
    )
    received = 0

    passed = []

    async def pass_on(client, to_client):
        passed.append(asyncio.current_task())
        server, to_server = await asyncio.open_connection(*served.server.addresses[0].split(":"))

        async def copy(source, target, counted):
            nonlocal received
            while data := await source.read(65536):
                received += len(data) * counted
                target.write(data)
            target.close()
            await target.wait_closed()

        await asyncio.gather(copy(client, to_server, 0), copy(server, to_client, 1))

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as between:
        address = "{}:{}".format(*between.sockets[0].getsockname())
        sizes = []
        for taken in (7, 1):  # gzip, deflate and none; none
            options = [("grpc.compression_enabled_algorithms_bitset", taken)]
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                assert (await type(served.vision)(channel).Query(LONG)).answers[0].text == "a" * 200
            sizes.append(received - sum(sizes))
        await asyncio.gather(*passed)
    assert (sizes[0] < sizes[1] - 100) == (compression != "off"), sizes


async def test_a_unix_socket_serves_and_leaves_no_file(serve, tmp_path):
    path = tmp_path / "kestrel.sock"
    served = await serve(listen=f"unix:{path}")
    assert served.server.addresses == (f"unix:{path}",)
    assert (await served.vision.Query(SHORT)).info.model == "fake"
    with pytest.raises(AddressError, match="already in use"):
        await serve(listen=f"unix:{path}")
    assert (await served.vision.Query(SHORT)).info.model == "fake", (
        "the second did not harm the first"
    )
    await served.server.stop(grace_s=0)
    assert not path.exists()


async def test_the_socket_of_a_dead_server_is_taken_over(serve, tmp_path):
    path = tmp_path / "kestrel.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(os.fspath(path))
    dead.close()
    served = await serve(listen=f"unix:{path}")
    assert (await served.vision.Query(SHORT)).info.model == "fake"


async def test_addresses_that_cannot_be_listened_on_are_named(serve, tmp_path):
    served = await serve()
    taken = served.server.addresses[0]
    with pytest.raises(AddressError, match=f"cannot listen on {taken}: address already in use"):
        await serve(listen=taken)
    with pytest.raises(AddressError, match="does not exist"):
        await serve(listen=f"unix:{tmp_path}/absent/k.sock")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AddressError, match="not a socket"):
        await serve(listen=f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


async def test_stopping_lets_running_requests_end_and_refuses_new_ones(serve):
    served = await serve(HeldRuntime())
    call = aiter(served.vision.StreamQuery(LONG))
    await anext(call)
    stopping = asyncio.create_task(served.server.stop(grace_s=600))
    await until(lambda: says_no(served))
    told = await failure(served.vision.Query(SHORT))
    assert told.code is grpc.StatusCode.UNAVAILABLE
    assert (told.reason, told.retry_after_s) == ("SHUTTING_DOWN", 1.0)
    served.runtime.gate.set()
    events = [event async for event in call]
    assert events[-1].final.answers[0].text == "a" * 200
    await stopping
    told = await failure(served.vision.Query(SHORT, timeout=60))
    assert told.code is grpc.StatusCode.UNAVAILABLE
    assert served.runtime.closed


async def test_requests_are_taken_for_a_while_after_health_has_said_no(moved_clock, serve):
    served = await serve()
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    stopping = asyncio.create_task(served.server.stop(grace_s=600, delay_s=600))
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
    assert (await served.vision.Query(SHORT)).usage.output_tokens == 2
    assert await check(served)(VISION_SERVICE) == NOT_SERVING and not stopping.done()
    moved_clock.advance(600)
    await stopping
    assert (await failure(served.vision.Query(SHORT))).code is grpc.StatusCode.UNAVAILABLE


async def test_an_engine_that_dies_ends_the_delay(serve):
    served = await serve()
    stopping = asyncio.create_task(served.server.stop(grace_s=0, delay_s=600))
    await until(lambda: says_no(served))
    await served.engine.shutdown(grace_s=0)
    await asyncio.wait_for(stopping, 60)


async def test_the_end_of_the_grace_period_ends_what_still_runs(serve):
    served = await serve(EndlessRuntime())
    request = pb.QueryRequest(query=pb.QueryTask(question="?", max_tokens=NO_END))
    call = aiter(served.vision.StreamQuery(request))
    await anext(call)
    stopping = asyncio.create_task(served.server.stop(grace_s=0.1))
    told = await failure(call)
    assert told.code is grpc.StatusCode.UNAVAILABLE
    assert (told.reason, told.retry_after_s) == ("SHUTTING_DOWN", 1.0)
    await asyncio.wait_for(stopping, 60)


async def test_stopping_does_not_wait_for_those_who_watch_health(serve):
    served = await serve()
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    await asyncio.wait_for(served.server.stop(grace_s=600), 60)
    watch.cancel()


@pytest.mark.slow
async def test_pings_during_a_quiet_call_do_not_cost_the_connection(serve):
    """Without the right keepalive option grpc ends such a call with "Too many pings" after three of them."""
    served = await serve(HeldRuntime())
    options = [
        ("grpc.keepalive_time_ms", 300),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with (
        Wire(served.server.addresses[0]) as wire,
        grpc.aio.insecure_channel(wire.address, options=options) as channel,
    ):
        call = type(served.vision)(channel).Query(SHORT)
        await until(lambda: wire.client_pings >= 4)
        served.runtime.gate.set()
        assert (await call).usage.output_tokens == 2
