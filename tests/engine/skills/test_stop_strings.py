"""Stop strings, compared with a plain search in the whole text."""

import random

import pytest

from kestrel_engine.errors import InvalidRequest
from kestrel_engine.skills import CaptionSkill, QuerySkill
from kestrel_engine.skills.text.stop_strings import StopStrings
from kestrel_engine.types.step import StepToken


def cut(text, stops):
    """The text before the stop string that is complete first, and the characters read until then; by definition."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], end
    return text, None


def in_pieces(text, stops, lengths):
    """What StopStrings returns for each piece and at the end, and whether it found a stop string."""
    strings, returned, at = StopStrings(stops), [], 0
    while at < len(text):
        length = next(lengths)
        returned.append(strings.push(text[at : at + length]))
        at += length
    return [*returned, strings.finish()], strings.found


def random_texts():
    draw = random.Random(12)
    for _ in range(3000):
        letters = draw.choice(["ab", "abc", "aé🐞"])
        text = "".join(draw.choices(letters, k=draw.randint(0, 24)))
        stops = [
            "".join(draw.choices(letters, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 4))
        ]
        yield draw, text, stops


def test_random_texts_are_cut_as_a_plain_search_cuts_them():
    found = 0
    for draw, text, stops in random_texts():
        expected, end = cut(text, stops)
        lengths = iter(lambda draw=draw: draw.randint(1, 5), None)
        returned, was_found = in_pieces(text, stops, lengths)
        assert ("".join(returned), was_found) == (expected, end is not None), (text, stops)
        found += was_found
    assert 500 < found < 2500, "both outcomes are tested"


def test_nothing_is_held_back_without_need_and_nothing_is_shown_too_early():
    """After every character, exactly the longest end of the text that begins a stop string is held back."""
    for _, text, stops in random_texts():
        strings, shown = StopStrings(stops), ""
        for index, character in enumerate(text, 1):
            shown += strings.push(character)
            if strings.found:
                break
            held = max(
                length
                for length in range(index + 1)
                if any(stop.startswith(text[index - length : index]) for stop in stops)
            )
            assert shown == text[: index - held], (text[:index], stops)


@pytest.mark.parametrize("skill", [QuerySkill(), CaptionSkill()], ids=["query", "caption"])
@pytest.mark.parametrize(
    ("stop", "field", "message"),
    [
        (5, "stop", "a text or a list of texts"),
        (b"x", "stop", "a text or a list of texts"),
        ([""], r"stop\[0\]", "must not be empty"),
        (["a", 3], r"stop\[1\]", "must be text"),
        (["é" * 129], r"stop\[0\]", "has 258 UTF-8 bytes, the limit is 256"),
        (["x"] * 17, "stop", "has 17 texts, the limit is 16"),
    ],
)
def test_invalid_stop_strings_are_refused(moondream3, skill, stop, field, message):
    arguments = {"question": "q"} if skill.name == "query" else {}
    with pytest.raises(InvalidRequest, match=f"^{field}: .*{message}"):
        skill.build(arguments, {"stop": stop}, moondream3)


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_one_text_is_one_stop_string(moondream3, stop):
    request = CaptionSkill().build({}, {"stop": stop}, moondream3)
    assert request.stop == ("END",)


def test_the_tokens_up_to_the_end_of_the_stop_string_count(moondream3, codec):
    """A character of two tokens, then a stop string over three tokens."""
    request = CaptionSkill().build({}, {"stop": ["🐞"]}, moondream3)
    output = CaptionSkill().new_output(request, moondream3)
    ids, texts = codec.encode("né🐞 und"), []
    for number in ids:
        texts += [update.text for update in output.push(StepToken(number))]
        if output.is_complete:
            break
    assert texts == ["n", "é"]
    assert output.finish() == []
    assert output.output() == {"caption": "né"}
    assert output.token_ids == tuple(codec.encode("né🐞"))
