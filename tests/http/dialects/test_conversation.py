"""Lists of messages become a question with history."""

import pytest

from kestrel_engine import InvalidRequest
from kestrel_grpc.http.dialects.conversation import Message, conversation


def messages(*given):
    return [
        Message(role, text, [b"image"] if "image" in text else [], f"messages[{index}]")
        for index, (role, text) in enumerate(given)
    ]


def test_messages_of_one_user_in_a_row_are_one_question():
    found = conversation(
        messages(
            ("system", "Be brief."),
            ("user", "image 1"),
            ("user", "What?"),
            ("assistant", "A cat."),
            ("user", "Where?"),
            ("user", "image 2"),
            ("user", "When?"),
        )
    )
    ((asked, answer),) = found.history
    assert (asked.question, asked.images, answer) == ("image 1\n\nWhat?", [b"image"], "A cat.")
    assert found.last.question == "Where?\n\nimage 2\n\nWhen?"
    assert found.last.images == [b"image"] and len(found.images) == 2
    assert found.system == "Be brief."


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([("assistant", "a")], "messages[0].role"),
        ([("user", "a"), ("system", "b")], "messages[1].role"),
        ([("user", "a"), ("assistant", "image")], "messages[1].content"),
        ([("user", "a"), ("assistant", "b")], "messages"),
        ([("user", "a"), ("assistant", "b"), ("user", " ")], "messages"),
        ([("tool", "a")], "messages[0].role"),
        ([], "messages"),
    ],
)
def test_a_list_that_is_no_conversation(given, field):
    with pytest.raises(InvalidRequest) as caught:
        conversation(messages(*given))
    assert caught.value.field == field


def test_many_messages_in_a_row_are_joined_once():
    """Joined for each message, they would take a minute."""
    found = conversation(messages(*[("user", "x" * 400)] * 60_000))
    assert len(found.last.question) == 60_000 * 402 - 2
