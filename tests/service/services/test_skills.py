"""All five skills over a real socket: the unary answer, its stream, and that both have the same content."""

import asyncio
import dataclasses
import itertools

import grpc
import numpy as np
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_grpc.services.answers import masks
from tests.service.conftest import LIMITS, raw_image

GREEDY = common_pb2.Sampling(temperature=0, max_tokens=8)

REQUESTS = {
    "Query": pb.QueryRequest(image=raw_image(), question="what is it?", sampling=GREEDY),
    "Caption": pb.CaptionRequest(
        image=raw_image(), length=pb.CAPTION_LENGTH_SHORT, sampling=GREEDY
    ),
    "Point": pb.PointRequest(image=raw_image(), object="cat", max_objects=3),
    "Detect": pb.DetectRequest(image=raw_image(), object="cat", max_objects=3),
    "Segment": pb.SegmentRequest(image=raw_image(), object="cat", sampling=GREEDY),
}


def without_timings(response):
    copy = type(response)()
    copy.CopyFrom(response)
    copy.ClearField("timings")
    copy.ClearField("request_id")
    copy.usage.cached_tokens = 0  # What was there before depends on what was asked before.
    return copy


async def collect(call):
    return [event async for event in call]


@pytest.mark.parametrize("skill", REQUESTS)
async def test_a_stream_tells_what_one_answer_tells(serve, skill):
    served = await serve()
    request = REQUESTS[skill]
    response = await getattr(served.vision, skill)(request)
    assert response.model == "fake"
    assert response.request_id
    assert (response.image_size.width, response.image_size.height) == (60, 40)
    assert response.usage.image_tokens == 81
    assert response.usage.input_tokens > 81
    assert response.finish_reason in (
        common_pb2.FINISH_REASON_STOP,
        common_pb2.FINISH_REASON_LENGTH,
    )
    assert response.timings.total_time_ms >= response.timings.ttft_ms > 0
    for _, duration in response.timings.ListFields():
        assert duration == round(duration, 3)

    events = await collect(getattr(served.vision, f"Stream{skill}")(request))
    assert [event.sequence for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "final"
    assert kinds.count("started") == kinds.count("final") == 1
    assert events[0].started.model == "fake"
    final = events[-1].final
    assert events[0].started.request_id == final.request_id
    final_seed, final.seed = (
        final.seed,
        response.seed,
    )  # Drawn anew for each request; greedy does not use it.
    assert final_seed
    assert without_timings(final) == without_timings(response)
    if skill in ("Query", "Caption"):
        text = final.answer if skill == "Query" else final.caption
        assert text
        assert "".join(e.text_delta.text for e in events[1:-1]) == text
    elif skill in ("Point", "Detect"):
        found = final.points if skill == "Point" else final.objects
        assert found
        assert [e.object for e in events[1:-1]] == list(found)


async def test_reasoning_comes_before_the_answer_and_joins_to_the_whole(serve):
    def think(fed):
        """A letter of two bytes, a letter grounded by a point, the answer id, then text."""
        said = fed[fed.index(4) + 1 :]
        plan = [100 + 0xC3, 100 + 0xA4, 7, 100 + ord("b"), 5, 5, 9, 3, 100 + ord("y")]
        return plan[len(said)] if len(said) < len(plan) else 0

    served = await serve(FakeRuntime(LIMITS, think))
    request = pb.QueryRequest(
        image=raw_image(),
        question="why?",
        reasoning=True,
        sampling=common_pb2.Sampling(temperature=0),
    )
    events = await collect(served.vision.StreamQuery(request))
    # Tokens that come together are one message.
    kinds = [kind for kind, _ in itertools.groupby(e.WhichOneof("event") for e in events)]
    assert kinds == ["started", "reasoning_delta", "text_delta", "final"]
    final = events[-1].final
    assert "".join(e.reasoning_delta.text for e in events) == final.reasoning.text
    assert final.answer == "y"
    assert final.reasoning.text == "äb"
    (span,) = final.reasoning.grounding
    # Offsets count code points, not bytes of UTF-8.
    assert (span.start, span.end) == (1, 2)
    assert len(span.points) == 1
    assert final.finish_reason == common_pb2.FINISH_REASON_STOP
    unary = await served.vision.Query(request)
    assert unary.reasoning == final.reasoning


async def test_reasoning_is_unset_unless_asked_for(serve):
    served = await serve()
    response = await served.vision.Query(REQUESTS["Query"])
    assert not response.HasField("reasoning")


async def test_a_stop_string_ends_answers_and_descriptions(serve):
    served = await serve()
    for skill, field in (("Query", "answer"), ("Caption", "caption")):
        request = type(REQUESTS[skill])()
        request.CopyFrom(REQUESTS[skill])
        text = getattr(await getattr(served.vision, skill)(request), field)
        stop = text[2:4]
        expected = text[: text.index(stop)]
        request.sampling.stop.extend(["not in the text", stop])
        response = await getattr(served.vision, skill)(request)
        assert getattr(response, field) == expected
        assert response.finish_reason == common_pb2.FINISH_REASON_STOP
        events = await collect(getattr(served.vision, f"Stream{skill}")(request))
        assert "".join(event.text_delta.text for event in events) == expected
        assert without_timings(events[-1].final).usage == without_timings(response).usage


@pytest.mark.parametrize(
    ("stop", "field", "message"),
    [
        (["x"] * 17, "sampling.stop", "has 17 texts"),
        (["x", ""], "sampling.stop[1]", "must not be empty"),
        (["x" * 257], "sampling.stop[0]", "has 257 UTF-8 bytes"),
    ],
)
async def test_invalid_stop_strings_name_their_field(serve, stop, field, message):
    served = await serve()
    sampling = common_pb2.Sampling(stop=stop)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.vision.Query(pb.QueryRequest(question="a", sampling=sampling))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details() and message in caught.value.details()
    for skill in ("Point", "Detect", "Segment"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = getattr(pb, f"{skill}Request")
            await getattr(served.vision, skill)(
                request(image=raw_image(), object="a", sampling=common_pb2.Sampling(stop=["x"]))
            )
        assert "sampling.stop" in caught.value.details()


async def test_a_question_needs_no_image(serve):
    served = await serve()
    response = await served.vision.Query(pb.QueryRequest(question="hello?", sampling=GREEDY))
    assert response.answer
    assert not response.HasField("image_size")
    assert response.usage.image_tokens == 0


def segment_script(path):
    """Two coordinates, a size, then ``path`` token by token."""

    def script(fed):
        said = fed[fed.index(3) + 1 :]
        plan = [5, 5, 6, *path, 0]
        return plan[
            min(len(said), len(plan) - 1)
        ]  # A step may be launched before the end is known.

    return script


async def test_segment_sends_the_box_first_then_the_path_and_a_mask_on_request(serve):
    path = [100 + b for b in b"M0L9H9Z"]
    served = await serve(FakeRuntime(LIMITS, segment_script(path)))
    request = pb.SegmentRequest(image=raw_image(), object="cat", mask_format=pb.MASK_FORMAT_RLE)
    events = await collect(served.vision.StreamSegment(request))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "object", *["path_piece"] * 4, "final"]
    final = events[-1].final
    assert " ".join(e.path_piece.path for e in events[2:-1]) == final.svg_path
    assert events[1].object == final.box
    assert (final.mask.width, final.mask.height) == (60, 40)
    assert sum(final.mask.rle.counts) == 60 * 40


@pytest.mark.parametrize("mask_format", [pb.MASK_FORMAT_NONE, pb.MASK_FORMAT_UNSPECIFIED])
async def test_segment_draws_no_mask_unless_asked_to(serve, mask_format):
    served = await serve(FakeRuntime(LIMITS, segment_script([])))
    response = await served.vision.Segment(
        pb.SegmentRequest(image=raw_image(), object="cat", mask_format=mask_format)
    )
    assert response.HasField("box")
    assert not response.HasField("mask")


async def test_a_mask_as_polygons(serve):
    path = [100 + b for b in b"M0L9H9Z"]
    served = await serve(FakeRuntime(LIMITS, segment_script(path)))
    response = await served.vision.Segment(
        pb.SegmentRequest(image=raw_image(), object="cat", mask_format=pb.MASK_FORMAT_POLYGONS)
    )
    assert (response.mask.width, response.mask.height) == (60, 40)
    assert response.mask.WhichOneof("encoding") == "polygons"
    assert not response.mask.polygons.polygons  # Half of each pair is dropped: no corner is left.
    square = masks.corners("M 0 0 L 1 0 L 1 1 L 0 1 z", (0.25, 0.5, 0.75, 1.0), 60, 40)
    assert square == [[15, 20, 45, 20, 45, 40, 15, 40]]


async def test_a_refined_outline_comes_with_the_coarse_one(serve):
    # The byte tokenizer writes one digit at a time, so the path is drawn by letters of relative steps of 9/960.
    path = [100 + b for b in b"M00" + b"l90" * 80 + b"l09" * 80 + b"z"]
    limits = dataclasses.replace(LIMITS, refines=True, max_seq_length=1200, num_pages=1300)
    served = await serve(FakeRuntime(limits, segment_script(path)))
    request = pb.SegmentRequest(image=raw_image(), object="cat")
    events = await collect(served.vision.StreamSegment(request))
    final = events[-1].final
    pieces = [e.path_piece.path for e in events if e.WhichOneof("event") == "path_piece"]
    assert " ".join(pieces) == final.coarse_path != final.svg_path
    assert events[1].object == final.coarse_box != final.box
    request.refine = False
    coarse = await served.vision.Segment(request)
    assert (coarse.svg_path, coarse.box) == (final.coarse_path, final.coarse_box)
    assert not coarse.HasField("coarse_path") and not coarse.HasField("coarse_box")


async def test_asking_for_a_refiner_that_is_not_there_is_an_error(serve):
    served = await serve(FakeRuntime(LIMITS, segment_script([])))
    with pytest.raises(grpc.RpcError) as caught:
        await served.vision.Segment(pb.SegmentRequest(image=raw_image(), object="cat", refine=True))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "no refiner" in caught.value.details()


async def test_results_are_clipped_to_the_image(serve):
    served = await serve(FakeRuntime(LIMITS, lambda fed: 5))
    request = pb.DetectRequest(image=raw_image(), object="cat", max_objects=40)
    response = await served.vision.Detect(request)
    assert len(response.objects) == 40
    edges = np.array([[b.x_min, b.y_min, b.x_max, b.y_max] for b in response.objects])
    assert edges.min() == 0
    assert edges.max() == 1
    assert (edges[:, :2] <= edges[:, 2:]).all()


async def test_raw_images_of_the_same_pixels_give_the_same_in_every_format(serve):
    served = await serve()
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 4), np.uint8)
    rgb = np.ascontiguousarray(pixels[:, :, :3])
    raws = {
        common_pb2.PIXEL_FORMAT_UNSPECIFIED: rgb,
        common_pb2.PIXEL_FORMAT_RGB8: rgb,
        common_pb2.PIXEL_FORMAT_RGBA8: pixels,
        common_pb2.PIXEL_FORMAT_BGR8: rgb[:, :, ::-1],
    }
    images = []
    for pixel_format, data in raws.items():
        raw = common_pb2.RawImage(data=data.tobytes(), width=60, height=40, format=pixel_format)
        images.append(common_pb2.Image(raw=raw))
    grey = common_pb2.RawImage(
        data=rgb[:, :, 0].tobytes(), width=60, height=40, format=common_pb2.PIXEL_FORMAT_GRAY8
    )
    images.append(common_pb2.Image(raw=grey))
    answers = await asyncio.gather(
        *(
            served.vision.Caption(pb.CaptionRequest(image=image, sampling=GREEDY))
            for image in images
        )
    )
    assert len({answer.caption for answer in answers[:-1]}) == 1
    assert answers[-1].caption != answers[0].caption


async def test_every_skill_at_once_gives_what_each_gives_alone(serve):
    served = await serve()
    alone = {
        skill: without_timings(await getattr(served.vision, skill)(request))
        for skill, request in REQUESTS.items()
    }
    mixed = await asyncio.gather(
        *(getattr(served.vision, skill)(request) for skill, request in list(REQUESTS.items()) * 4)
    )
    for skill, response in zip(list(REQUESTS) * 4, mixed, strict=True):
        response.seed = alone[skill].seed
        assert without_timings(response) == alone[skill]
    assert served.engine.num_requests == 0


async def test_sampling_reaches_the_engine(serve):
    served = await serve()
    request = pb.QueryRequest(
        image=raw_image(), question="what?", sampling=common_pb2.Sampling(max_tokens=3, seed=7)
    )
    response = await served.vision.Query(request)
    assert response.usage.output_tokens == 3
    assert response.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert response.seed == 7
