"""ModelStreamInfer: many requests on one stream, streamed answers, errors between them, and limits of the stream."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_client._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from kestrel_client._pb.kestrel.v1 import vision_service_pb2
from kestrel_grpc.edge.calls.call import Call
from kestrel_grpc.settings.security import CallLimits, SecurityConfig
from tests.kserve.conftest import infer, jpeg, output
from tests.service.conftest import LOCAL, NO_END, EndlessRuntime, HeldRuntime
from tests.service.statuses import read
from tests.waiting import until

ACCESS_LOG = "kestrel_grpc.access"
SHORT = {"SKILL": "query", "QUESTION": "What?", "TEMPERATURE": 0.0, "MAX_TOKENS": 4}
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
LONG = {**SHORT, "MAX_TOKENS": NO_END}


def limits(**limits: Any) -> dict[str, Any]:
    return {"security": SecurityConfig(calls=CallLimits(**limits))}


async def all_of(call: Any) -> list[pb.ModelStreamInferResponse]:
    return [response async for response in call]


def is_final(response: pb.ModelStreamInferResponse) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("asks_for_empty", [False, True])
async def test_a_streamed_answer(serve, asks_for_empty: bool):
    served = await serve()
    stub = GRPCInferenceServiceStub(served.channel)
    request = infer(id="a", STREAM=True, IMAGE=jpeg(), **{**SHORT, "MAX_TOKENS": 12})
    if asks_for_empty:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    responses = await all_of(stub.ModelStreamInfer([request]))
    assert {response.infer_response.id for response in responses} == {"a"}
    assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
    *pieces, final = [output(response.infer_response) for response in responses]
    assert pieces and all(piece.keys() == {"chunk", "completed", "token_index"} for piece in pieces)
    assert final.keys() == {
        *("chunk", "completed", "request_id", "finish_reason", "answer", "metrics")
    }
    assert "".join(piece["chunk"] for piece in (*pieces, final)) == final["answer"]
    assert final["completed"] is True and final["request_id"] == "a"
    indices = [piece["token_index"] for piece in pieces]
    assert indices == sorted(indices) and indices[-1] <= final["metrics"]["output_tokens"]

    caption = infer(SKILL="caption", STREAM=True, IMAGE=jpeg(), MAX_TOKENS=8, TEMPERATURE=0.0)
    *pieces, final = [
        output(response.infer_response)
        for response in await all_of(stub.ModelStreamInfer([caption]))
    ]
    assert "".join(piece["chunk"] for piece in pieces) == final["caption"]


async def test_many_requests_run_side_by_side_and_errors_keep_the_stream_open(serve, caplog):
    served = await serve(server_config={"access_log": "text"})
    stub = GRPCInferenceServiceStub(served.channel)
    requests = [infer(id=f"good{index}", **SHORT) for index in range(9)]
    requests.insert(4, infer(id="bad", **{**SHORT, "TOP_P": 7.0}))
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        responses = await all_of(stub.ModelStreamInfer(requests))
    by_id = {response.infer_response.id: response for response in responses}
    assert by_id.keys() == {request.id for request in requests} and all(map(is_final, responses))
    bad = by_id.pop("bad")
    assert bad.error_message == "INVALID_ARGUMENT: TOP_P: 7.0 is not in (0, 1]"
    task = {"question": "What?", "sampling": {"temperature": 0}, "max_tokens": 4}
    whole = await served.vision.Query(vision_service_pb2.QueryRequest(query=task))
    for id, response in by_id.items():
        values = output(response.infer_response)
        assert values["answer"] == whole.answers[0].text and values["request_id"] == id
        assert "chunk" not in values
    calls = [record.getMessage() for record in caplog.records if record.name == ACCESS_LOG]
    lines = [line for line in calls if "ModelStreamInfer" in line]
    assert len(lines) == 10
    assert sum("code=INVALID_ARGUMENT" in line for line in lines) == 1


async def test_a_client_may_ask_for_a_status(serve):
    """With the metadata triton_grpc_error: true, an error ends the stream."""
    served = await serve()
    as_status = [("triton_grpc_error", "true")]
    told = await served.refusal(STREAM_INFER, [infer(SKILL="smell")], metadata=as_status)
    assert told.code is grpc.StatusCode.INVALID_ARGUMENT and told.message.startswith("SKILL: ")


async def test_a_message_that_is_none_ends_the_stream(serve):
    served = await serve()
    told = await served.refusal(STREAM_INFER, [b"\x0a\xff\xff"])
    assert told.code is grpc.StatusCode.INVALID_ARGUMENT
    assert await served.send(STREAM_INFER, []) == []


async def test_cancel_frees_pages(serve):
    served = await serve(EndlessRuntime())
    stub = GRPCInferenceServiceStub(served.channel)
    free = served.engine.stats.pages_free
    call = stub.ModelStreamInfer([infer(id=f"{n}", STREAM=True, **LONG) for n in range(2)])
    await call.read()
    await until(lambda: served.engine.num_requests == 2)
    call.cancel()
    await until(lambda: served.engine.num_requests == 0)
    await until(lambda: served.engine.stats.pages_free + served.engine.stats.pages_cached >= free)
    await until(lambda: served.server.guard.held_bytes == 0)


async def test_requests_of_a_stream_count_for_the_callers_limits(serve):
    """One by one, also those of a stream: each is a call in progress of its own."""
    served = await serve(EndlessRuntime(), server_config=limits(calls=2))
    stub = GRPCInferenceServiceStub(served.channel)
    requests = [infer(id=f"{n}", **LONG) for n in range(2)]

    async def send() -> AsyncIterator[pb.ModelInferRequest]:
        for request in requests:
            yield request
        await until(lambda: served.engine.num_requests == 2)
        yield infer(id="third", **LONG)

    call = stub.ModelStreamInfer(send())
    refused = await call.read()
    assert refused.infer_response.id == "third"
    assert refused.error_message.startswith("RESOURCE_EXHAUSTED: 2 calls are in progress")
    call.cancel()


async def test_a_full_queue_refuses_a_request_and_not_the_stream(serve):
    served = await serve(HeldRuntime(), max_queue=1)
    stub = GRPCInferenceServiceStub(served.channel)
    call = stub.ModelStreamInfer([infer(id=f"{n}", **SHORT) for n in range(8)])
    responses = []
    async for response in call:
        assert responses or response.error_message
        served.runtime.gate.set()
        responses.append(response)
    assert len(responses) == 8
    refused = [each.error_message for each in responses if each.error_message]
    assert all(text.startswith("RESOURCE_EXHAUSTED: ") for text in refused)


async def test_a_silent_stream_ends_but_not_while_its_requests_run(moved_clock, serve):
    served = await serve(HeldRuntime(), server_config=limits(read_s=60, deadline_s=None))
    stub = GRPCInferenceServiceStub(served.channel)
    call = stub.ModelStreamInfer()
    await call.write(infer(**SHORT))
    await until(served.runtime.began.is_set)
    moved_clock.advance(100)
    served.runtime.gate.set()
    assert "answer" in output((await call.read()).infer_response)
    await until(lambda: served.server.in_flight.count == 0)
    reading = asyncio.ensure_future(call.read())
    await until(lambda: moved_clock.advance(100) or reading.done())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await reading
    told = read(error.value)
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_SENDER")


async def test_a_reader_too_slow_for_the_first_response_gets_a_status(moved_clock, serve, caplog):
    """The response is larger than what the client takes unread, and initial metadata goes with it."""
    patient = limits(read_s=1e6, deadline_s=None)  # The clock moves also while the request arrives.
    served = await serve(server_config={**patient, "access_log": "text"})
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16), *LOCAL]
    async with grpc.aio.insecure_channel(served.server.addresses[0], options=window) as channel:
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        with caplog.at_level(logging.INFO, ACCESS_LOG):
            await call.write(infer(id="long" * 500_000, SKILL="smell"))
            await until(lambda: moved_clock.advance(10) or "reason=SLOW_READER" in caplog.text)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with asyncio.timeout(100_000):
                await all_of(call)
    assert read(error.value).reason == "SLOW_READER"


async def test_a_call_ends_whose_initial_metadata_is_sent_after_its_handler(
    moved_clock, serve, monkeypatch
):
    """gRPC takes the status only then. The call would never end without it."""
    sent, handled = asyncio.Event(), asyncio.Event()

    def greet(call: Call, metadata: Any) -> None:
        async def send(context=call.context) -> None:
            await sent.wait()
            await context.send_initial_metadata(metadata)

        if not call.is_greeting:
            call._greeting = asyncio.create_task(send())

    monkeypatch.setattr(Call, "greet", greet)
    monkeypatch.setattr(
        Call, "release", lambda call, release=Call.release: (release(call), handled.set())
    )
    served = await serve(server_config=limits(read_s=1e6, deadline_s=None))
    call = GRPCInferenceServiceStub(served.channel).ModelStreamInfer([infer(id="a", SKILL="smell")])
    answer = asyncio.ensure_future(all_of(call))
    await until(
        lambda: moved_clock.advance(10) or (served.server.in_flight.count == 0 and handled.is_set())
    )
    assert not answer.done()
    sent.set()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer
    assert read(error.value).reason == "SLOW_READER"


async def test_timeout_limits_the_time_in_the_queue(serve):
    """As Triton's does. The batch of three is full when the last request arrives."""
    served = await serve(EndlessRuntime())
    stub = GRPCInferenceServiceStub(served.channel)
    late = infer(id="late", **SHORT)
    late.parameters["timeout"].int64_param = 100_000
    call = stub.ModelStreamInfer([*(infer(id=f"{n}", **LONG) for n in range(3)), late])
    first = await call.read()
    assert first.infer_response.id == "late"
    assert first.error_message.startswith("DEADLINE_EXCEEDED: ")
    call.cancel()


@pytest.mark.slow
async def test_streams_leave_memory_to_others(serve):
    """While its requests run, a stream reserves memory for the next one only if half of the room stays free. Streams
    with running requests would otherwise hold all of it, and unary calls would get none."""
    served = await serve(
        EndlessRuntime(), server_config={**limits(held_bytes=8 << 20), "max_message_bytes": 1 << 20}
    )
    stub = GRPCInferenceServiceStub(served.channel)
    calls = [stub.ModelStreamInfer() for _ in range(12)]
    await asyncio.gather(*(call.write(infer(**LONG)) for call in calls))
    await until(lambda: served.engine.num_requests == 12)
    assert served.server.guard.held_bytes <= 4 << 20
    async with asyncio.timeout(100):
        told = await served.vision.Query(
            vision_service_pb2.QueryRequest(
                query={"question": "What?"}, options={"priority": "PRIORITY_HIGH"}
            )
        )
    assert told.answers
    for call in calls:
        call.cancel()
    await until(lambda: served.server.guard.held_bytes == 0)


async def test_a_slow_reader_loses_the_stream(serve, caplog):
    """Responses repeat the long ids of their requests, and fill the buffers between server and client."""
    served = await serve(server_config={**limits(write_s=0.5), "access_log": "text"})
    stub = GRPCInferenceServiceStub(served.channel)
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        call = stub.ModelStreamInfer(
            [infer(id=f"{n} " * 20_000, SKILL="smell") for n in range(600)]
        )
        await until(lambda: "reason=SLOW_READER" in caplog.text)
        await until(lambda: served.server.guard.held_bytes == 0)
        await until(lambda: served.server.in_flight.count == 0)
    call.cancel()
    assert served.server.guard.admission.calls == 0
    assert len(caplog.records) < 600
