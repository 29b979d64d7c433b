import pytest

from kestrel_engine.skills.objects.svg_path import PathError, SvgPathDecoder, format_number


def decode(tokens: str) -> tuple[str, list[str]]:
    decoder = SvgPathDecoder()
    pieces = [decoder.push(token) for token in tokens.split()]
    pieces.append(decoder.finish())
    return decoder.path, [piece for piece in pieces if piece]


def test_integers_are_960ths_with_at_most_three_decimals():
    assert format_number(480) == "0.5"
    assert format_number(960) == "1"
    assert format_number(0) == "0"
    assert format_number(1) == "0.001"
    assert format_number(320) == "0.333"
    assert format_number(-480) == "-0.5"
    assert format_number(-0) == "0"


def test_pieces_are_commands_and_join_to_the_path():
    path, pieces = decode("M 0 480 L 960 480 240 240 z")
    assert path == "M 0 0.5 L 1 0.5 0.25 0.25 z"
    assert pieces == ["M 0 0.5", "L 1 0.5 0.25 0.25", "z"]
    assert " ".join(pieces) == path


def test_a_lone_minus_negates_the_next_integer_only():
    assert decode("l - 480 480 - 96 0")[0] == "l -0.5 0.5 -0.1 0"


def test_a_dangling_minus_and_an_odd_number_are_dropped():
    assert decode("M 480 480 96 -")[0] == "M 0.5 0.5"
    assert decode("M 480 480 - L 96 96")[0] == "M 0.5 0.5 L 0.1 0.1"


def test_nothing_is_an_empty_path():
    assert decode("") == ("", [])


@pytest.mark.parametrize("tokens", ["480 M", "M 1.5 2", "M x 2", "MM 1 2", "- M", "M 1 2 hello"])
def test_anything_else_is_an_error_naming_the_token(tokens):
    with pytest.raises(PathError, match="token"):
        decode(tokens)
