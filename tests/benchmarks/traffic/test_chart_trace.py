"""The trace has the sizes, shares and lengths of questions that its description states, and is the same in every
run."""

import functools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import pyvips

from benchmarks.traffic import chart_trace
from benchmarks.traffic.chart_trace import (
    NUM_IMAGES,
    NUM_QUESTIONS,
    SHAPES,
    TOKENS,
    draw,
    draw_images,
    make_trace,
    order_of_questions,
    shape_of,
)


def words(text: str) -> list[int]:
    return [0] * len(text.split())


def letters(text: str) -> list[int]:
    return [0] * len(text)


def test_images_have_the_sizes_and_weights_that_are_stated():
    for shape in SHAPES:
        weights = []
        for number in [i for i in range(50) if shape_of(i) is shape][:3]:
            encoded = draw(number)
            image = pyvips.Image.new_from_buffer(encoded, "")
            assert (image.width, image.height, image.bands) == (shape.width, shape.height, 3)
            weights.append(len(encoded))
        assert 120e3 < np.mean(weights) < 180e3, (shape, weights)


def test_shares_of_the_sizes_hold_for_the_whole_and_for_its_beginning():
    for count in (100, NUM_IMAGES):
        kinds = Counter(shape_of(i) for i in range(count))
        for shape in SHAPES:
            assert kinds[shape] / count == pytest.approx(shape.share, abs=0.02)


def test_images_are_repeatable_and_all_different():
    image = draw(3)
    assert image == draw(3)
    assert image != draw(4)


def test_images_come_back_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = draw_images(2, first=7, cache=tmp_path)
    monkeypatch.setattr(chart_trace, "draw", None)
    assert draw_images(2, first=7, cache=tmp_path) == drawn
    assert len(list(tmp_path.iterdir())) == 1


def test_many_images_are_drawn_by_processes_to_the_same_end(monkeypatch: pytest.MonkeyPatch):
    alone = draw_images(2)
    monkeypatch.setattr(chart_trace, "IN_PROCESS", 1)
    assert draw_images(2) == alone


def test_questions_are_in_image_order_one_or_two_each():
    order = order_of_questions(NUM_IMAGES, NUM_QUESTIONS)
    assert len(order) == NUM_QUESTIONS
    assert order == sorted(order)
    assert Counter(Counter(order).values()) == {1: 518, 2: 991}


@pytest.fixture(scope="module")
def traces():
    """Gives the whole trace for an encoder, without its images."""

    @functools.cache
    def trace(encode):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chart_trace, "draw_images", lambda count, **_: [b"x"] * count)
            return make_trace(encode)

    return trace


@pytest.mark.parametrize("encode", [words, pytest.param(letters, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_questions_have_12_to_30_tokens_whatever_a_token_is(encode, traces):
    trace = traces(encode)
    assert len(trace.images) == NUM_IMAGES
    counts = [q.num_tokens for q in trace.questions]
    assert counts == [len(encode(q.text)) for q in trace.questions]
    assert (min(counts), max(counts)) == TOKENS
    assert sum(q.is_repeat for q in trace.questions) == NUM_QUESTIONS - NUM_IMAGES


@pytest.mark.slow
def test_a_short_trace_is_the_beginning_of_the_long_one(traces, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chart_trace, "draw_images", lambda count, **_: [b"x"] * count)
    whole, short = traces(words), make_trace(words, num_prompts=40)
    assert short.questions == whole.questions[:40]
    assert len(short.images) == whole.questions[39].image + 1
