"""Images of new objects: the labels of each of them are true."""

from __future__ import annotations

import pytest

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
        there = {(round(each.centre[0]), round(each.centre[1])) for each in picture.objects}
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
                for *low, x, y in found:
                    centre = ((low[0] + x) / 2, (low[1] + y) / 2) if low else (x, y)
                    assert (round(centre[0] * width), round(centre[1] * height)) in there
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
