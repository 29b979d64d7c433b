"""The metrics, against the definitions and examples of their papers and pages."""

import json

import pytest

from kestrel_client.commands.evaluation.place_metrics import inside, iou, matched
from kestrel_client.commands.evaluation.text_metrics import (
    anls,
    relaxed_correct,
    stated_count,
    vqa_accuracy,
    vqa_normal,
    yes_or_no,
)


@pytest.mark.parametrize(
    ("expected", "said", "right"),
    [
        ("100", "95", True),  # within 5 % of the gold answer
        ("100", "105.1", False),
        ("-20", "-19.5", True),
        ("0", "0", True),
        ("0", "0.01", False),
        ("12%", "0.12", True),
        ("12%", "12", False),
        ("Blue", "blue ", True),  # any other answer must be equal
        ("Blue", "light blue", False),
        ("nan", "nan", True),
        ("5", "five", False),
        ("5", "", False),
        ("20", "21", True),  # 1 / 20 is 5 %
        ("20", "21.01", False),
        ("0.8", "0.77", True),
        ("50%", "0.52", True),
        ("50%", "52%", True),
        ("1,000", "1000", False),  # not a number in ChartQA's own program either
        ("1e3", "1000", True),
        ("-5", "5", False),
    ],
)
def test_relaxed_accuracy(expected, said, right):
    assert relaxed_correct(expected, said) is right


def test_anls():
    # Biten et al. 2019: 1 - NL where NL is below 0.5, the best of all answers.
    assert anls(["coca cola", "coca cola company"], "Coca Cola") == 1
    assert anls(["abcd"], "abcx") == 0.75
    assert anls(["kitten"], "sitting") == pytest.approx(1 - 3 / 7)
    assert anls(["ab"], "ax") == 0  # NL is 0.5, which does not count
    assert anls(["short"], "a very long answer that is no answer") == 0
    assert anls(["same"], "") == 0
    assert anls([" Two  words"], "two words") == 1
    # One of 10 letters is wrong, and the mean over questions is that of 1, 0.9 and 0.
    three = [anls(["invoice"], "Invoice"), anls(["0123456789"], "0123456780"), anls(["a"], "b")]
    assert sum(three) / 3 == pytest.approx((1 + 0.9 + 0) / 3)
    assert anls([], "x") == 0


def test_vqa_accuracy():
    # An answer that at least three people gave is right for each person who did not, and for three of four who did.
    ten = ["yes"] * 3 + ["no"] * 7
    assert vqa_accuracy(ten, "yes") == pytest.approx((3 * 2 / 3 + 7 * 1) / 10)
    assert vqa_accuracy(["yes"] * 4 + ["no"] * 6, "yes") == 1
    assert vqa_accuracy(["yes"] + ["no"] * 9, "yes") == pytest.approx(9 * (1 / 3) / 10)
    assert vqa_accuracy(ten, "maybe") == 0
    assert vqa_accuracy(["one"], "1") == 1


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Cat", "cat"),
        ("two dogs", "2 dogs"),
        ("100,978", "100978"),
        ("2:50 pm", "2:50 pm"),
        ("girl's", "girl's"),
        ("dont", "don't"),
        ("3.5 m.", "3.5 m"),
        ("red-blue", "red blue"),
        ("stop!", "stop"),
    ],
)
def test_vqa_normal_form(text, normal):
    assert vqa_normal(text) == normal


def test_yes_or_no_and_counts():
    assert [yes_or_no(t) for t in ("Yes, there is.", "No", "There is not a dog. Yes", "a dog", "")] == [
        "yes", "no", "no", "yes", ""
    ]  # fmt: skip
    assert [stated_count(t) for t in ("7", "There are Seven dogs", "1,200", "3.5", "some", "")] == [
        7, 7, 1200, None, None, None
    ]  # fmt: skip
    assert stated_count("9" * 400) is None


def test_boxes():
    assert iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert iou((0, 0, 1, 1), (1, 1, 2, 2)) == 0
    assert matched([(0, 0, 2, 2), (5, 5, 6, 6)], [(0, 0, 2, 2), (0, 0, 2, 1.9)]) == [1.0]
    # Half of a box is found, so the overlap is 8 of 16: IoU 0.5, which counts as a match.
    assert matched([(0, 0, 4, 4)], [(0, 0, 4, 2)]) == [0.5]
    # One truth takes one box, the better one; the other is a false positive: F1 is 2 * 1 / (1 + 2).
    assert matched([(0, 0, 4, 4)], [(0, 0, 4, 3), (0, 0, 4, 4)]) == [1.0]
    assert inside(1, 1, (0, 0, 1, 1)) and not inside(1.1, 1, (0, 0, 1, 1))
    assert json.dumps(iou((0, 0, 0, 0), (0, 0, 0, 0))) == "0.0"
