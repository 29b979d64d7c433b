"""Query about several images: the prompt of every turn, ids and sizes, what is reused, what is refused and where."""

import grpc
import numpy as np
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import RuntimeConfig
from kestrel_engine.errors import ConfigError
from kestrel_engine.types.requests import ImageBlock
from kestrel_grpc.images.request_images import MAX_IMAGES
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure, of_message

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GREEDY = {"max_tokens": 6, "sampling": common_pb2.Sampling(temperature=0)}
BROKEN = common_pb2.Image(encoded=b"no image")


def image(width=60, height=40, shade=200):
    pixels = np.full((height, width, 3), shade, np.uint8)
    raw = common_pb2.RawImage(data=pixels.tobytes(), width=width, height=height)
    return common_pb2.Image(raw=raw)


def query(*images, question="same?", **fields):
    task = pb.QueryTask(question=question, **GREEDY | fields)
    return pb.QueryRequest(images=images, query=task)


def shape(tokens):
    """The kinds of tokens of a prompt: "i" for an image, "t" for other tokens."""
    return "".join("i" if isinstance(token, ImageBlock) else "t" for token in tokens)


def prompts(runtime):
    return [row.tokens for plan in runtime.plans for row in plan.prefill if row.start == 0]


async def test_images_stand_before_the_text_of_their_turns(serve):
    served = await serve(step_prefill_positions=1000, step_crops=100)
    turns = [pb.Turn(question="ab", answer="c", num_images=2)]
    request = query(raw_image(), image(30, 30), image(20, 40), history=turns)
    response = await served.vision.Query(request)
    (tokens,) = prompts(served.runtime)
    # BOS, image, image of the turn, prefix 3, "ab", suffix 1, "c", image, prefix 3, "same?", suffix 1.
    assert shape(tokens) == "tii" + "t" * 7 + "i" + "t" * 9
    assert response.usage.image_tokens == 3 * served.engine.info.image_positions
    assert response.usage.input_tokens == 3 * served.engine.info.image_positions + 17
    sizes = [(seen.size.width, seen.size.height) for seen in response.info.images]
    assert sizes == [(60, 40), (30, 30), (20, 40)]
    ids = [seen.image_id for seen in response.info.images]
    assert all(ids) and len(set(ids)) == 3
    # The same by the ids.
    named = [common_pb2.Image(image_id=each) for each in ids]
    again = await served.vision.Query(query(*named, history=turns))
    assert again.answers[0].text == response.answers[0].text
    assert again.info.images == response.info.images


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((None, None), "tii" + "t" * 7 + "t" * 7 + "t" * 9),
        ((0, 0), "t" * 8 + "t" * 7 + "ii" + "t" * 9),
        ((0, None), "t" * 8 + "t" * 7 + "ii" + "t" * 9),
        ((1, 1), "ti" + "t" * 7 + "i" + "t" * 7 + "t" * 9),
        ((None, 1), "t" * 8 + "i" + "t" * 7 + "i" + "t" * 9),
    ],
)
async def test_a_turn_counts_its_images(serve, counts, expected):
    """If none does, all images belong to the first turn; images that none counts precede the question."""
    served = await serve(step_prefill_positions=1000, step_crops=100)
    turns = [pb.Turn(question="ab", answer="c", num_images=count) for count in counts]
    await served.vision.Query(query(raw_image(), image(30, 30), history=turns))
    (tokens,) = prompts(served.runtime)
    assert shape(tokens) == expected


async def test_turns_count_no_images_that_are_not_there(serve):
    served = await serve()
    for counts, field in (((1, 2), 1), ((3, None), 0), ((-1, None), 0), ((2**31 - 1, 0), 0)):
        turns = [pb.Turn(question="ab", answer="c", num_images=count) for count in counts]
        request = query(raw_image(), image(30, 30), history=turns)
        failed = await failure(served.vision.Query(request))
        assert failed.fields == [f"query.history[{field}].num_images"]
        assert "the request has 2 images" in failed.message


async def test_another_question_reuses_the_images(serve):
    served = await serve()
    positions = served.engine.info.image_positions
    await served.vision.Query(query(raw_image(), image(30, 30)))
    other = await served.vision.Query(query(raw_image(), image(30, 30), question="other?"))
    # Pages hold 2 positions, so the last one of the images holds a token of text.
    assert other.usage.cached_tokens >= 2 * positions + 1
    third = await served.vision.Query(query(raw_image(), image(20, 20)))
    assert third.usage.cached_tokens == positions + 1


@pytest.mark.parametrize("reasoning", [False, True])
async def test_a_stream_says_what_the_call_says(serve, reasoning):
    served = await serve()
    request = query(raw_image(), image(30, 30), reasoning=reasoning)
    whole = await served.vision.Query(request)
    events = [e async for e in served.vision.StreamQuery(request)]
    final = events[-1].final
    assert final.info.images == whole.info.images == events[0].started.images
    assert len(whole.info.images) == 2
    (answer,) = final.answers
    assert answer.text == whole.answers[0].text
    assert answer.reasoning == whole.answers[0].reasoning
    assert "".join(e.text_delta.text for e in events) == answer.text


async def test_samples_share_the_images(serve):
    served = await serve()
    request = query(raw_image(), image(30, 30), num_samples=2)
    response = await served.vision.Query(request)
    alone = await served.vision.Query(query(raw_image(), image(30, 30)))
    assert [sample.text for sample in response.answers] == [alone.answers[0].text] * 2
    assert response.info.images == alone.info.images and len(alone.info.images) == 2
    assert response.usage.image_tokens == 4 * served.engine.info.image_positions


async def test_errors_name_the_image(serve):
    served = await serve(max_images=3)
    unknown = common_pb2.Image(image_id="img_unknown")
    empty, red = common_pb2.Image(), common_pb2.Image(encoded=b"x", background="red")
    good = raw_image()
    cases = [
        (query(good, BROKEN), ["images[1]"], "IMAGE_"),
        (query(BROKEN), ["images[0]"], "IMAGE_"),
        (query(good, unknown), ["images[1].image_id"], "IMAGE_NOT_FOUND"),
        (query(good, empty), ["images[1]"], ""),
        (query(good, red), ["images[1].background"], ""),
        (query(unknown), ["images[0].image_id"], "IMAGE_NOT_FOUND"),
        (query(red), ["images[0].background"], ""),
        (query(BROKEN, num_samples=2), ["images[0]"], "IMAGE_"),
        (query(good, BROKEN, num_samples=2), ["images[1]"], "IMAGE_"),
        (query(*[good] * 4), ["images"], ""),
        (query(*[good] * 65), ["images"], ""),
    ]
    for request, fields, reason in cases:
        failed = await failure(served.vision.Query(request))
        assert failed.fields == fields, failed
        assert failed.code in (INVALID, grpc.StatusCode.NOT_FOUND), failed
        assert failed.reason.startswith(reason), failed


async def test_images_that_exceed_the_context_are_refused_before_they_are_decoded(serve):
    served = await serve()
    failed = await failure(served.vision.Query(query(*[BROKEN] * 4)))
    assert failed.code is INVALID and failed.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert failed.fields == ["images"]
    assert "take 324 positions (4 of 81 each) and the text 10" in failed.message
    assert "the context has 300: send at most 3 with this text" in failed.message


async def test_tasks_of_analyze_are_about_one_image(serve):
    served = await serve()
    turns = [[pb.Turn(question="a", answer="b", num_images=count)] for count in (1, 2)]
    tasks = [pb.Task(query=pb.QueryTask(question="what?", history=each)) for each in turns]
    request = pb.AnalyzeRequest(image=raw_image(), tasks=tasks)
    good, bad = (await served.vision.Analyze(request)).results
    assert good.HasField("query")
    assert of_message(bad.error).fields == ["tasks[1].query.history[0].num_images"]


async def test_each_image_takes_a_place_in_the_queue(serve):
    runtime = FakeRuntime(LIMITS)
    served = await serve(runtime, max_queue=1)  # Four places with those of the batch.
    answered = await served.vision.Query(query(raw_image(), image(30, 30), image(20, 20)))
    assert len(answered.info.images) == 3
    assert served.engine.places.held == 0
    broken = await failure(served.vision.Query(query(raw_image(), image(30, 30), BROKEN)))
    assert broken.code is INVALID and served.engine.places.held == 0


def test_the_contracts_limit_is_the_largest_value_of_the_setting():
    assert RuntimeConfig(max_images=MAX_IMAGES).max_images == MAX_IMAGES
    with pytest.raises(ConfigError, match="max_images"):
        RuntimeConfig(max_images=MAX_IMAGES + 1)
