"""Query about several images: the prompt of every turn, ids and sizes, what is reused, what is refused and where."""

import grpc
import numpy as np
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_engine.types.requests import ImageBlock
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GREEDY = common_pb2.Sampling(temperature=0, max_tokens=6)
BROKEN = common_pb2.Image(encoded=b"no image")


def image(width=60, height=40, shade=200):
    pixels = np.full((height, width, 3), shade, np.uint8)
    raw = common_pb2.RawImage(data=pixels.tobytes(), width=width, height=height)
    return common_pb2.Image(raw=raw)


def query(*images, question="same?", **fields):
    return pb.QueryRequest(**{"question": question, "images": images, "sampling": GREEDY} | fields)


def shape(tokens):
    """The kinds of tokens of a prompt: "i" for an image, "t" for other tokens."""
    return "".join("i" if isinstance(token, ImageBlock) else "t" for token in tokens)


def prompts(runtime):
    return [row.tokens for plan in runtime.plans for row in plan.prefill if row.start == 0]


async def test_images_stand_before_the_text_of_their_turns(serve):
    served = await serve(step_prefill_positions=1000, step_crops=100)
    turn = pb.Turn(question="ab", answer="c", images=[image(30, 30)])
    request = query(image(20, 40), image=raw_image(), history=[turn])
    response = await served.vision.Query(request)
    (tokens,) = prompts(served.runtime)
    # BOS, image, image of the turn, prefix 3, "ab", suffix 1, "c", image, prefix 3, "same?", suffix 1.
    assert shape(tokens) == "tii" + "t" * 7 + "i" + "t" * 9
    assert response.usage.image_tokens == 3 * served.engine.info.image_positions
    assert response.usage.input_tokens == 3 * served.engine.info.image_positions + 17
    sizes = [(seen.image_size.width, seen.image_size.height) for seen in response.images]
    assert sizes == [(60, 40), (30, 30), (20, 40)]
    assert (response.image_size.width, response.image_size.height) == (60, 40)
    ids = [seen.image_id for seen in response.images]
    assert all(ids) and len(set(ids)) == 3 and response.image_id == ids[0]
    # The same by the ids.
    named = [common_pb2.Image(image_id=each) for each in ids]
    turn = pb.Turn(question="ab", answer="c", images=[named[1]])
    again = await served.vision.Query(query(named[2], image=named[0], history=[turn]))
    assert again.answer == response.answer and [s.image_id for s in again.images] == ids


async def test_one_of_the_images_is_as_the_image_alone(serve):
    served = await serve()
    alone = await served.vision.Query(query(image=raw_image()))
    among = await served.vision.Query(query(raw_image()))
    assert among.answer == alone.answer and among.usage.input_tokens == alone.usage.input_tokens
    assert not alone.images and [seen.image_id for seen in among.images] == [alone.image_id]


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
    assert final.answer == whole.answer and final.images == whole.images
    assert final.reasoning == whole.reasoning
    assert "".join(e.text_delta.text for e in events) == whole.answer


async def test_samples_share_the_images(serve):
    served = await serve()
    request = query(raw_image(), image(30, 30), num_samples=2)
    response = await served.vision.Query(request)
    alone = await served.vision.Query(query(raw_image(), image(30, 30)))
    assert [sample.answer for sample in response.samples] == [alone.answer] * 2
    assert [s.images for s in response.samples] == [alone.images] * 2 and len(alone.images) == 2
    assert response.usage.image_tokens == 4 * served.engine.info.image_positions


async def test_errors_name_the_image(serve):
    served = await serve(max_images=3)
    unknown = common_pb2.Image(image_id="img_unknown")
    empty, red = common_pb2.Image(), common_pb2.Image(encoded=b"x", background="red")
    good = raw_image()
    cases = [
        (query(good, BROKEN), ["images[1]"], "IMAGE_"),
        (query(BROKEN), ["images[0]"], "IMAGE_"),
        (query(good, image=BROKEN), ["image"], "IMAGE_"),
        (
            query(good, history=[pb.Turn(question="a", answer="b", images=[good, BROKEN])]),
            ["history[0].images[1]"],
            "IMAGE_",
        ),
        (query(good, unknown), ["images[1].image_id"], "IMAGE_NOT_FOUND"),
        (query(good, empty), ["images[1]"], ""),
        (query(good, red), ["images[1].background"], ""),
        (query(good, num_samples=2, image=BROKEN), ["image"], "IMAGE_"),
        (query(good, BROKEN, num_samples=2), ["images[1]"], "IMAGE_"),
        (query(*[good] * 4), ["images"], ""),
        (query(*[good] * 65), ["images[64]"], ""),
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
    turn = pb.Turn(question="a", answer="b", images=[raw_image()])
    task = pb.AnalyzeTask(query=pb.QueryTask(question="what?", history=[turn]))
    request = pb.AnalyzeRequest(image=raw_image(), tasks=[task])
    response = await served.vision.Analyze(request)
    assert response.results[0].error.message.startswith("history[0].images: must be empty") or (
        "history[0].images" in str(response.results[0].error)
    )


async def test_each_image_takes_a_place_in_the_queue(serve):
    runtime = FakeRuntime(LIMITS)
    served = await serve(runtime, max_queue=1)  # Four places with those of the batch.
    answered = await served.vision.Query(query(raw_image(), image(30, 30), image(20, 20)))
    assert answered.images
    assert served.engine.places.held == 0
    broken = await failure(served.vision.Query(query(raw_image(), image(30, 30), BROKEN)))
    assert broken.code is INVALID and served.engine.places.held == 0
