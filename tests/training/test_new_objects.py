"""Images of new objects: the labels of each of them are true."""

from __future__ import annotations

import pytest

from kestrel_grpc.scenes.paths import outline
from kestrel_grpc.scenes.scoring import inside
from kestrel_grpc.scenes.vocabulary import COLOURS, SHAPES
from training.new_objects import (
    NEAR_COLOURS,
    NEW_COLOURS,
    Subject,
    coloured,
    contrast,
    examples,
    hexagons,
    known,
    more_contrast,
)

SEEDS = [f"test/{index}" for index in range(40)]
SUBJECTS = [hexagons(), known(None), *(coloured(name) for name in (*NEW_COLOURS, "purple"))]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_what_is_said_about_a_picture_is_true(subject: Subject) -> None:
    shown = said = 0
    for seed in SEEDS:
        picture = subject.draw(seed, False)
        there = {tuple(map(round, (*each.point, *each.box))) for each in picture.objects}
        names = {subject.sorted_name(each.sort) for each in picture.objects}
        names |= {subject.name} if there else set()
        width, height = picture.scene.width, picture.scene.height
        for line in (
            examples(seed, subject, picture)
            + contrast(seed, picture)
            + more_contrast(seed, subject, picture)
        ):
            said += 1
            if "object" in line:
                name, found = line["object"], line.get("points", line.get("boxes"))
                own = [
                    each
                    for each in picture.objects
                    if name == subject.name or name == subject.sorted_name(each.sort)
                ]
                assert len(found) == len(own)
                labelled = {
                    tuple(map(round, each.box if "boxes" in line else each.point)) for each in own
                }
                sides = (width, height)
                assert labelled == {
                    tuple(round(value * sides[i % 2]) for i, value in enumerate(each))
                    for each in found
                }
            elif line["question"].startswith("Is there"):
                name = line["question"].removesuffix("?").split(maxsplit=3)[-1]
                assert line["answer"] == ("yes" if name in names else "no")
            elif line["question"].startswith("How many"):
                assert line["answer"] == str(len(there))
            else:
                noun = line["question"].removesuffix("?").split()[-1]
                assert noun == "hexagon" or noun in SHAPES
        shown += bool(there)
    assert shown > 5 and said > 9 * len(SEEDS)


@pytest.mark.parametrize("name", NEW_COLOURS)
def test_pictures_with_contrast_show_and_ask_for_what_is_near(name: str) -> None:
    subject, near = coloured(name), {COLOURS.index(each) for each in NEAR_COLOURS[name]}
    with_near = asked = 0
    for seed in SEEDS:
        picture = subject.draw(seed, True)
        with_near += any(shape.colour in near for shape in picture.scene.shapes)
        lines = contrast(seed, picture)
        asked += sum(line.get("answer") in NEAR_COLOURS[name] for line in lines)
        assert contrast(seed, subject.draw(seed, True)) == lines
    assert with_near > len(SEEDS) / 2 and asked > 5


def test_a_point_is_on_the_shape() -> None:
    """The centre of a crescent's box is not."""
    subject = coloured("lavender")
    pictures = [subject.draw(seed, False) for seed in SEEDS]
    named = [(picture, each) for picture in pictures for each in picture.objects]
    assert any(SHAPES[each.sort] == "crescent" for _, each in named)
    for picture, each in named:
        own = next(shape for shape in picture.scene.shapes if shape.box == each.box)
        assert inside(outline(own), *each.point)
