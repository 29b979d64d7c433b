"""What reflection serves beside names: comments, validation rules, each file once; and the limit on its answers."""

import asyncio

from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kestrel_grpc.service_names import SERVICES
from kestrel_grpc.services import reflection
from kestrel_grpc.services.reflection import Reflection

LARGEST = 200_000


async def files_of(channel, symbol):
    """The files that declare a symbol, that one first."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([asked]))]
    found = answer.file_descriptor_response.file_descriptor_proto
    assert sum(map(len, found)) < LARGEST
    return [descriptor_pb2.FileDescriptorProto.FromString(file) for file in found]


async def test_a_field_has_its_comment_and_its_rule(serve):
    served = await serve()
    vision, *others = await files_of(served.channel, "kestrel.v1.QueryTask")
    assert {file.name for file in others} >= {
        "kestrel/v1/common.proto", "buf/validate/validate.proto"
    }  # fmt: skip
    index, query = next((i, m) for i, m in enumerate(vision.message_type) if m.name == "QueryTask")
    place, field = next((i, f) for i, f in enumerate(query.field) if f.name == "question")
    comments = {tuple(p.path): p.leading_comments for p in vision.source_code_info.location}
    assert "question" in comments[4, index, 2, place].lower()
    assert field.options.ByteSize(), "the rule"


async def test_everything_of_ours_has_comments_and_nothing_else_has(serve):
    served = await serve()
    for service in (name for name in SERVICES if name.startswith("kestrel.")):
        for file in await files_of(served.channel, service):
            commented = bool(file.source_code_info.location)
            assert commented == (file.package == "kestrel.v1"), file.name


async def test_answers_that_nobody_reads_are_limited():
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="kestrel.v1.Image")
    served = Reflection(SERVICES)

    async def requests():
        yield asked

    waiting = [served.answer(requests(), None) for _ in range(reflection.MOST_ANSWERS)]
    for answers in waiting:
        await anext(answers)
    late = asyncio.create_task(anext(served.answer(requests(), None)))
    while not served.turns._waiters:
        await asyncio.sleep(0)
    assert not late.done()
    await waiting[0].aclose()
    assert (await late).file_descriptor_response.file_descriptor_proto
