"""An answer that a caller has begun: alone, as a stream, and as a task."""

from __future__ import annotations

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.service.conftest import raw_image


async def test_the_model_continues_it(serve):
    served = await serve()
    sampling = common_pb2.Sampling(temperature=0, max_tokens=9)
    plain = pb.QueryRequest(image=raw_image(), question="What?", sampling=sampling)
    begun = pb.QueryRequest(question="What?", answer_start="It is", sampling=sampling)
    begun.image.CopyFrom(plain.image)
    whole, rest = await served.vision.Query(plain), await served.vision.Query(begun)
    assert rest.usage.input_tokens == whole.usage.input_tokens + len("It is")
    assert rest.answer and rest.answer != whole.answer
    stream = [e async for e in served.vision.StreamQuery(pb.StreamQueryRequest(request=begun))]
    assert stream[-1].final.answer == rest.answer
    task = pb.QueryTask(question="What?", answer_start="It is", sampling=sampling)
    request = pb.AnalyzeRequest(image=plain.image, tasks=[pb.AnalyzeTask(key="a", query=task)])
    (result,) = (await served.vision.Analyze(request)).results
    assert result.query.answer == rest.answer
