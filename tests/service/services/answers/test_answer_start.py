"""An answer that a caller has begun: alone, as a stream, and as a task."""

from __future__ import annotations

import numpy as np

from kestrel_client import AsyncKestrelClient, QueryTask
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
    stream = [e async for e in served.vision.StreamQuery(begun)]
    assert stream[-1].final.answer == rest.answer
    task = pb.QueryTask(question="What?", answer_start="It is", sampling=sampling)
    request = pb.AnalyzeRequest(image=plain.image, tasks=[pb.AnalyzeTask(key="a", query=task)])
    (result,) = (await served.vision.Analyze(request)).results
    assert result.query.answer == rest.answer
    async with AsyncKestrelClient(served.server.addresses[0]) as sdk:
        settings = {"temperature": 0, "max_tokens": 9, "answer_start": "It is"}
        picture = np.full((40, 60, 3), 200, np.uint8)
        assert (await sdk.query(picture, "What?", **settings)).answer == rest.answer
        async with sdk.stream_query(picture, "What?", **settings) as events:
            assert "".join([event.text async for event in events]) == rest.answer
        analysis = await sdk.analyze(picture, {"a": QueryTask("What?", answer_start="It is")})
        assert analysis["a"].usage.input_tokens == rest.usage.input_tokens
