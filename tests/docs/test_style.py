"""The check of the style finds what it should, and leaves plain English alone."""

import pytest

from tests.docs.style import PAGES, check, comments, faults, texts


@pytest.mark.parametrize(
    "text",
    [
        "The times are those of one run.",
        "It takes the one that waits.",
        "The names are checked, as that of a file.",
        "The engine finds as many as the asked.",
        "This is no error.",
        "A server more takes its part of the images.",
        "It waits 5 s more.",
        "A question behind an image costs little.",
        "word " * 31,
    ],
)
def test_a_habit_is_found(text: str):
    assert list(faults(text))


@pytest.mark.parametrize(
    "text",
    [
        "There is no queue, and the queue is no longer full.",
        "Those images are small, and those are not.",
        "It has one or more names, and a little more time.",
        "Envoy runs behind a proxy, and the server behind the port.",
        "The asked pairs are few. The one image is large.",
        "Ten words stand here. " * 10,
        "`a b c d e f g h i j k l m n o p` and [a link](" + "a/" * 40 + ") are short.",
    ],
)
def test_plain_english_is_left_alone(text: str):
    assert not list(faults(text))


def test_prose_lists_and_cells_are_read_and_code_is_not():
    page = (
        "# A b\n\ntwo\nlines\n\n    code\n\n- item\n  goes on\n\n| a | b; c |\n\n```\nfence\n```\n"
    )
    assert list(texts(page)) == ["A b", "two lines", "item goes on", "a", "b", "c"]


def test_comments_of_protos_are_read():
    assert list(comments("// One\n// text.\n//\n// Two.\nint32 a = 1;\n")) == ["One text.", "Two."]


def test_the_pages_keep_to_it():
    assert len(PAGES) > 40
    assert [fault for page in PAGES for fault in check(page)] == []
