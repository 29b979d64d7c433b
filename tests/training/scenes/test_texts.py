"""Captions read back as the objects there; questions have the answer that the scene says."""

import random
from collections import Counter

import pytest

from training.scenes.captions import LENGTHS, caption, named_objects, objects_of
from training.scenes.phrases import Phrase, draw_absent
from training.scenes.questions import MAKERS, draw_question
from training.scenes.scenes import Scene, draw_scene, draw_size
from training.scenes.vocabulary import COLOURS, HELD_OUT, SHAPES


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = random.Random("tests/texts")
    return [draw_scene(rng, *draw_size(rng), palette=len(COLOURS)) for _ in range(150)]


@pytest.mark.parametrize("length", LENGTHS)
def test_captions_name_exactly_the_objects(scenes: list[Scene], length: str) -> None:
    for scene in scenes:
        assert named_objects(caption(scene, length)) == objects_of(scene)


def test_a_wrong_caption_is_seen() -> None:
    assert named_objects("Two red circles and a blue star.") == Counter({(0, 0): 2, (4, 4): 1})
    assert named_objects("An empty picture.") == Counter()


def test_every_maker_finds_questions(scenes: list[Scene]) -> None:
    rng = random.Random(5)
    for maker, _ in MAKERS:
        found = [q for scene in scenes if (q := maker(rng, scene)) is not None]
        assert len(found) > 20
        assert all(q.text.strip() and q.answer for q in found)


def test_answers_agree_with_the_scene(scenes: list[Scene]) -> None:
    rng = random.Random(6)
    for scene in scenes:
        for _ in range(20):
            question = draw_question(rng, scene)
            targets = [i for _, indices in question.steps for i in indices]
            if question.kind == "count":
                assert question.answer == str(len(targets))
            elif question.kind == "colour":
                assert question.answer == COLOURS[scene.shapes[targets[0]].colour]
            elif question.kind == "shape":
                assert question.answer == SHAPES[scene.shapes[targets[0]].kind]


def test_training_texts_never_name_a_held_out_pair(scenes: list[Scene]) -> None:
    pairs = [f"{COLOURS[c]} {SHAPES[k]}" for c, k in HELD_OUT]
    rng = random.Random(7)
    for scene in scenes:
        for _ in range(20):
            question = draw_question(rng, scene)
            text = f"{question.text} {question.answer}"
            assert not any(pair in text for pair in pairs)
        absent = draw_absent(rng, scene)
        assert absent is None or (not absent.held_out and not absent.find(scene))


def test_phrases() -> None:
    assert (
        Phrase(SHAPES.index("cross"), COLOURS.index("red"), 2).plain(plural=True)
        == "striped red crosses"
    )
    assert Phrase().plain() == "shape"
