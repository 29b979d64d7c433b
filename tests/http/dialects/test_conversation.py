"""Lists of messages become a question with history."""

import pytest

from kestrel_engine import InvalidRequest
from kestrel_grpc.http.dialects.conversation import IMAGE_ALONE, Message, conversation
from tests.http.conftest import data_url


def messages(*given):
    """A text that begins with "image" comes with an image; "image" alone is no text."""
    return [
        Message(
            role,
            "" if text == "image" else text,
            [b"image"] if "image" in text else [],
            ("messages", index),
        )
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
    ((question, answer),) = found.history
    assert (question.text, question.images, answer) == ("image 1\n\nWhat?", [b"image"], "A cat.")
    assert found.last.text == "Where?\n\nimage 2\n\nWhen?"
    assert found.last.images == [b"image"] and len(found.images) == 2
    assert found.system == "Be brief." and found.begun == ""


ALL = {
    "a greeting": ([("assistant", "Hi!"), ("user", "a")], "Hi!", [], "a", ""),
    "a greeting after system text": ([("system", "s"), ("assistant", "Hi!"), ("user", "a")], "s\n\nHi!", [], "a", ""),
    "a greeting before an image": ([("assistant", "Hi!"), ("user", "image")], "Hi!", [], IMAGE_ALONE, ""),
    "system text later": ([("user", "a"), ("system", "s"), ("user", "b")], "", [], "a\n\ns\n\nb", ""),
    "system text after an answer": (
        [("user", "a"), ("assistant", "b"), ("developer", "s"), ("user", "c")],
        "", [("a", "b")], "s\n\nc", "",
    ),
    "system text at the end": ([("user", "a"), ("assistant", "b"), ("system", "s")], "", [("a", "b")], "s", ""),
    "system text alone": ([("system", "s"), ("system", "t")], "", [], "s\n\nt", ""),
    "system text for an image": ([("system", "s"), ("user", "image")], "", [], "s", ""),
    "two answers": (
        [("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")],
        "", [("a", "b\n\nc")], "d", "",
    ),
    "an image alone": ([("user", "image")], "", [], IMAGE_ALONE, ""),
    "an image alone, earlier": (
        [("user", "image"), ("assistant", "b"), ("user", "c")], "", [(IMAGE_ALONE, "b")], "c", "",
    ),
    "an image alone, later": (
        [("user", "a"), ("assistant", "b"), ("user", "image")], "", [("a", "b")], IMAGE_ALONE, "",
    ),
    "a message without text": (
        [("user", "a"), ("assistant", "b"), ("user", ""), ("assistant", "c"), ("user", "d")],
        "", [("a", "b\n\nc")], "d", "",
    ),
    "the beginning of an answer": ([("user", "a"), ("assistant", "b ")], "", [], "a", "b "),
    "an answer without text": ([("user", "a"), ("assistant", "")], "", [], "a", ""),
}  # fmt: skip


@pytest.mark.parametrize(("given", "system", "history", "question", "begun"), ALL.values(), ids=ALL)
def test_a_conversation_of_another_form(given, system, history, question, begun):
    found = conversation(messages(*given))
    assert found.system == system and found.begun == begun
    assert [(question.text, answer) for question, answer in found.history] == history
    assert found.last.text == question


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([("assistant", "a")], "messages"),
        ([("user", "a"), ("assistant", "image")], "messages[1].content"),
        ([("user", "a"), ("assistant", "b"), ("user", " ")], "messages"),
        ([("tool", "a")], "messages[0].role"),
        ([("user", " ")], "messages"),
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
    assert len(found.last.text) == 60_000 * 402 - 2


async def test_the_answers_of_both_dialects_are_those_of_the_query(http):
    """By their prompts, of which each token counts."""
    _, client = await http()
    url = data_url()
    asks = [{"type": "image_url", "image_url": {"url": url}}]
    alone = {"role": "user", "content": asks}
    begun = [alone, {"role": "assistant", "content": "It shows"}]
    settings = {"temperature": 0, "max_tokens": 5}
    counts = []
    for talk in ([alone], begun):
        body = {"messages": talk, **settings}
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        counts.append(whole["usage"]["prompt_tokens"])
        content = whole["choices"][0]["message"]["content"]
        assert not content.startswith("It shows")
        plain = [{**talk[0], "content": "", "images": [url]}, *talk[1:]]
        options = {"temperature": 0, "num_predict": 5}
        body = {"messages": plain, "options": options, "stream": False}
        same = (await client.post("/api/chat", json=body)).json()
        assert same["message"]["content"] == content
        assert same["prompt_eval_count"] == counts[-1]
    assert counts[1] == counts[0] + len("It shows")
    wrong = {"messages": begun, **settings, "reasoning": True}
    error = (await client.post("/v1/chat/completions", json=wrong)).json()["error"]
    assert error["param"] == "messages" and "before the answer" in error["message"]
    wrong["messages"] = [
        {"role": "user", "content": [*asks, {"type": "text", "text": "Detect: a"}]}
    ]
    wrong["messages"].append(begun[1])
    error = (await client.post("/v1/chat/completions", json=wrong)).json()["error"]
    assert "must end with a user message for boxes" in error["message"]
    body = {"prompt": "", "images": [url], "stream": False, "options": {"num_predict": 5}}
    described = (await client.post("/api/generate", json=body)).json()
    assert described["prompt_eval_count"] == counts[0] and described["response"]
