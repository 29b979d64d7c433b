"""Queries with earlier turns: their prompts, their images and their limits."""

from dataclasses import replace

import pytest

from kestrel_engine.errors import ContextLengthError, InvalidRequest
from kestrel_engine.skills import QuerySkill
from kestrel_engine.skills.prompts import build_prompt, check_context
from kestrel_engine.types.requests import IMAGE_PLACE, ImageBlock, PreparedImage, num_positions
from tests.engine.skills.test_skills import start


def test_earlier_turns_stand_before_the_question(moondream3, moondream2, codec):
    for context in (moondream3, moondream2):
        templates = context.model.templates

        def turn(question: str, templates=templates) -> tuple[int, ...]:
            return (*templates.query_prefix, *codec.encode(question), *templates.query_suffix)

        request, _ = start(
            QuerySkill(), context, question="Third?", history=[("First? ", "one"), ("Second?", "")]
        )
        assert request.prompt_suffix == (
            *turn("First?"),
            *codec.encode("one"),
            *turn("Second?"),
            *turn("Third?"),
        )


@pytest.mark.parametrize(
    ("history", "field"),
    [
        ("text", "history"),
        ([("a", "b")] * 65, "history"),
        ([("a",)], "history[0]"),
        (["ab"], "history[0]"),
        ([("a", "b"), (" ", "b")], "history[1].question"),
        ([("a", 3)], "history[0].answer"),
        ([("a", "\ud800")], "history[0].answer"),
        ([("a", "x" * 40_000)], "history[0].answer"),
    ],
)
def test_a_wrong_history_names_its_place(moondream3, history, field):
    with pytest.raises(InvalidRequest) as caught:
        start(QuerySkill(), moondream3, question="What?", history=history)
    assert caught.value.field == field


def test_the_texts_of_a_conversation_have_one_limit(moondream3):
    """They are checked before any is encoded, which takes 25 ms for the longest."""
    encoded: list[str] = []

    class Codec:
        def encode(self, text: str) -> list[int]:
            encoded.append(text)
            return [1]

    defaults = replace(moondream3.defaults, max_text_bytes=20)
    context = replace(moondream3, codec=Codec(), defaults=defaults)
    # 3 and 3 bytes, and 4 of the system text with its blank line.
    given = {"history": [("aé", "bcd")], "system": "ss"}
    start(QuerySkill(), context, question="q" * 10, **given)
    assert encoded == ["ss\n\naé", "bcd", "q" * 10]
    encoded.clear()
    with pytest.raises(ContextLengthError, match="has 21 UTF-8 bytes with the question") as caught:
        start(QuerySkill(), context, question="q" * 11, **given)
    assert caught.value.field == "history" and not encoded


def test_images_of_later_turns_have_places(moondream3, codec):
    history = [("First?", "one"), ("Second?", "two")]
    built, _ = start(
        QuerySkill(), moondream3, question="Third?", history=history, image_turns=[0, 0, 1, 2, 2]
    )
    plain, _ = start(QuerySkill(), moondream3, question="Third?", history=history)
    assert (built.num_images, plain.num_images, plain.max_images) == (5, None, None)
    tokens = list(built.prompt_suffix)
    first, second = (len(codec.encode(q + a)) + 4 for q, a in history)
    assert tokens[first] is IMAGE_PLACE and tokens[first + 1] == 1
    assert tokens[first + 1 + second : first + second + 3] == [IMAGE_PLACE] * 2
    assert tuple(t for t in tokens if t is not IMAGE_PLACE) == plain.prompt_suffix
    alone, _ = start(QuerySkill(), moondream3, question="Third?", image_turns=[0, 0])
    assert alone.num_images == 2 and IMAGE_PLACE not in alone.prompt_suffix


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ("01", "image_turns"),
        (3, "image_turns"),
        ([0, 2], "image_turns[1]"),
        ([1, 0], "image_turns[1]"),
        ([True], "image_turns[0]"),
        ([-1], "image_turns[0]"),
        ([0.0], "image_turns[0]"),
    ],
)
def test_wrong_turns_of_images_name_their_place(moondream3, turns, field):
    with pytest.raises(InvalidRequest) as caught:
        start(QuerySkill(), moondream3, question="x", history=[("a", "b")], image_turns=turns)
    assert caught.value.field == field


def test_the_prompt_has_its_images_at_their_places(moondream3):
    history = [("a", "b")]
    built, _ = start(QuerySkill(), moondream3, question="x", history=history, image_turns=[0, 1])
    images = [PreparedImage(key, None, (1, 1), 2, 2) for key in "pq"]
    prompt = build_prompt(built, images, moondream3.model)
    length = moondream3.model.image_positions
    assert prompt[:2] == (0, ImageBlock("p", length))
    assert prompt.index(ImageBlock("q", length)) == 2 + built.prompt_suffix.index(IMAGE_PLACE)
    assert len(prompt) == 2 + len(built.prompt_suffix)
    positions = check_context(built, 2, moondream3.model, 4096)
    assert positions == num_positions(prompt)
