"""Query and Caption with several samples: as single calls with seeds in a row, the image computed once, all or none."""

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.services.messages.tasks import MAX_SAMPLES
from tests.engine.fakes import never_ends
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure, of_message
from tests.waiting import until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
SKILLS = ["Query", "Caption"]


def task(skill, num_samples=None, max_tokens=6, text=None, **sampling):
    own = {"question": "what?"} if skill == "Query" else {}
    own |= {"sampling": common_pb2.Sampling(**{"temperature": 1.0} | sampling), "text": text}
    return getattr(pb, f"{skill}Task")(num_samples=num_samples, max_tokens=max_tokens, **own)


def request(skill, num_samples=None, **fields):
    asked = task(skill, num_samples, **fields)
    if skill == "Query":
        return pb.QueryRequest(images=[raw_image()], query=asked)
    return pb.CaptionRequest(image=raw_image(), caption=asked)


def samples(response):
    return list(response.answers if isinstance(response, pb.QueryResponse) else response.captions)


def seeds(response):
    return [sample.seed for sample in samples(response)]


@pytest.mark.parametrize("skill", SKILLS)
async def test_each_sample_is_the_call_with_its_seed(serve, skill):
    served = await serve()
    method = getattr(served.vision, skill)
    last = 2**63 - 2
    alone = [await method(request(skill, seed=(last + i) % 2**63)) for i in range(4)]
    together = await method(request(skill, num_samples=4, seed=last))
    assert seeds(together) == [last, last + 1, 0, 1]
    assert samples(together) == [sample for each in alone for sample in samples(each)]
    assert together.info.images == alone[0].info.images and together.info.images[0].image_id
    assert together.info.seed == last
    for name in ("input_tokens", "output_tokens", "image_tokens"):
        total = sum(getattr(response.usage, name) for response in alone)
        assert getattr(together.usage, name) == total > 0
    assert together.timings.total_ms >= together.timings.ttft_ms > 0


async def test_without_a_seed_the_seeds_are_still_in_a_row(serve):
    served = await serve()
    response = await served.vision.Query(request("Query", num_samples=3))
    first = response.info.seed
    assert seeds(response) == [first, first + 1, first + 2]
    again = await served.vision.Query(request("Query", num_samples=3))
    assert again.info.seed != first


async def test_an_engine_with_a_seed_gives_each_sample_the_next_one(serve):
    served = await serve(seed=40)
    drawn = [await served.vision.Query(request("Query", num_samples=n)) for n in (3, 1, 2)]
    assert list(map(seeds, drawn)) == [[40, 41, 42], [43], [44, 45]]


async def test_reasoning_and_log_probabilities_are_of_each_sample(serve):
    served = await serve()
    asked = request("Query", num_samples=2, text={"logprobs": True})
    asked.query.reasoning = True
    response = await served.vision.Query(asked)
    for sample in response.answers:
        assert sample.HasField("reasoning") and sample.HasField("logprobs")


@pytest.mark.parametrize("skill", SKILLS)
async def test_other_numbers_are_refused(serve, skill):
    served = await serve()
    for number in (-1, 0, MAX_SAMPLES + 1, 2**31 - 1):
        failed = await failure(getattr(served.vision, skill)(request(skill, num_samples=number)))
        assert (failed.code, failed.fields) == (INVALID, [f"{skill.lower()}.num_samples"])
        assert f"{number} is not in [1, 16]" in failed.message
    assert served.runtime.plans == []


@pytest.mark.parametrize("skill", SKILLS)
async def test_a_stream_has_one_sample(serve, skill):
    served = await serve()
    stream = getattr(served.vision, f"Stream{skill}")
    failed = await failure(stream(request(skill, num_samples=2)))
    assert (failed.code, failed.fields) == (INVALID, [f"{skill.lower()}.num_samples"])
    events = [event async for event in stream(request(skill, num_samples=1))]
    assert len(samples(events[-1].final)) == 1


async def test_a_wrong_setting_is_named_once(serve):
    served = await serve()
    failed = await failure(served.vision.Query(request("Query", num_samples=3, top_p=2.0)))
    assert (failed.code, failed.fields) == (INVALID, ["query.sampling.top_p"])
    assert served.engine.num_requests == 0


async def test_a_sample_that_fails_fails_the_call(serve):
    runtime = FakeRuntime(LIMITS, never_ends, cost=lambda plan: 0.002)
    served = await serve(runtime)
    runtime.bad_sequences.add(2)
    asked = request("Query", num_samples=3, max_tokens=200)
    failed = await failure(served.vision.Query(asked))
    assert (failed.code, failed.reason) == (grpc.StatusCode.INTERNAL, "COMPUTATION_FAILED")
    assert served.engine.num_requests == 0
    assert len((await served.vision.Query(asked)).answers) == 3


async def test_a_cancelled_call_ends_all(serve):
    served = await serve(EndlessRuntime())
    call = served.vision.Query(request("Query", num_samples=6, max_tokens=NO_END))
    await until(lambda: served.engine.num_requests >= 6)
    call.cancel()
    await until(lambda: not served.engine.num_requests)
    assert served.engine.stats.running == served.engine.stats.waiting == 0


async def test_each_sample_takes_a_place(serve):
    served = await serve(max_queue=1)
    failed = await failure(served.vision.Query(request("Query", num_samples=5)))
    assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert served.engine.num_requests == 0
    assert len((await served.vision.Query(request("Query", num_samples=4))).answers) == 4


@pytest.mark.parametrize("skill", SKILLS)
async def test_a_task_of_analyze_has_samples(serve, skill):
    served = await serve()
    alone = await getattr(served.vision, skill)(request(skill, num_samples=3, seed=5))
    name = skill.lower()
    tasks = [pb.Task(**{name: task(skill, n, seed=5)}) for n in (3, 1, 17)]
    asked = pb.AnalyzeRequest(image=raw_image(), tasks=tasks)
    several, one, wrong = (await served.vision.Analyze(asked)).results
    assert samples(getattr(several, name)) == samples(alone)
    assert samples(getattr(one, name)) == samples(alone)[:1]
    assert getattr(several, name).info.seed == 5
    assert of_message(wrong.error).fields == [f"tasks[2].{name}.num_samples"]
    *_, last = [event async for event in served.vision.StreamAnalyze(asked)]
    several, one, _ = last.final.results
    assert of_message(several.error).fields == [f"tasks[0].{name}.num_samples"]
    assert samples(getattr(one, name)) == samples(alone)[:1]


async def test_a_frame_has_samples(serve):
    served = await serve()
    config = pb.FramesConfig(tasks=[pb.Task(query=task("Query", 3, seed=5))])
    frame = pb.Frame(frame_id=1, image=raw_image())
    sent = [pb.StreamFramesRequest(config=config), pb.StreamFramesRequest(frame=frame)]
    (told,) = [response async for response in served.vision.StreamFrames(sent)]
    assert seeds(told.results.results[0].query) == [5, 6, 7]
