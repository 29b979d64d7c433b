"""Every skill, sync and async, unary and streaming: the messages that are sent and the results."""

import json
from typing import Any

import numpy as np
import pytest

from kestrel_client import (
    Box,
    CaptionTask,
    DetectedBox,
    DetectedPoint,
    DetectTask,
    Gaze,
    GazeTask,
    ImageSize,
    InvalidRequestError,
    KestrelClient,
    Logprobs,
    PathPiece,
    Point,
    QueryTask,
    ReasoningDelta,
    Result,
    TextDelta,
    TokenLogprob,
)
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb

ANSWER = "Two red circles — één is größer. 👍"
REASONING = "I see 👀 a circle here."
POINTS = (DetectedPoint(0.25, 0.5, "circle", 0.75), DetectedPoint(0.75, 0.125, "circle", 0.75))
BOXES = (
    DetectedBox(0.125, 0.25, 0.5, 0.75, "circle", 0.75),
    DetectedBox(0.5, 0.5, 1.0, 1.0, "circle", 0.75),
)
BOX = Box(0.125, 0.25, 0.5, 0.75)
SVG_PATH = "M 0 0 L 1 0 L 1 1 L 0 1 z"
GAZES = tuple(
    Gaze(
        eye=Point(0.5, 0.5), face=Box(each.x_min, each.y_min, each.x_max, each.y_max),
        target=Point(0.25, 1.0), score=0.75, absence=0.125, finish_reason="stop",
    )
    for each in BOXES
)  # fmt: skip
IMAGE = b"not decoded by anybody here"

# Skill, arguments, what of the result is the skill's own.
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    ("query", (IMAGE, "How many?"), {}, {"answer": ANSWER, "reasoning": None, "grounding": ()}),
    ("caption", (IMAGE, "short"), {}, {"caption": ANSWER}),
    ("point", (IMAGE, "circle"), {"max_objects": 3}, {"points": POINTS}),
    ("detect", (IMAGE, "circle"), {}, {"objects": BOXES}),
    ("gaze", (IMAGE,), {}, {"gazes": GAZES}),
    ("segment", (IMAGE, "circle"), {}, {"svg_path": SVG_PATH, "box": BOX, "mask": None}),
]
EVENTS: dict[str, list[Any]] = {
    "query": [TextDelta(t, i + 1) for i, t in enumerate(ANSWER.replace(" ", " \0").split("\0"))],
    "caption": [TextDelta(t, i + 1) for i, t in enumerate(ANSWER.replace(" ", " \0").split("\0"))],
    "point": list(POINTS),
    "detect": list(BOXES),
    "gaze": [*(DetectedBox(each.x_min, each.y_min, each.x_max, each.y_max, "face", 0.75) for each in BOXES), *GAZES],
    "segment": [BOXES[0], *(PathPiece(piece, 0, "circle") for piece in ("M 0 0", "L 1 0", "L 1 1", "L 0 1", "z"))],
}  # fmt: skip
IDS = [case[0] for case in CASES]


def task_of(request: Any) -> Any:
    return request.query if isinstance(request, pb.QueryRequest) else request.caption


def check(result: Result, own: dict[str, Any]) -> None:
    for name, value in own.items():
        assert getattr(result, name) == value
    assert result.finish_reason == "stop"
    assert result.usage.input_tokens == 740 and result.usage.image_tokens == 729
    assert result.usage.output_tokens == 9 and result.usage.cached_tokens == 730
    assert result.timings.queue_ms == 1.5 and result.timings.total_ms == 7.25
    assert (result.model, result.request_id) == ("kestrel-tiny", "made-by-server")
    assert result.image_size == (8, 4) == ImageSize(8, 4)
    assert result.seed == 2**62 + 7
    assert result.source is IMAGE
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["image_size"] == {"width": 8, "height": 4}
    assert "source" not in plain and plain["usage"]["image_tokens"] == 729


@pytest.mark.parametrize(("skill", "arguments", "options", "own"), CASES, ids=IDS)
async def test_unary(
    either: Any, skill: str, arguments: Any, options: Any, own: dict[str, Any]
) -> None:
    check(await getattr(either, skill)(*arguments, **options), own)


@pytest.mark.parametrize(("skill", "arguments", "options", "own"), CASES, ids=IDS)
async def test_stream(
    either: Any, skill: str, arguments: Any, options: Any, own: dict[str, Any]
) -> None:
    async with getattr(either, f"stream_{skill}")(*arguments, **options) as stream:
        assert [event async for event in stream] == EVENTS[skill]
        assert (stream.request_id, stream.model) == ("made-by-server", "kestrel-tiny")
        check(await stream.result(), own)
    check(await stream.result(), own)  # still there after the end


async def test_result_alone_needs_no_iteration(either: Any) -> None:
    assert (await either.stream_caption(IMAGE).result()).caption == ANSWER


def test_reasoning_comes_first_and_grounds_code_points(client: KestrelClient) -> None:
    with client.stream_query(IMAGE, "How many?", reasoning=True) as stream:
        events = list(stream)
        result = stream.result()
    kinds = [type(event) for event in events]
    assert kinds == sorted(kinds, key=[ReasoningDelta, TextDelta].index)
    thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    assert result.reasoning is not None and thought == result.reasoning.text == REASONING
    (span,) = result.grounding
    assert (
        REASONING[span.start : span.end] == "a circle h"
    )  # behind a character of two UTF-16 units
    assert span.points == (Point(0.25, 0.5), Point(0.75, 0.125))
    assert result.to_dict()["answers"][0]["reasoning"]["grounding"][0]["points"][0] == {
        "x": 0.25,
        "y": 0.5,
    }


def test_text_only_query_sends_no_image(client: KestrelClient, peer: Any) -> None:
    result = client.query(None, "What is red?")
    assert not peer.vision.requests[0].images
    assert result.image_size is None and result.source is None


def test_what_is_not_given_is_not_sent(client: KestrelClient, peer: Any) -> None:
    client.query(None, "q")
    client.point(IMAGE, "x")
    query, point = peer.vision.requests
    assert [field.name for field, _ in query.ListFields()] == ["query"]
    assert [field.name for field, _ in query.query.ListFields()] == ["question"]
    assert [field.name for field, _ in point.ListFields()] == ["image", "point"]
    assert [field.name for field, _ in point.point.ListFields()] == ["objects"]


def test_everything_given_is_sent(client: KestrelClient, peer: Any) -> None:
    client.query(
        IMAGE, "q", reasoning=False,
        spatial_refs=[(0.5, 0.25), Point(0, 1), Box(0, 0.25, 0.5, 1), [0, 0, 1, 1]], temperature=0,
        top_p=0.9, top_k=0, max_tokens=12, seed=2**63 - 1, model="other", request_id="mine-1",
        priority="high", answer_start="It",
    )  # fmt: skip
    (request,) = peer.vision.requests
    assert request.query.answer_start == "It"
    assert [image.encoded for image in request.images] == [IMAGE]
    sampling = request.query.sampling
    assert sampling.HasField("temperature") and sampling.temperature == 0
    assert sampling.top_p == 0.9  # a double: not 0.8999999761581421
    assert sampling.HasField("top_k") and sampling.top_k == 0
    assert (request.query.max_tokens, sampling.seed) == (12, 2**63 - 1)
    assert (request.options.model, request.options.request_id) == ("other", "mine-1")
    assert request.options.priority == common_pb2.PRIORITY_HIGH
    kinds = [ref.WhichOneof("ref") for ref in request.query.spatial_refs]
    assert kinds == ["point", "point", "box", "box"]
    assert request.query.spatial_refs[2].box.y_min == 0.25


def test_stop_strings_go_out_as_a_list(client: KestrelClient, peer: Any) -> None:
    client.caption(IMAGE, stop="END")
    client.query(IMAGE, "q", stop=["a", "b"])
    client.analyze(IMAGE, [CaptionTask(stop=("x", "y")), QueryTask("q", stop="END")])
    client.query(IMAGE, "q", stop=[])
    # The peer answers each task of analyze as a request.
    stops = [list(task_of(request).text.stop) for request in peer.vision.requests]
    assert stops == [["END"], ["a", "b"], ["x", "y"], ["END"], []]
    with pytest.raises(InvalidRequestError, match=r"^stop: "):
        client.caption(IMAGE, stop=[1])  # type: ignore[list-item]


def test_log_probabilities_come_typed(client: KestrelClient, peer: Any) -> None:
    result = client.query(IMAGE, "q", logprobs=True)
    assert result.logprobs == Logprobs(
        (
            TokenLogprob("Two", b"Two", 7, -0.25, (TokenLogprob("Too", b"Too", 8, -2.0),)),
            TokenLogprob("\ufffd", b"\xf0", 9, -1.5),
        ),
        -1.75,
        -0.875,
    )
    assert [token.id for token in result.logprobs] == [7, 9] and len(result.logprobs) == 2
    plain = json.loads(json.dumps(result.to_dict()))["answers"][0]["logprobs"]
    other = {"text": "Too", "utf8": [84, 111, 111], "id": 8, "logprob": -2.0, "top": []}
    assert plain["tokens"][0]["top"] == [other]
    assert plain["tokens"][1] == {
        "text": "\ufffd", "utf8": [240], "id": 9, "logprob": -1.5, "top": []
    }  # fmt: skip
    assert client.query(IMAGE, "q").logprobs is None
    client.analyze(IMAGE, [CaptionTask(logprobs=True, top_logprobs=3), QueryTask("q")])
    sent = [task_of(request).text for request in peer.vision.requests]
    assert [text.top_logprobs for text in sent] == [0, 0, 3, 0]
    assert [text.logprobs for text in sent] == [True, False, True, False]
    with pytest.raises(InvalidRequestError, match=r"^logprobs: "):
        client.caption(IMAGE, logprobs="yes")  # type: ignore[arg-type]


def test_earlier_turns_go_out_as_texts(client: KestrelClient, peer: Any) -> None:
    first = client.query(IMAGE, "How many?")
    client.query(IMAGE, "Which?", history=[first, ("And where?", "")])
    with client.stream_query(IMAGE, "Which?", history=(turn for turn in [first])) as stream:
        stream.result()
    client.analyze(IMAGE, [QueryTask("Which?", history=[("a", "b")])])
    turns = [[(t.question, t.answer) for t in r.query.history] for r in peer.vision.requests]
    answered = ("How many?", ANSWER)
    assert turns == [[], [answered, ("And where?", "")], [answered], [("a", "b")]]
    bad: list[Any] = ["text", ("a",), ("a", 3), 5]
    for turn in bad:
        with pytest.raises(InvalidRequestError, match=r"^history\[1\]: "):
            client.query(IMAGE, "Which?", history=[first, turn])


def test_further_images_go_out_with_their_turns(client: KestrelClient, peer: Any) -> None:
    others = [b"second", b"third"]
    first = client.query(IMAGE, "Which?", images=others)
    client.query(IMAGE, "And?", history=[first, ("a", "b", [b"fourth"]), ("c", "d")])
    with client.stream_query(None, "Both?", images=tuple(others)) as stream:
        assert stream.result().more_sources == tuple(others)
    asked, turned, streamed = peer.vision.requests
    assert [image.encoded for image in asked.images] == [IMAGE, *others]
    assert [image.encoded for image in turned.images] == [IMAGE, *others, b"fourth"]
    assert [turn.num_images for turn in turned.query.history] == [3, 1, 0]
    assert [image.encoded for image in streamed.images] == others
    assert "more_sources" not in first.to_dict() and len(first.images) == 3
    for bad in ("picture.jpg", b"x"):
        with pytest.raises(InvalidRequestError, match=r"^images: is one image"):
            client.query(IMAGE, "Which?", images=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="all tasks are about one image"):
        client.analyze(IMAGE, [QueryTask("Which?", images=others)])
    with pytest.raises(InvalidRequestError, match="all tasks are about one image"):
        client.analyze(IMAGE, [QueryTask("Which?", history=[first])])


def test_several_objects_have_one_result(client: KestrelClient, peer: Any) -> None:
    found = client.detect(IMAGE, ["dog", "cat"], max_objects=2)
    assert [box.label for box in found] == ["dog", "dog", "cat", "cat"]
    assert [search.object for search in found.searches] == ["dog", "cat"] and not found.errors
    with client.stream_point(IMAGE, objects=["dog", "cat"]) as stream:
        assert [point.label for point in stream] == ["dog", "dog", "cat", "cat"]
    outlines = client.segment(IMAGE, ("dog", "cat"))
    assert [segment.label for segment in outlines] == ["dog", "cat"]
    analysis = client.analyze(IMAGE, [DetectTask(["dog", "cat"], tiles="1x2", seed=3)])
    assert len(analysis[0].objects) == 4
    asked = peer.vision.requests
    assert [list(r.detect.objects) for r in (asked[0], asked[3])] == [["dog", "cat"]] * 2
    assert asked[3].detect.tiles.columns == 2 and asked[3].detect.sampling.seed == 3
    for bad in (7, ["dog", 7]):
        with pytest.raises(InvalidRequestError, match=r"objects: .* is neither a name nor"):
            client.detect(IMAGE, bad)  # type: ignore[arg-type]


def test_a_skill_by_its_name_is_a_task_too(client: KestrelClient, peer: Any) -> None:
    result = client.run_skill("yes", IMAGE, {"a": 1}, {"b": 2}, max_tokens=3, stop="x")
    assert result.output == {"skill": "yes", "yes": True} and result.finish_reason == "stop"
    skill = peer.vision.requests[0].skill
    assert (skill.name, skill.max_tokens, list(skill.text.stop)) == ("yes", 3, ["x"])


def test_what_a_skill_cannot_take_is_refused(client: KestrelClient) -> None:
    with pytest.raises(TypeError, match="'stop'"):
        client.detect(IMAGE, "x", stop="y")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'max_reasoning_tokens'"):
        client.caption(IMAGE, max_reasoning_tokens=3)  # type: ignore[call-arg]


def test_choices_go_out_as_enums(client: KestrelClient, peer: Any) -> None:
    client.caption(IMAGE, "long")
    client.segment(IMAGE, "circle", mask="png")
    caption, segment = peer.vision.requests
    assert caption.caption.length == pb.CAPTION_LENGTH_LONG
    assert segment.segment.mask_format == pb.MASK_FORMAT_PNG
    assert segment.segment.refinement == pb.REFINEMENT_UNSPECIFIED
    client.segment(IMAGE, "circle", refine=False)
    assert peer.vision.requests[-1].segment.refinement == pb.REFINEMENT_NONE


async def test_models(either: Any) -> None:
    (model,) = await either.list_models()
    assert await either.get_model() == await either.get_model("kestrel-tiny") == model
    assert (model.name, model.state, model.image_positions) == ("kestrel-tiny", "ready", 729)
    assert json.loads(json.dumps(model.to_dict()))["skills"][0]["name"] == "query"
    info = await either.server_info()
    assert info.default_model == "kestrel-tiny"
    assert (info.api_version, model.device, model.max_batch_size) == ("kestrel.v1", "cpu", 4)
    assert info.image_formats == ("jpeg", "png") and "grpcio" in info.library_versions
    assert json.loads(json.dumps(info.to_dict()))["limits"]["default_top_p"] == 0.9
    load = await either.server_load()
    assert (load.ready, load.state, load.running_requests) == (True, "ready", 3)
    assert json.loads(json.dumps(load.to_dict()))["utilization"] == 0.75


EYE = (0.25, 0.5)


@pytest.mark.parametrize(
    "eyes",
    [EYE, [EYE], Point(*EYE), [Point(*EYE)], np.array(EYE), np.array([EYE])],
    ids=["numbers", "list", "point", "points", "array", "arrays"],
)
def test_an_eye_is_one_point_or_a_list_of_them(client: KestrelClient, eyes: Any) -> None:
    result = client.gaze(IMAGE, eyes)
    (gaze,) = result
    assert (gaze.eye, gaze.face, gaze.target) == (Point(*EYE), None, None)
    assert result.search is None and len(result) == 1
    assert repr(result).startswith("GazeResult(1 gazes, 0 in the image,")
    assert result.to_dict()["gazes"][0]["target"] is None
    assert not result.marks.points and not result.marks.boxes


def test_faces_are_boxes_and_boxes_that_were_detected(client: KestrelClient, peer: Any) -> None:
    assert client.gaze(IMAGE, faces=BOX).gazes[0].face == BOX
    result = client.gaze(IMAGE, faces=client.detect(IMAGE, "face").objects, accurate=True, seed=7)
    assert [each.face for each in result] == [each.face for each in GAZES]
    request = peer.vision.requests[-1].gaze
    assert request.accurate and request.sampling.seed == 7 and len(request.faces) == 2
    assert result.marks.points == (Point(0.25, 1.0),) * 2
    assert [label for _, label in result.marks.boxes] == ["face 1 (0.75)", "face 2 (0.75)"]
    every = client.gaze(IMAGE, max_faces=3)
    assert every.search is not None and every.search.absence == 0.25
    assert peer.vision.requests[-1].gaze.max_faces == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"eyes": 3}, "eyes: 3 is not a point"),
        ({"eyes": [(0, 0), (0, 0, 1)]}, "eyes[1]: has 3 numbers"),
        ({"eyes": [(0, 0, 1, 1)]}, "eyes[0]: is not a point"),
        ({"eyes": "xy"}, "eyes[0]: "),
        ({"faces": [(0, 0)]}, "faces[0]: is not a box"),
        ({"faces": [("a", 0, 1, 1)]}, "faces[0]: "),
    ],
)
def test_other_places_are_refused_before_they_are_sent(
    client: KestrelClient, given: Any, told: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.gaze(IMAGE, **given)
    assert told in str(caught.value)


def test_a_gaze_is_a_task(client: KestrelClient) -> None:
    assert client.map([IMAGE], GazeTask())[0].gazes == GAZES  # type: ignore[union-attr]
