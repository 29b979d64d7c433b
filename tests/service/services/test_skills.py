"""All five skills over a real socket: the unary answer, its stream, and that both have the same content."""

import asyncio
import dataclasses
import itertools

import grpc
import numpy as np
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.services.answers import masks
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, raw_image
from tests.service.statuses import failure
from tests.waiting import until

GREEDY = {"max_tokens": 8, "sampling": common_pb2.Sampling(temperature=0)}

REQUESTS = {
    "Query": pb.QueryRequest(images=[raw_image()], query=pb.QueryTask(question="what is it?", **GREEDY)),
    "Caption": pb.CaptionRequest(image=raw_image(), caption=pb.CaptionTask(length=pb.CAPTION_LENGTH_SHORT, **GREEDY)),
    "Point": pb.PointRequest(image=raw_image(), point=pb.PointTask(objects=["cat"], max_objects=3)),
    "Detect": pb.DetectRequest(image=raw_image(), detect=pb.DetectTask(objects=["cat"], max_objects=3)),
    "Segment": pb.SegmentRequest(image=raw_image(), segment=pb.SegmentTask(objects=["cat"], **GREEDY)),
}  # fmt: skip


def without_timings(response):
    copy = type(response)()
    copy.CopyFrom(response)
    copy.ClearField("timings")
    # Drawn anew for each request; greedy does not use the seed.
    copy.info.request_id, copy.info.seed = "", 0
    for answer in texts(copy):
        answer.seed = 0
    copy.usage.cached_tokens = 0  # What was there before depends on what was asked before.
    return copy


def texts(response):
    """The answers or descriptions."""
    return getattr(response, "answers", ()) or getattr(response, "captions", ())


def finish_reason(response):
    (part,) = texts(response) or response.searches
    return part.finish_reason


async def collect(call):
    return [event async for event in call]


@pytest.mark.parametrize("skill", REQUESTS)
async def test_a_stream_tells_what_one_answer_tells(serve, skill):
    served = await serve()
    request = REQUESTS[skill]
    response = await getattr(served.vision, skill)(request)
    assert response.info.model == "fake"
    assert response.info.request_id and response.info.seed
    assert (response.info.images[0].size.width, response.info.images[0].size.height) == (60, 40)
    assert response.usage.image_tokens == 81
    assert response.usage.input_tokens > 81
    assert finish_reason(response) in (
        common_pb2.FINISH_REASON_STOP,
        common_pb2.FINISH_REASON_LENGTH,
    )
    assert response.timings.total_ms >= response.timings.ttft_ms > 0
    for _, duration in response.timings.ListFields():
        assert duration == round(duration, 3)

    events = await collect(getattr(served.vision, f"Stream{skill}")(request))
    assert [event.sequence for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "final"
    assert kinds.count("started") == kinds.count("final") == 1
    final = events[-1].final
    assert events[0].started == final.info
    assert without_timings(final) == without_timings(response)
    if skill in ("Query", "Caption"):
        text = texts(final)[0].text
        assert text and not texts(final)[0].HasField("reasoning")
        assert "".join(e.text_delta.text for e in events[1:-1]) == text
        return
    if skill in ("Point", "Detect"):
        assert final.detections
        assert [e.detection for e in events[1:-2]] == list(final.detections)
        assert {found.label for found in final.detections} == {"cat"}
    assert [events[-2].search] == list(final.searches)
    assert final.searches[0].object == "cat"


@pytest.mark.parametrize("skill", ["Query", "Detect", "Analyze"])
async def test_a_stream_that_is_cut_has_named_its_image_and_seed(serve, skill):
    """The image is stored as soon as it is known to be valid."""
    served = await serve(EndlessRuntime())
    task = pb.QueryTask(question="what?", max_tokens=NO_END, sampling={"seed": 5})
    requests = {
        "Query": pb.QueryRequest(images=[raw_image()], query=task),
        "Detect": pb.DetectRequest(
            image=raw_image(),
            detect=pb.DetectTask(objects=["cat", "dog"], max_objects=300, sampling={"seed": 5}),
        ),
        "Analyze": pb.AnalyzeRequest(image=raw_image(), tasks=[pb.Task(query=task)]),
    }
    call = getattr(served.vision, f"Stream{skill}")(requests[skill])
    started = (await call.read()).started
    call.cancel()
    assert started.seed == (0 if skill == "Analyze" else 5)
    (seen,) = started.images
    assert (seen.size.width, seen.size.height) == (60, 40)
    served.runtime.ends.set()
    await until(lambda: not served.engine.num_requests)
    named = common_pb2.Image(image_id=seen.image_id)
    response = await served.vision.Caption(pb.CaptionRequest(image=named))
    assert response.info.images == started.images


async def test_reasoning_comes_before_the_answer_and_joins_to_the_whole(serve):
    def think(fed):
        """A letter of two bytes, a letter grounded by a point, the answer id, then text."""
        said = fed[fed.index(4) + 1 :]
        plan = [100 + 0xC3, 100 + 0xA4, 7, 100 + ord("b"), 5, 5, 9, 3, 100 + ord("y")]
        return plan[len(said)] if len(said) < len(plan) else 0

    served = await serve(FakeRuntime(LIMITS, think))
    request = pb.QueryRequest(
        images=[raw_image()],
        query=pb.QueryTask(
            question="why?", reasoning=True, sampling=common_pb2.Sampling(temperature=0)
        ),
    )
    events = await collect(served.vision.StreamQuery(request))
    # Tokens that come together are one message.
    kinds = [kind for kind, _ in itertools.groupby(e.WhichOneof("event") for e in events)]
    assert kinds == ["started", "reasoning_delta", "text_delta", "final"]
    final = events[-1].final
    (answer,) = final.answers
    assert "".join(e.reasoning_delta.text for e in events) == answer.reasoning.text
    assert answer.text == "y"
    assert answer.reasoning.text == "äb"
    (span,) = answer.reasoning.grounding
    # Offsets count code points, not bytes of UTF-8.
    assert (span.start, span.end) == (1, 2)
    assert len(span.points) == 1
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
    unary = await served.vision.Query(request)
    assert unary.answers[0].reasoning == answer.reasoning


async def test_a_stop_string_ends_answers_and_descriptions(serve):
    served = await serve()
    for skill in ("Query", "Caption"):
        request = type(REQUESTS[skill])()
        request.CopyFrom(REQUESTS[skill])
        text = texts(await getattr(served.vision, skill)(request))[0].text
        stop = text[2:4]
        expected = text[: text.index(stop)]
        getattr(request, skill.lower()).text.stop.extend(["not in the text", stop])
        response = await getattr(served.vision, skill)(request)
        assert texts(response)[0].text == expected
        assert finish_reason(response) == common_pb2.FINISH_REASON_STOP
        events = await collect(getattr(served.vision, f"Stream{skill}")(request))
        assert "".join(event.text_delta.text for event in events) == expected
        assert without_timings(events[-1].final).usage == without_timings(response).usage


async def test_invalid_stop_strings_name_their_field(serve):
    served = await serve()
    for stop, field, message in (
        (["x"] * 17, "query.text.stop", "has 17 texts"),
        (["x", ""], "query.text.stop[1]", "must not be empty"),
        (["x" * 257], "query.text.stop[0]", "has 257 UTF-8 bytes"),
    ):
        asked = pb.QueryRequest(query=pb.QueryTask(question="a", text={"stop": stop}))
        told = await failure(served.vision.Query(asked))
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT and told.fields == [field]
        assert message in told.message


def segment_script(path):
    """Two coordinates, a size, then ``path`` token by token."""

    def script(fed):
        said = fed[fed.index(3) + 1 :]
        plan = [5, 5, 6, *path, 0]
        # A step may be launched before the end is known.
        return plan[min(len(said), len(plan) - 1)]

    return script


async def test_segment_sends_the_box_first_then_the_path_and_a_mask_on_request(serve):
    path = [100 + b for b in b"M0L9H9Z"]
    served = await serve(FakeRuntime(LIMITS, segment_script(path)))
    request = pb.SegmentRequest(
        image=raw_image(), segment=pb.SegmentTask(objects=["cat"], mask_format=pb.MASK_FORMAT_RLE)
    )
    events = await collect(served.vision.StreamSegment(request))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "detection", *["path_piece"] * 4, "search", "final"]
    final = events[-1].final
    (found,) = final.detections
    assert " ".join(e.path_piece.path for e in events[2:-2]) == found.outline.svg_path
    assert {e.path_piece.label for e in events[2:-2]} == {"cat"} == {found.label}
    assert (events[1].detection.box, events[1].detection.score) == (found.box, found.score)
    assert not events[1].detection.HasField("outline")
    mask = found.outline.mask
    assert (mask.width, mask.height) == (60, 40)
    assert sum(mask.rle.counts) == 60 * 40


async def test_a_mask_as_polygons(serve):
    path = [100 + b for b in b"M0L9H9Z"]
    served = await serve(FakeRuntime(LIMITS, segment_script(path)))
    response = await served.vision.Segment(
        pb.SegmentRequest(
            image=raw_image(),
            segment=pb.SegmentTask(objects=["cat"], mask_format=pb.MASK_FORMAT_POLYGONS),
        )
    )
    mask = response.detections[0].outline.mask
    assert (mask.width, mask.height) == (60, 40)
    assert mask.WhichOneof("encoding") == "polygons"
    assert not mask.polygons.polygons  # Half of each pair is dropped: no corner is left.
    square = masks.corners("M 0 0 L 1 0 L 1 1 L 0 1 z", (0.25, 0.5, 0.75, 1.0), 60, 40)
    assert square == [[15, 20, 45, 20, 45, 40, 15, 40]]


async def test_a_refined_outline_comes_with_the_coarse_one(serve):
    # The byte tokenizer writes one digit at a time, so the path is drawn by letters of relative steps of 9/960.
    path = [100 + b for b in b"M00" + b"l90" * 80 + b"l09" * 80 + b"z"]
    limits = dataclasses.replace(LIMITS, refines=True, max_seq_length=1200, num_pages=1300)
    served = await serve(FakeRuntime(limits, segment_script(path)))
    request = pb.SegmentRequest(image=raw_image(), segment=pb.SegmentTask(objects=["cat"]))
    events = await collect(served.vision.StreamSegment(request))
    final = events[-1].final
    pieces = [e.path_piece.path for e in events if e.WhichOneof("event") == "path_piece"]
    (fine,) = final.detections
    assert " ".join(pieces) == fine.outline.coarse.svg_path != fine.outline.svg_path
    assert events[1].detection.box == fine.outline.coarse.box != fine.box
    assert not fine.outline.HasField("mask")
    request.segment.refinement = pb.REFINEMENT_NONE
    (coarse,) = (await served.vision.Segment(request)).detections
    assert coarse.outline.svg_path == fine.outline.coarse.svg_path
    assert coarse.box == fine.outline.coarse.box
    assert not coarse.outline.HasField("coarse")


async def test_asking_for_a_refiner_that_is_not_there_is_an_error(serve):
    served = await serve(FakeRuntime(LIMITS, segment_script([])))
    task = pb.SegmentTask(objects=["cat"], refinement=pb.REFINEMENT_REQUIRED)
    told = await failure(served.vision.Segment(pb.SegmentRequest(image=raw_image(), segment=task)))
    assert told.code == grpc.StatusCode.FAILED_PRECONDITION
    assert told.fields == ["segment.refinement"] and "no refiner" in told.message


async def test_results_are_clipped_to_the_image(serve):
    served = await serve(FakeRuntime(LIMITS, lambda fed: 5))
    request = pb.DetectRequest(
        image=raw_image(), detect=pb.DetectTask(objects=["cat"], max_objects=40)
    )
    response = await served.vision.Detect(request)
    boxes = [found.box for found in response.detections]
    assert len(boxes) == 40
    edges = np.array([[b.x_min, b.y_min, b.x_max, b.y_max] for b in boxes])
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
            served.vision.Caption(pb.CaptionRequest(image=image, caption=pb.CaptionTask(**GREEDY)))
            for image in images
        )
    )
    assert len({answer.captions[0].text for answer in answers[:-1]}) == 1
    assert answers[-1].captions[0].text != answers[0].captions[0].text


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
        assert without_timings(response) == alone[skill]
    assert served.engine.num_requests == 0
