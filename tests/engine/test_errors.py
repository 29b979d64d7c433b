"""Errors of requests: where they are, and the same error elsewhere."""

import pytest

from kestrel_engine import AdapterRefused, InvalidRequest, path_text


@pytest.mark.parametrize(
    ("given", "path", "text"),
    [
        ("", (), ""),
        ("question", ("question",), "question"),
        (("images", 1, "region"), ("images", 1, "region"), "images[1].region"),
        (("boxes", 2, 0), ("boxes", 2, 0), "boxes[2][0]"),
    ],
)
def test_a_field_is_a_path(given, path, text):
    error = InvalidRequest(given, "is bad")
    assert (error.path, error.field, path_text(path)) == (path, text, text)
    assert str(error) == f"{text}: is bad"


def test_an_error_elsewhere_keeps_the_rest():
    first = AdapterRefused("is not allowed")
    first.most_tokens = 3
    second = first.at(("options", *first.path))
    assert type(second) is AdapterRefused and second is not first
    assert (second.field, second.message, second.most_tokens) == (
        *("options.adapter", "is not allowed", 3),
    )
    assert (first.field, str(second)) == ("adapter", "options.adapter: is not allowed")
