"""Query and Caption with several samples: as single calls with seeds in a row, the image computed once, all or none."""

import grpc
import pytest

from kestrel_client import AsyncKestrelClient, InvalidRequestError
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_grpc.services.answers.several_samples import MAX_SAMPLES
from tests.engine.fakes import IMAGE, never_ends
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure
from tests.waiting import until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
SKILLS = ["Query", "Caption"]
TEXTS = {"Query": "answer", "Caption": "caption"}


def request(skill, num_samples=None, **sampling):
    own = {"question": "what?"} if skill == "Query" else {}
    sampling = common_pb2.Sampling(**{"temperature": 1.0, "max_tokens": 6} | sampling)
    made = getattr(pb, f"{skill}Request")
    return made(image=raw_image(), sampling=sampling, num_samples=num_samples, **own)


def without_times(response):
    kept = type(response)()
    kept.CopyFrom(response)
    for field in ("timings", "request_id", "usage", "samples"):
        kept.ClearField(field)
    return kept


@pytest.mark.parametrize("skill", SKILLS)
async def test_each_sample_is_the_call_with_its_seed(serve, skill):
    served = await serve()
    method = getattr(served.vision, skill)
    last = 2**64 - 2
    alone = [await method(request(skill, seed=(last + i) % 2**64)) for i in range(4)]
    together = await method(request(skill, num_samples=4, seed=last))
    assert [sample.seed for sample in together.samples] == [last, last + 1, 0, 1]
    assert list(map(without_times, together.samples)) == list(map(without_times, alone))
    assert without_times(together) == without_times(alone[0])
    assert together.image_id == alone[0].image_id != ""
    assert all(not sample.samples for sample in together.samples)
    for name in ("input_tokens", "output_tokens", "image_tokens"):
        total = sum(getattr(response.usage, name) for response in alone)
        assert getattr(together.usage, name) == total > 0
    assert together.usage.cached_tokens == sum(s.usage.cached_tokens for s in together.samples)
    assert together.timings.total_time_ms >= together.timings.ttft_ms > 0


@pytest.mark.parametrize("skill", SKILLS)
async def test_one_sample_is_a_call_without_the_field(serve, skill):
    served = await serve()
    method = getattr(served.vision, skill)
    plain = await method(request(skill, seed=5))
    one = await method(request(skill, num_samples=1, seed=5))
    assert without_times(one) == without_times(plain)
    assert not one.samples and one.usage.output_tokens == plain.usage.output_tokens
    assert one.timings.decode_time_ms > 0


async def test_greedy_samples_are_equal(serve):
    served = await serve()
    response = await served.vision.Query(request("Query", num_samples=3, temperature=0.0))
    assert {sample.answer for sample in response.samples} == {response.answer}
    assert response.answer


async def test_without_a_seed_the_seeds_are_still_in_a_row(serve):
    served = await serve()
    response = await served.vision.Query(request("Query", num_samples=3))
    first = response.samples[0].seed
    assert [sample.seed for sample in response.samples] == [first, first + 1, first + 2]
    again = await served.vision.Query(request("Query", num_samples=3))
    assert again.samples[0].seed != first


async def test_an_engine_with_a_seed_gives_each_sample_the_next_one(serve):
    served = await serve(seed=40)
    drawn = [await served.vision.Query(request("Query", num_samples=n)) for n in (3, 1, 2)]
    seeds = [[s.seed for s in response.samples] or [response.seed] for response in drawn]
    assert seeds == [[40, 41, 42], [43], [44, 45]]


async def test_the_image_is_encoded_once_and_its_prefix_shared(serve):
    runtime = FakeRuntime(LIMITS)
    served = await serve(runtime)
    response = await served.vision.Caption(request("Caption", num_samples=MAX_SAMPLES))
    assert len(response.samples) == MAX_SAMPLES
    encoded = [piece for plan in runtime.plans for piece in plan.encode]
    assert sum(piece.last - piece.first for piece in encoded) == encoded[0].image.num_crops
    cached = [sample.usage.cached_tokens for sample in response.samples]
    assert cached.count(0) == 1 and sorted(cached)[1] >= 82
    assert served.engine.num_requests == 0


async def test_a_question_needs_no_image(serve):
    served = await serve()
    asked = pb.QueryRequest(question="hello?", num_samples=2)
    response = await served.vision.Query(asked)
    assert len(response.samples) == 2 and not response.image_id
    assert response.usage.image_tokens == 0 and not response.HasField("image_size")


async def test_reasoning_and_log_probabilities_are_of_each_sample(serve):
    served = await serve()
    asked = request("Query", num_samples=2, logprobs=True)
    asked.reasoning = True
    response = await served.vision.Query(asked)
    for sample in (response, *response.samples):
        assert sample.HasField("reasoning") and sample.HasField("logprobs")


@pytest.mark.parametrize("skill", SKILLS)
@pytest.mark.parametrize("number", [0, 17, 2**32 - 1])
async def test_other_numbers_are_refused(serve, skill, number):
    served = await serve()
    asked = request(skill, num_samples=number)
    failed = await failure(getattr(served.vision, skill)(asked))
    assert (failed.code, failed.fields) == (INVALID, ["num_samples"])
    assert f"{number} is not in [1, 16]" in failed.message
    assert served.runtime.plans == []


@pytest.mark.parametrize("skill", SKILLS)
async def test_a_stream_has_one_sample(serve, skill):
    served = await serve()
    stream = getattr(served.vision, f"Stream{skill}")
    failed = await failure(stream(request(skill, num_samples=2)))
    assert (failed.code, failed.fields) == (INVALID, ["num_samples"])
    events = [event async for event in stream(request(skill, num_samples=1))]
    assert not events[-1].final.samples


async def test_a_wrong_setting_is_named_once(serve):
    served = await serve()
    failed = await failure(served.vision.Query(request("Query", num_samples=3, top_p=2.0)))
    assert (failed.code, failed.fields) == (INVALID, ["sampling.top_p"])
    assert served.engine.num_requests == 0


async def test_a_sample_that_fails_fails_the_call(serve):
    runtime = FakeRuntime(LIMITS, never_ends, cost=lambda plan: 0.002)
    served = await serve(runtime)
    runtime.bad_sequences.add(2)
    asked = request("Query", num_samples=3, max_tokens=200)
    failed = await failure(served.vision.Query(asked))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "COMPUTATION_FAILED")
    assert served.engine.num_requests == 0
    assert len((await served.vision.Query(asked)).samples) == 3


async def test_a_cancelled_call_ends_all(serve):
    served = await serve(EndlessRuntime())
    call = served.vision.Query(request("Query", num_samples=6, max_tokens=NO_END))
    await until(lambda: served.engine.num_requests >= 6)
    call.cancel()
    await until(lambda: not served.engine.num_requests)
    assert served.engine.stats.running == served.engine.stats.waiting == 0


async def test_a_deadline_ends_all(serve):
    served = await serve(EndlessRuntime())
    asked = request("Query", num_samples=6, max_tokens=NO_END)
    told = await served.overdue(lambda timeout: served.vision.Query(asked, timeout=timeout))
    assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not served.engine.num_requests)


async def test_each_sample_takes_a_place(serve):
    served = await serve(max_queue=1)
    failed = await failure(served.vision.Query(request("Query", num_samples=5)))
    assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert served.engine.num_requests == 0
    assert len((await served.vision.Query(request("Query", num_samples=4))).samples) == 4


async def test_the_sdk_has_typed_samples(serve):
    served = await serve()
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        options = {"temperature": 1.0, "max_tokens": 6, "seed": 7}
        drawn = await client.query(IMAGE, "what?", num_samples=3, **options)
        assert [sample.seed for sample in drawn.samples] == [7, 8, 9]
        assert drawn.samples[0].answer == drawn.answer and drawn.samples[0].question == "what?"
        assert len(drawn.to_dict()["samples"]) == 3
        assert "source" not in drawn.to_dict()["samples"][0]
        caption = await client.caption(IMAGE, num_samples=2, **options)
        assert [sample.seed for sample in caption.samples] == [7, 8]
        assert (await client.query(IMAGE, "what?", **options)).samples == ()
        with pytest.raises(InvalidRequestError, match="num_samples"):
            await client.query(IMAGE, "what?", num_samples=-1, **options)
