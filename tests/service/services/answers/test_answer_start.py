"""An answer that a caller has begun: alone, as a stream, and as a task."""

import numpy as np

from kestrel_client import AsyncKestrelClient, QueryTask
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.service.conftest import raw_image


async def test_the_model_continues_it(serve):
    served = await serve()
    sampling = {"max_tokens": 9, "sampling": common_pb2.Sampling(temperature=0)}
    plain = pb.QueryRequest(images=[raw_image()], query=pb.QueryTask(question="What?", **sampling))
    task = pb.QueryTask(question="What?", answer_start="It is", **sampling)
    begun = pb.QueryRequest(images=[raw_image()], query=task)
    whole, rest = await served.vision.Query(plain), await served.vision.Query(begun)
    assert rest.usage.input_tokens == whole.usage.input_tokens + len("It is")
    answer = rest.answers[0].text
    assert answer and answer != whole.answers[0].text
    stream = [e async for e in served.vision.StreamQuery(begun)]
    assert stream[-1].final.answers[0].text == answer
    request = pb.AnalyzeRequest(image=raw_image(), tasks=[pb.Task(key="a", query=task)])
    (result,) = (await served.vision.Analyze(request)).results
    assert result.query.answers[0].text == answer
    async with AsyncKestrelClient(served.server.addresses[0]) as sdk:
        settings = {"temperature": 0, "max_tokens": 9, "answer_start": "It is"}
        picture = np.full((40, 60, 3), 200, np.uint8)
        assert (await sdk.query(picture, "What?", **settings)).answer == answer
        async with sdk.stream_query(picture, "What?", **settings) as events:
            assert "".join([event.text async for event in events]) == answer
        analysis = await sdk.analyze(picture, {"a": QueryTask("What?", answer_start="It is")})
        assert analysis["a"].usage.input_tokens == rest.usage.input_tokens
