"""The skills' state machines, token by token: rules asked for, events given, results."""

import math
import random

import numpy as np
import pytest

from kestrel_engine.errors import ContextLengthError, InvalidRequest, SkillUnavailable
from kestrel_engine.skills import (
    CaptionSkill,
    DetectSkill,
    GazeSkill,
    PointSkill,
    QuerySkill,
    SegmentSkill,
    SkillRegistry,
)
from kestrel_engine.skills.gaze import mean_gaze
from kestrel_engine.skills.prompts import check_context, check_images
from kestrel_engine.types.requests import Coord, Size
from kestrel_engine.types.step import StepToken, TokenRule


class State:
    """A request's control and output, driven as the engine drives them."""

    def __init__(self, control, output):
        self.control, self.out, self.count = control, output, 0

    def rule(self):
        return self.control.rule(self.count)

    def consume(self, token):
        """Updates and the finish reason."""
        assert self.rule() is not None
        finish = self.control.accept(token)
        self.count += 1
        updates = [] if finish == "stop" else self.out.push(token)
        return updates + (self.out.finish() if finish else []), finish


def start(skill, context, max_tokens=100, settings=None, **arguments):
    request = skill.build(arguments, settings or {}, context)
    return request, State(
        skill.new_control(request, max_tokens, context), skill.new_output(request, context)
    )


def feed(state, tokens):
    """Consumes tokens under their rules; returns all updates and the finish reason."""
    updates, finish = [], None
    for token in tokens:
        assert finish is None, "fed beyond the end"
        more, finish = state.consume(token)
        updates += more
    return updates, finish


def text(codec, value):
    return [StepToken(i) for i in codec.encode(value)]


def test_caption_streams_text_that_joins_to_the_result(moondream3, codec):
    _, state = start(CaptionSkill(), moondream3, length="Short")
    updates, finish = feed(state, [*text(codec, "ein Käfer 🐞"), StepToken(0)])
    assert finish == "stop"
    assert "".join(u.text for u in updates) == "ein Käfer 🐞"
    assert all("\ufffd" not in u.text for u in updates)
    assert state.out.output() == {"caption": "ein Käfer 🐞"}
    assert 0 not in state.out.token_ids


def test_the_answer_id_is_suppressed_from_the_second_token_on(moondream2, codec):
    _, state = start(CaptionSkill(), moondream2)
    assert state.rule() == TokenRule()
    state.consume(StepToken(codec.encode("a")[0]))
    assert state.rule() == TokenRule(suppressed=(3,))


@pytest.mark.parametrize(
    ("family", "direct", "reasoning"), [("moondream2", (3, 3), (3, 4)), ("moondream3", (3,), (4,))]
)
def test_query_prompts_follow_the_family(request, family, direct, reasoning):
    context = request.getfixturevalue(family)
    built, _ = start(QuerySkill(), context, question="  hi ")
    assert built.prompt_suffix == (1, 15381, 2, 204, 205, *direct)
    assert not built.needs_image
    built, _ = start(QuerySkill(), context, question="hi", reasoning=True)
    assert built.prompt_suffix == (1, 15381, 2, 204, 205, *reasoning)


@pytest.mark.parametrize(
    "refs",
    [
        [[0.5, 0.25], (0.0, 0.0, 0.5, 1.0)],
        [np.array([0.5, 0.25], np.float32), np.array([0, 0, 0.5, 1])],
        [(np.float32(0.5), np.float64(0.25)), (np.int64(0), 0, np.float16(0.5), 1)],
    ],
    ids=["lists", "arrays", "numbers of numpy"],
)
def test_spatial_references_become_coordinates_and_sizes(moondream3, refs):
    built, _ = start(QuerySkill(), moondream3, question="x", spatial_refs=refs)
    assert built.prompt_suffix[3:8] == (
        Coord(0.5),
        Coord(0.25),
        Coord(0.25),
        Coord(0.5),
        Size(0.5, 1.0),
    )
    assert built.needs_image


def test_an_array_of_points_is_a_list_of_points(moondream3):
    points = np.array([[0.5, 0.25], [1, 0]], np.float32)
    built, _ = start(QuerySkill(), moondream3, question="x", spatial_refs=points)
    assert built.prompt_suffix[3:7] == (Coord(0.5), Coord(0.25), Coord(1.0), Coord(0.0))


def test_reasoning_grounds_its_chunks_then_answers(moondream3, codec):
    _, state = start(QuerySkill(), moondream3, question="q", reasoning=True)
    assert state.rule() == TokenRule(read_coord=True)
    tokens = [
        *text(codec, "Two: "),
        StepToken(7),
        *text(codec, "here"),
        StepToken(5, Coord(0.25)),
        StepToken(5, Coord(0.5)),
        StepToken(5, Coord(0.75)),
        StepToken(9),
        StepToken(3),
        *text(codec, "2"),
    ]
    updates, finish = feed(state, tokens)
    assert finish is None
    assert state.rule() == TokenRule(suppressed=(3,))
    updates += state.consume(StepToken(0))[0]
    output = state.out.output()
    assert output["answer"] == "2"
    assert output["reasoning"]["text"] == "Two: here"
    assert output["reasoning"]["grounding"] == [
        {"start_idx": 5, "end_idx": 9, "points": [(0.25, 0.5)]}
    ]
    assert "".join(u.reasoning for u in updates) == "Two: here"
    assert "".join(u.text for u in updates) == "2"
    assert state.out.token_ids == tuple(t.id for t in tokens if t.id != 3)


def test_end_of_text_is_no_stop_while_reasoning(moondream2, codec):
    _, state = start(QuerySkill(), moondream2, question="q", reasoning=True)
    assert state.consume(StepToken(0))[1] is None
    assert state.rule() == TokenRule(suppressed=(0, 6), read_coord=True)


def test_reasoning_that_was_cut_ends_by_length_though_the_answer_has_an_end(moondream3, codec):
    _, state = start(QuerySkill(), moondream3, 11, {"max_tokens": 5}, question="q", reasoning=True)
    feed(state, text(codec, "think"))
    assert state.consume(StepToken(3))[1] is None
    feed(state, text(codec, "yes"))
    assert state.consume(StepToken(0)) == ([], "length")
    assert state.out.output()["answer"] == "yes"
    assert 0 not in state.out.token_ids, "the end is no part of the answer"


def test_reasoning_that_ends_at_its_last_token_was_not_cut(moondream3, codec):
    _, state = start(QuerySkill(), moondream3, 11, {"max_tokens": 5}, question="q", reasoning=True)
    feed(state, text(codec, "thin"))
    state.consume(StepToken(3))
    assert state.consume(StepToken(0))[1] == "stop"


@pytest.mark.parametrize(
    ("skill", "max_tokens", "budget"),
    [
        (DetectSkill(), None, 60),
        (DetectSkill(), 7, 7),
        (DetectSkill(), 600, 60),
        (PointSkill(), None, 40),
        (PointSkill(), 7, 7),
        (PointSkill(), 600, 40),
    ],
)
def test_objects_are_bounded_by_max_tokens_too(moondream3, skill, max_tokens, budget):
    settings = {"max_objects": 20, "max_tokens": max_tokens}
    request, _ = start(skill, moondream3, settings=settings, object="cat")
    assert (request.max_tokens, request.token_budget) == (max_tokens, budget)


def test_point_cycles_x_and_y(moondream3):
    _, state = start(PointSkill(), moondream3, object="cat")
    first = state.rule()
    assert first == TokenRule(otherwise=5, read_coord=True)
    assert state.consume(StepToken(5, Coord(0.1)))[0] == []
    assert state.rule() == TokenRule(forced=5, read_coord=True)
    updates, _ = state.consume(StepToken(5, Coord(0.2)))
    assert [u.object for u in updates] == [{"x": 0.1, "y": 0.2}]
    assert state.rule() == TokenRule(allowed=(5, 0), read_coord=True)
    assert state.consume(StepToken(0))[1] == "stop"
    assert state.out.output() == {"points": [{"x": 0.1, "y": 0.2}]}
    assert state.out.token_ids == (5, 5)


def test_moondream2_decides_over_the_whole_vocabulary_every_time(moondream2):
    _, state = start(PointSkill(), moondream2, object="cat")
    first = state.rule()
    feed(state, [StepToken(5, Coord(0.1)), StepToken(5, Coord(0.2))])
    assert state.rule() == first


def test_detect_adds_a_size_and_ends_at_max_objects(moondream3):
    request, state = start(DetectSkill(), moondream3, settings={"max_objects": 2}, object="cat")
    assert request.token_budget == 6
    box = [StepToken(5, Coord(0.5)), StepToken(5, Coord(0.25)), StepToken(6, Size(0.5, 1.0))]
    feed(state, box[:2])
    assert state.rule() == TokenRule(forced=6, read_size=True)
    updates, _ = state.consume(box[2])
    assert [u.object for u in updates] == [
        {"x_min": 0.25, "y_min": -0.25, "x_max": 0.75, "y_max": 0.75}
    ]
    _, finish = feed(state, box)
    assert finish == "length"
    assert len(state.out.output()["objects"]) == 2


def test_segment_streams_the_box_before_the_path(moondream3, codec):
    _, state = start(SegmentSkill(), moondream3, object="cat")
    assert state.rule() == TokenRule(read_coord=True, read_size=True)
    updates, finish = feed(
        state,
        [
            *[StepToken(codec.encode(c)[0]) for c in "M48L"],
            StepToken(5, Coord(0.5)),
            StepToken(5, Coord(0.5)),
            StepToken(6, Size(0.5, 2.0)),
            StepToken(codec.encode("9")[0]),
            StepToken(codec.encode("0")[0]),
            StepToken(15),
            StepToken(0),
        ],
    )
    assert finish == "stop"
    assert updates[0].object == {"x_min": 0.25, "y_min": 0.0, "x_max": 0.75, "y_max": 1.0}
    assert [u.path for u in updates[1:]] == ["M 0.004 0.008", "L 0.009 0"]
    segment = state.out.output()["segments"][0]
    assert segment["svg_path"] == "M 0.004 0.008 L 0.009 0"
    assert segment["bbox"] == updates[0].object
    assert segment["points"] == [{"x": 0.5, "y": 0.5}]
    assert segment["path_tokens"] == ["M", "4", "8", "L", "9", "0"]
    assert 15 in segment["token_ids"]
    assert "parse_error" not in segment


def test_a_path_that_does_not_parse_says_so_and_stays_empty(moondream3, codec):
    _, state = start(SegmentSkill(), moondream3, object="cat")
    feed(state, [*text(codec, "?"), *text(codec, "M"), StepToken(0)])
    segment = state.out.output()["segments"][0]
    assert segment["svg_path"] == ""
    assert "'?'" in segment["parse_error"]
    assert "bbox" not in segment


@pytest.mark.parametrize(
    ("skill", "arguments", "settings", "field"),
    [
        (QuerySkill(), {"question": " "}, {}, "question"),
        (QuerySkill(), {}, {}, "question"),
        (QuerySkill(), {"question": "a" * 40_000}, {}, "question"),
        (QuerySkill(), {"question": "\ud800"}, {}, "question"),
        (QuerySkill(), {"question": "q", "reasoning": "yes"}, {}, "reasoning"),
        (QuerySkill(), {"question": "q", "spatial_refs": [[1, 2, 3]]}, {}, "spatial_refs[0]"),
        (QuerySkill(), {"question": "q", "spatial_refs": [[0.1, 1.2]]}, {}, "spatial_refs[0]"),
        (
            QuerySkill(),
            {"question": "q", "spatial_refs": [[0.1, float("nan")]]},
            {},
            "spatial_refs[0]",
        ),
        (
            QuerySkill(),
            {"question": "q", "spatial_refs": [[0.5, 0, 0.1, 1]]},
            {},
            "spatial_refs[0]",
        ),
        (QuerySkill(), {"question": "q"}, {"top_p": 1.5}, "top_p"),
        (QuerySkill(), {"question": "q"}, {"top_p": 0}, "top_p"),
        (QuerySkill(), {"question": "q"}, {"temperature": float("nan")}, "temperature"),
        (QuerySkill(), {"question": "q"}, {"temperature": -0.1}, "temperature"),
        (QuerySkill(), {"question": "q"}, {"temperature": 10**400}, "temperature"),
        (QuerySkill(), {"question": "q"}, {"top_k": -1}, "top_k"),
        (QuerySkill(), {"question": "q"}, {"seed": 2**63}, "seed"),
        (QuerySkill(), {"question": "q"}, {"max_tokens": 0}, "max_tokens"),
        (QuerySkill(), {"question": "q"}, {"max_tokens": True}, "max_tokens"),
        (QuerySkill(), {"question": "q"}, {"max_token": 5}, "max_token"),
        (QuerySkill(), {"question": "q", "objekt": 1}, {}, "objekt"),
        (CaptionSkill(), {"length": "huge"}, {}, "length"),
        (CaptionSkill(), {"length": None}, {}, "length"),
        (PointSkill(), {"object": ""}, {}, "object"),
        (PointSkill(), {"object": "cat"}, {"max_objects": 0}, "max_objects"),
        (DetectSkill(), {"object": 3}, {}, "object"),
    ],
)
def test_bad_input_names_its_field(moondream3, skill, arguments, settings, field):
    with pytest.raises(InvalidRequest) as caught:
        skill.build(arguments, settings, moondream3)
    assert caught.value.field == field


def test_the_registry_knows_the_six_and_refuses_doubles():
    registry = SkillRegistry.default()
    assert registry.names == ("query", "caption", "point", "detect", "segment", "gaze")
    with pytest.raises(SkillUnavailable, match="there are query"):
        registry.get("paint")
    with pytest.raises(ValueError, match="twice"):
        SkillRegistry([QuerySkill(), QuerySkill()])


def rules_ahead(control, tokens):
    """Each rule as it is known one token ahead, or None, and as it is in the end."""
    ahead = []
    for index, token in enumerate(tokens):
        early = control.rule(index + 1)
        control.accept(token)
        ahead.append((early, control.rule(index + 1)))
    return ahead


@pytest.mark.parametrize("skill", [CaptionSkill(), PointSkill(), DetectSkill(), SegmentSkill()])
def test_rules_are_known_ahead_and_do_not_change(moondream3, skill):
    arguments = {} if skill.name == "caption" else {"object": "cat"}
    request = skill.build(arguments, {}, moondream3)
    tokens = [StepToken(5, Coord(0.5)), StepToken(5, Coord(0.5)), StepToken(6, Size(0.1, 0.1))] * 2
    for early, late in rules_ahead(skill.new_control(request, 50, moondream3), tokens):
        assert early == late is not None


def test_reasoning_waits_for_each_token_and_its_answer_does_not(moondream3, codec):
    request = QuerySkill().build({"question": "q", "reasoning": True}, {}, moondream3)
    control = QuerySkill().new_control(request, 50, moondream3)
    reasoning = rules_ahead(control, [*text(codec, "ab"), StepToken(3)])
    assert [early for early, _ in reasoning] == [None] * 3
    answer = rules_ahead(control, text(codec, "cd"))
    assert all(early == late is not None for early, late in answer)


def test_the_number_of_images_is_checked(moondream3):
    model = moondream3.model
    one, _ = start(CaptionSkill(), moondream3)
    for request, count, said in [
        (one, 0, "image: is required"),
        (one, 2, "images: are 2; caption takes at most 1"),
        (start(QuerySkill(), moondream3, question="x")[0], 5, "images: are 5; the limit is 4"),
        (
            start(QuerySkill(), moondream3, question="x", image_turns=[0, 0])[0],
            1,
            "images: are 1; the skill's arguments are about 2",
        ),
    ]:
        with pytest.raises(InvalidRequest, match=said):
            check_images(request, count, 4)
    asked, _ = start(QuerySkill(), moondream3, question="x")
    check_images(asked, 4, 4)
    text = 1 + len(asked.prompt_suffix)
    least = text + 2 * model.image_positions + 1
    assert check_context(asked, 2, model, least) == least - 1
    with pytest.raises(ContextLengthError, match="send at most 1 with this text") as caught:
        check_context(asked, 2, model, least - 1)
    assert caught.value.field == "images"
    with pytest.raises(ContextLengthError, match="the prompt takes") as caught:
        check_context(asked, 1, model, text)
    assert caught.value.field == "question"


def test_a_gaze_is_one_point_and_ends_with_it(moondream2, codec):
    built, state = start(GazeSkill(), moondream2, eye=np.array([0.25, 0.5], np.float32))
    before, after = codec.encode("\n\nPoint:"), codec.encode(" gaze\n\n")
    assert built.prompt_suffix == (*before, Coord(0.25), Coord(0.5), *after)
    assert built.token_budget == 2 and built.sampling.temperature == 0
    assert state.rule() == TokenRule(otherwise=5, stop=0, read_coord=True)
    updates, finish = feed(state, [StepToken(5, Coord(0.75)), StepToken(5, Coord(0.125))])
    assert state.out.is_complete and finish is not None
    assert state.out.output() == {"gaze": {"x": 0.75, "y": 0.125}}
    assert [each.object for each in updates] == [{"x": 0.75, "y": 0.125}]


def test_a_gaze_out_of_the_image_is_none(moondream3):
    _, state = start(GazeSkill(), moondream3, eye=[0, 1])
    assert feed(state, [StepToken(0)]) == ([], "stop")
    assert state.out.output() == {"gaze": None}
    # A limit that cuts the point is no target either, but another reason.
    _, state = start(GazeSkill(), moondream3, eye=[0, 1], settings={"max_tokens": 1})
    feed(state, [StepToken(5, Coord(0.75))])
    assert state.out.output() == {"gaze": None} and not state.out.is_complete


@pytest.mark.parametrize(
    ("eye", "told"),
    [
        (None, "2 numbers"),
        ("0.5,0.5", "2 numbers"),
        ([0.5], "2 numbers"),
        ([0, 0, 1, 1], "2 numbers"),
        ([0.5, 1.5], "1.5 is not a number in [0, 1]"),
        ([-0.1, 0.5], "-0.1 is not"),
        ([math.nan, 0.5], "nan is not"),
        ([math.inf, 0.5], "inf is not"),
        (["0", 0.5], "'0' is not"),
        ([True, 0.5], "True is not"),
    ],
)
def test_an_eye_is_a_place_in_the_image(moondream2, eye, told):
    with pytest.raises(InvalidRequest) as caught:
        GazeSkill().build({"eye": eye}, {}, moondream2)
    assert caught.value.field == "eye" and told in caught.value.message


def kept_as_in_the_reference(points):
    """remove_outlier_points of moondream/torch/utils.py, with numpy, as it describes the choice."""
    places = np.array(points)
    distances = np.sqrt(((places[:, None] - places[None]) ** 2).sum(axis=-1))
    nearest = np.partition(distances, min(2, len(places) - 1), axis=1)[:, :2].mean(axis=1)
    return places[nearest <= 2.0 * np.median(nearest)]


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_gaze_is_that_of_the_reference(seed):
    rng = random.Random(seed)
    bins = [(rng.gauss(400, 9), rng.gauss(700, 9)) for _ in range(10 + seed % 11)]
    bins[: seed % 4] = [(rng.randrange(1024), rng.randrange(1024)) for _ in range(seed % 4)]
    points = [(round(x) / 1024, round(y) / 1024) for x, y in bins]
    expected = kept_as_in_the_reference(points)
    assert mean_gaze(points) == pytest.approx(expected.mean(axis=0).tolist(), abs=1e-12)
    assert mean_gaze(points[:9]) is None
    assert seed < 4 or len(points) > len(expected) or seed % 4 == 0


def test_equal_points_are_no_outliers():
    assert mean_gaze([(0.5, 0.25)] * 10) == (0.5, 0.25)
